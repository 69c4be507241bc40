"""Placement: rank and chunk of every stage of the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from .._input import shown


class Placement:
    """A one-to-one map between stages 0..p*v-1 and (rank, chunk).

    Args:
        stages: ``stages[rank][chunk]`` is the stage that lies there; every rank has the same
            number of chunks and a rank's chunks are in model order (stages increase with chunk).

    Raises:
        ValueError: the rows are ragged or empty, or do not cover 0..p*v-1 exactly once.
    """

    def __init__(self, stages: Sequence[Sequence[int]]) -> None:
        rows = tuple(tuple(row) for row in stages)
        if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
            raise ValueError(
                f"placement needs equally many chunks on every rank, got {shown(rows)}"
            )
        flat = sorted(stage for row in rows for stage in row)
        if flat != list(range(len(flat))):
            raise ValueError(
                f"placement must hold every stage 0..{len(flat) - 1} once, got {shown(rows)}"
            )
        for rank, row in enumerate(rows):
            if list(row) != sorted(row):
                raise ValueError(
                    f"stages of rank {rank} must increase with the chunk, got {shown(row)}"
                )
        self.stages = rows
        self._where = {s: (r, c) for r, row in enumerate(rows) for c, s in enumerate(row)}

    @classmethod
    def loop(cls, pp: int, chunks: int = 1) -> Placement:
        """Megatron's own order: stage = chunk * pp + rank."""
        return cls([[c * pp + r for c in range(chunks)] for r in range(pp)])

    @classmethod
    def vee(cls, pp: int) -> Placement:
        """V order, two chunks: down the ranks and back up (CM, section 4: V-shape blocks)."""
        return cls([[r, 2 * pp - 1 - r] for r in range(pp)])

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """Model chunks (Megatron's virtual pipeline stages) on each rank."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        """Stages of the whole model, pp * chunks."""
        return len(self._where)

    @cached_property
    def edges(self) -> frozenset[tuple[int, int]]:
        """(source, target) of all messages of passes: ranks of successive stages, both ways."""
        ranks = [self.rank_of(stage) for stage in range(self.num_stages)]
        forward = [(a, b) for a, b in pairwise(ranks) if a != b]
        return frozenset([*forward, *((b, a) for a, b in forward)])

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self._where[stage][0]

    def chunk_of(self, stage: int) -> int:
        """The chunk, on its rank, that is ``stage``."""
        return self._where[stage][1]

    def is_vee(self) -> bool:
        """True if this is the V placement of ``vee``."""
        # Row by row, without making another: this is asked every iteration.
        last = 2 * self.pp - 1
        return all(row == (rank, last - rank) for rank, row in enumerate(self.stages))

    def is_loop(self) -> bool:
        """True if this is Megatron's own placement."""
        return self == Placement.loop(self.pp, self.chunks)

    @property
    def looped(self) -> int:
        """Chunks of a rank in Megatron's own placement; 1 in another one."""
        return self.chunks if self.is_loop() else 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def __repr__(self) -> str:
        return f"Placement({[list(row) for row in self.stages]})"
