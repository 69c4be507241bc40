"""DualPipeV: joint forward and backward passes on the V placement.

"DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, and the schedule's description at
https://github.com/deepseek-ai/DualPipe, here for p ranks of two chunks.
"""

from __future__ import annotations

from collections import deque

from ..actions import Action, AnyAction, Joint, Op


def dualpipev(pp: int, microbatches: int) -> list[list[AnyAction]]:
    """Every rank's passes; most of them are joint, to hide the messages inside each of them.

    The pipeline is full from m = 2p on; fewer microbatches take the order for 2p without the
    surplus: dropping all passes of a microbatch leaves a valid order valid.

    At F=B=W, without hops, and with joint actions that take as long as both passes: for m >= 2p
    the makespan is 6m + 2(p-1) chunk units, i.e. the published bubble (p-1)(F&B + BW - 3W), each of
    one chunk; for p < m <= 2p it is 4m + 6p - 2, for m <= p it is 4m + 5p - 3. Peak of rank i:
    min(2m, m+1+i, 2p+1) activation sets at any costs.
    """
    most = max(microbatches, 2 * pp)
    ranks = [_Rank(pp, rank, most).actions for rank in range(pp)]
    if most == microbatches:
        return ranks
    return [[kept for a in row for kept in _without_surplus(a, microbatches)] for row in ranks]


def _without_surplus(action: AnyAction, microbatches: int) -> list[AnyAction]:
    kept = [part for part in action.parts if part.microbatch < microbatches]
    return [action] if len(kept) == len(action.parts) else list(kept)


class _Rank:
    """One rank's list, built in eight steps.

    Attributes:
        actions: the list.
    """

    def __init__(self, pp: int, rank: int, microbatches: int) -> None:
        self.actions: list[AnyAction] = []
        self._stages = (rank, 2 * pp - 1 - rank)
        self._next: dict[tuple[Op, int], int] = {}  # microbatch by (F or B, chunk)
        self._weights: deque[Action] = deque()
        after = pp - rank - 1  # ranks behind this one
        for _ in range(2 * after):
            self._add(self._forward(0))
        for _ in range(rank + 1):
            self._add(self._forward(0), self._forward(1))
        for _ in range(after):
            self._split_backward(1)
            self._weight()
            self._add(self._forward(1))
        for i in range(microbatches - 2 * pp + rank + 1):
            if i == 0 and not after:
                # On the last rank the first F feeds the B beside it: together they would wait.
                self._add(self._forward(0), self._backward(1))
            else:
                self._joint(0, 1)
            self._joint(1, 0)
        for _ in range(after):
            self._add(self._backward(1))
            self._joint(1, 0)
        # The second half of these splits its backward passes, so that other ranks wait less.
        for i in range(2 * rank + 2):
            if i <= rank:
                self._add(self._backward((i + 1) % 2))
            else:
                self._split_backward((i + 1) % 2)
        for _ in range(after):
            self._weight()
            self._split_backward(0)
        while self._weights:
            self._weight()

    def _add(self, *actions: AnyAction) -> None:
        self.actions += actions

    def _pass(self, op: Op, chunk: int) -> Action:
        kind = Op.F if op is Op.F else Op.B
        microbatch = self._next.get((kind, chunk), 0)
        self._next[kind, chunk] = microbatch + 1
        return Action(op, self._stages[chunk], microbatch)

    def _forward(self, chunk: int) -> Action:
        return self._pass(Op.F, chunk)

    def _backward(self, chunk: int) -> Action:
        return self._pass(Op.BW, chunk)

    def _joint(self, forward: int, backward: int) -> None:
        self._add(Joint(self._forward(forward), self._backward(backward)))

    def _split_backward(self, chunk: int) -> None:
        self._add(self._pass(Op.B, chunk))
        _, stage, microbatch = self.actions[-1].parts[0]
        self._weights.append(Action(Op.W, stage, microbatch))

    def _weight(self) -> None:
        self._add(self._weights.popleft())
