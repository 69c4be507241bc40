"""DualPipeV: joint forward and backward passes on the V placement.

"DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, and the schedule's description at
https://github.com/deepseek-ai/DualPipe, here for p ranks of two chunks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

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
    ranks = [_row(_words(pp, rank, most), (rank, 2 * pp - 1 - rank)) for rank in range(pp)]
    if most == microbatches:
        return ranks
    return [[kept for a in row for kept in _without_surplus(a, microbatches)] for row in ranks]


def _without_surplus(action: AnyAction, microbatches: int) -> list[AnyAction]:
    kept = [part for part in action.parts if part.microbatch < microbatches]
    return [action] if len(kept) == len(action.parts) else list(kept)


def _words(pp: int, rank: int, microbatches: int) -> list[str]:
    """One rank's passes with their chunks, in eight steps; of W's, those before the last B."""
    after = pp - rank - 1  # ranks behind this one
    steady = ["F0+BW1", "F1+BW0"] * (microbatches - 2 * pp + rank + 1)
    if not after:
        # On the last rank the first F feeds the B beside it: together they would wait.
        steady[:1] = ["F0", "BW1"]
    # The second half of these splits its backward passes, so that other ranks wait less.
    last = ["BW1", "BW0"] * (rank + 1)
    last[rank + 1 :] = [word.replace("BW", "B") for word in last[rank + 1 :]]
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * (rank + 1),
        *["B1", "W", "F1"] * after,
        *steady,
        *["BW1", "F1+BW0"] * after,
        *last,
        *["W", "B0"] * after,
    ]


def _row(words: Sequence[str], stages: tuple[int, int]) -> list[AnyAction]:
    """The same as actions: every chunk's passes in microbatch order, W's in that of their B's."""
    row: list[AnyAction] = []
    following: Counter[tuple[bool, int]] = Counter()  # microbatches, of (is F, chunk)
    weights: deque[Action] = deque()
    for word in words:
        if word == "W":
            row.append(weights.popleft())
            continue
        parts = []
        for one in word.split("+"):
            op, chunk = Op(one[:-1]), int(one[-1])
            parts.append(Action(op, stages[chunk], following[op is Op.F, chunk]))
            following[op is Op.F, chunk] += 1
        row.append(Joint(*parts) if len(parts) > 1 else parts[0])
        if parts[0].op is Op.B:
            weights.append(parts[0]._replace(op=Op.W))
    return [*row, *weights]
