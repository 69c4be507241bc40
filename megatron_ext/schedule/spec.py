"""Requests for a schedule: what ``select`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from .costs import Costs, merged
from .generators import GENERATORS, NAMES, default_effort
from .link import Link
from .memory_cap import Cap
from .placement import Placement
from .schedule import Schedule
from .units import ends_of, times_of

AUTO = "auto"  # not a schedule of its own: the fastest that fits

_EQUAL = Costs()


class Cut(NamedTuple):
    """Slices of a sequence, the same for every microbatch.

    Attributes:
        ends: of every slice, in tokens; the last one is the sequence's length.
        attention: the share of core attention in the F of a whole sequence.
        overhead: of a whole W, what the W of every slice takes however short it is.
        joined: one W for all slices of a microbatch.
    """

    ends: tuple[int, ...]
    attention: Fraction
    overhead: Fraction = Fraction(0)
    joined: bool = False

    @classmethod
    def of(cls, tokens: int, slices: int, attention: Fraction, multiple: int) -> Cut:
        """Slices whose F's take equally long, of multiples of ``multiple`` tokens.

        Raises:
            ValueError: there are not as many multiples.
        """
        if tokens % multiple or tokens // multiple < slices:
            raise ValueError(
                f"a sequence of {tokens} tokens does not make {slices} slices of multiples of "
                f"{multiple}"
            )
        blocks, ends = tokens // multiple, list[int]()
        for number, end in enumerate(ends_of(slices, attention)[1:], start=1):
            least = ends[-1] + 1 if ends else 1
            ends.append(min(max(least, round(end * blocks)), blocks - (slices - number)))
        ends[-1] = blocks
        return cls(tuple(multiple * end for end in ends), attention)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every slice."""
        return [b - a for a, b in zip((0, *self.ends), self.ends)]

    def costs(self, costs: Costs, microbatches: int) -> Costs:
        """``costs`` with those of every unit."""
        ends = [Fraction(end, self.ends[-1]) for end in (0, *self.ends)]
        overhead = 0 if self.joined else self.overhead
        rows = [
            (forward, backward, (1 - overhead) * share + overhead, share)
            for forward, backward, share in times_of(ends, self.attention)
        ]
        return costs.with_units(rows * microbatches)


@dataclass(frozen=True)
class OffloadSpec:
    """Which activation sets leave the device, and how.

    Attributes:
        wanted: as ``offload``'s ``chunks``.
        link: transfer times of every rank or stage.
    """

    wanted: str | int
    link: Link


@dataclass(frozen=True)
class ScheduleSpec:
    """A request for a schedule.

    Attributes:
        name: a schedule's, or ``auto``: the fastest of ``names`` that keeps ``cap``; of those
            equally fast the first in the registry.
        pp: pipeline ranks, >= 2.
        microbatches: of one iteration, >= 1.
        chunks: model chunks a rank, for ``auto`` of the schedules that take any number (default
            2); None: the schedule's own.
        costs: that the order is made for. Per-stage costs given for more stages than a schedule
            has are summed.
        cap: on every rank. Without offload only ``auto`` and schedules at any cap take one; with
            offload it is on what stays on the device. None: none, for ``auto`` 1F1B's peak.
        group_size: of ``gis``.
        offload: None: nothing leaves the device.
        effort: as ``generate``.
        names: that ``auto`` may choose from.
        order: what to offload, in place of a generated order (a schedule file).
        times: costs of the passes as they will run, if the order is not made for those.
        overlap: forward and backward passes run in pairs where that is faster (``passes.join``), by
            the communication that the costs have; in the memory of the cap, else with one set more
            than without pairs. Not of a schedule file, which has its own.
        slices: that each microbatch is cut into; empty: none is.
        joined: one W for all slices of a microbatch.
        reorder: microbatches may run in another order than the costs give them in.
        barriers: 1 if the vocabulary is sharded over all ranks (``vocabulary``), whose passes'
            times the costs have, else 0. The cap is of the whole schedule.
    """

    name: str
    pp: int
    microbatches: int
    chunks: int | None = None
    costs: Costs = _EQUAL
    cap: Cap | None = None
    group_size: int | None = None
    offload: OffloadSpec | None = None
    names: tuple[str, ...] = NAMES
    order: Schedule | None = None
    times: Costs | None = None
    effort: float = field(default_factory=default_effort)
    barriers: int = 0
    overlap: bool = False
    slices: tuple[int, ...] = ()
    joined: bool = False
    reorder: bool = False

    @property
    def has_units(self) -> bool:
        """True if microbatches are cut into slices, or differ in their costs."""
        return bool(self.slices) or self.costs.units is not None

    @property
    def placement(self) -> Placement:
        """Where the stages of the schedule named lie."""
        if self.order is not None:
            return self.order.placement
        chunks = self.chunks or GENERATORS[self.name].default_chunks
        vee = GENERATORS[self.name].placement == "vee"
        return Placement.vee(self.pp) if vee else Placement.loop(self.pp, chunks)

    @property
    def splits_backward(self) -> bool:
        """True if the schedule named has B and W passes of their own."""
        if self.order is not None:
            return self.order.splits_backward
        return GENERATORS[self.name].split_backward

    def order_alone(self) -> ScheduleSpec:
        """The same without offload, and without a cap that only offload could keep."""
        capped = self.order is None and GENERATORS[self.name].takes_memory_cap
        return replace(self, offload=None, cap=self.cap if capped else None)

    def sliced(self, cut: Cut | None) -> ScheduleSpec:
        """The same with the sequence of every microbatch cut; a schedule file is cut already."""
        if cut is None or self.order is not None:
            return self
        m = self.microbatches
        costs = cut.costs(self.costs, m)
        return replace(self, slices=(len(cut.ends),) * m, costs=costs, joined=cut.joined)

    def of(self, name: str) -> ScheduleSpec:
        """The same for one schedule, with the chunks and the costs of that schedule's stages."""
        made = GENERATORS[name]
        chunks = (self.chunks or made.default_chunks) if made.any_chunks else made.default_chunks
        costs = merged(self.costs, self.pp * chunks) or self.costs
        return replace(self, name=name, chunks=chunks, costs=costs)
