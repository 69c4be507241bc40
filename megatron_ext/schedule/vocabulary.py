"""Passes of vocabulary layers that are sharded over all pipeline ranks (arXiv 2411.05288).

Every rank has a part of the embedding's and of the output layer's vocabulary, and a pass of its own
for every microbatch. All of them name their rank's first stage: ``S4.1``.

- ``S``: the rank's logits of the last stage's output, their statistics (section 4), and its part of
  the input gradient, up to a factor: one barrier between the last F and the first B (algorithm 2).
- ``T``: gradient of the rank's output weights.
- ``E``, ``G``: the rank's part of the embeddings, and the gradient of its embedding weights.

Between them are collectives of all ranks, asynchronous, one after the other: ``SHARE_X`` gives the
last stage's output to all; ``JOIN_S`` joins the statistics and the input gradient on the last
stage's rank; ``SHARE_D`` gives the gradient of every token's loss, which the last stage's B
computes first of all, to all; ``JOIN_E`` joins the embeddings on the first stage's rank;
``SHARE_G`` gives their gradient to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import Action, AnyAction, Op, Operation
from .effects import passes, peak, results
from .placement import Placement

AHEAD = 2  # microbatches whose embeddings are there before stage 0 has begun the first of them


class VocabularyOp(Operation):
    """An operation of sharded vocabulary layers."""

    S = "S"
    T = "T"
    E = "E"
    G = "G"
    SHARE_X = "SHARE_X"
    JOIN_S = "JOIN_S"
    SHARE_D = "SHARE_D"
    JOIN_E = "JOIN_E"
    SHARE_G = "SHARE_G"


S, T, E, G = VocabularyOp.S, VocabularyOp.T, VocabularyOp.E, VocabularyOp.G
PASSES = (S, T, E, G)
_Ends = list[tuple[Operation, int]]


class Vocabulary:
    """What the vocabulary passes of a schedule wait for, and who waits for them.

    Args:
        placement: of the stages.
        embeddings: the embedding is sharded too.
        training: there are backward passes; without them (evaluation) E and S are all there is.

    Attributes:
        stages: that each rank's vocabulary passes name: its first one.
        sources: of a collective: (kind, stage) of the results that it carries, of the same
            microbatch.
        waiters: of a collective: (kind of their results, stage) of the passes that wait for it.
    """

    def __init__(
        self, placement: Placement, embeddings: bool = True, training: bool = True
    ) -> None:
        self.embeddings, self.training = embeddings, training
        self.last = placement.num_stages - 1
        self.stages = [row[0] for row in placement.stages]

        def every(op: Operation) -> _Ends:
            return [(op, stage) for stage in self.stages]

        last_b: _Ends = [(Op.B, self.last)]
        # Of every collective: what it carries, and who waits for it.
        table: dict[VocabularyOp, tuple[_Ends, _Ends]] = {
            VocabularyOp.SHARE_X: ([(Op.F, self.last)], every(S)),
            VocabularyOp.JOIN_S: (every(S), last_b),
        }
        if training:
            table[VocabularyOp.SHARE_D] = last_b, every(T)
        if embeddings:
            table[VocabularyOp.JOIN_E] = every(E), [(Op.F, 0)]
        if embeddings and training:
            table[VocabularyOp.SHARE_G] = [(Op.B, 0)], every(G)
        self.sources = {one: carried for one, (carried, _) in table.items()}
        self.waiters = {one: waiting for one, (_, waiting) in table.items()}
        self._before = {key: one for one, waiting in self.waiters.items() for key in waiting}

    @property
    def passes(self) -> tuple[VocabularyOp, ...]:
        """Of every rank and microbatch."""
        found = (S, E) if not self.training else PASSES
        return found if self.embeddings else tuple(op for op in found if op in (S, T))

    def before(self, op: Operation, stage: int) -> VocabularyOp | None:
        """The collective that a pass waits for; None: there is none."""
        return self._before.get((results(op)[0], stage))

    def behind(self, op: Operation, stage: int) -> list[VocabularyOp]:
        """The collectives that carry the result of a pass."""
        key = results(op)[0], stage
        return [one for one, found in self.sources.items() if key in found]

    def actions(self, op: Operation, microbatch: int) -> list[Action]:
        """An operation's action of every rank."""
        return [Action(op, stage, microbatch) for stage in self.stages]


def peak_held(
    ranks: Sequence[Sequence[AnyAction]], sizes: Sequence[int] | None = None
) -> list[int]:
    """Most microbatches of each rank between S and T, whose probabilities it keeps.

    Depends on the order only; a microbatch counts from its S's start to its T's end. 0 where there
    are no T's: evaluation keeps nothing.

    Args:
        ranks: actions of every rank.
        sizes: that units count with; None: 1 each.
    """
    held: dict[Operation, int] = {S: 1, T: -1}

    def changes(row: Sequence[AnyAction]) -> Iterator[int]:
        for op, _, unit in passes(row):
            yield held.get(op, 0) * (1 if sizes is None else sizes[unit])

    some = [any(action.op is T for action in passes(row)) for row in ranks]
    return [peak(changes(row)) if t else 0 for row, t in zip(ranks, some)]
