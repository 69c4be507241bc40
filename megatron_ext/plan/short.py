"""Short orders: a row's schedule for equal costs and few microbatches, run with the job's times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..schedule import GENERATORS, OffloadSpec, Schedule, ScheduleSpec
from ..schedule.passes.offload import wanted_chunks
from ..schedule.simulate import makespan_of
from .memory import message_bytes, rank_bytes
from .point import Point
from .rows import AUTO, CROWDED, Families, Row
from .vocabulary import rank_work, with_passes
from .workload import Workload


@dataclass(frozen=True)
class Candidate:
    """A row with a split of its layers. Time and bytes are those of a short order."""

    row: Row
    spec: ScheduleSpec
    workload: Workload
    us: float
    bytes: int

    def kind(self) -> tuple[object, ...]:
        """The same of orders that differ only in their division, and take as long."""
        spec = self.spec
        return spec.name, spec.pp, spec.chunks, spec.microbatches, self.row.offload, self.us // 1000

    def few(self) -> ScheduleSpec:
        """The request with microbatches that are enough for its peak and most of its idle time."""
        return replace(self.spec, microbatches=min(self.spec.microbatches, _FEW * self.spec.pp))

    def probed(self, point: Point) -> Candidate:
        """With time and bytes by an order of ``few`` for its costs: idle time that the short order
        has not is in every microbatch, where vocabulary passes make it."""
        spec, few, costs = self.spec, point.spec.microbatches, self.workload.costs.in_pairs()
        more = spec.microbatches - few
        placement = spec.placement
        expected = self.us - self.workload.overhead(placement).total * 1e6
        expected -= more * float(max(rank_work(costs, placement)))
        late = float(point.makespan_us) - expected
        late *= spec.microbatches / few if spec.barriers else 1
        return replace(self, us=self.us + late, bytes=point.worst.total)


def shortlist(
    found: Sequence[Row], budget: int, families: Families, fitting: int
) -> list[Candidate]:
    """Of the first rows by time those that fit, by the time of a short order.

    Args:
        found: sorted by time.
        fitting: candidates that are enough.
    """
    out: list[Candidate] = []
    best = float("inf")
    for row in found[:_LOOKED_AT]:
        exact = GENERATORS[row.family.name].fixed and not row.job.vocab_parallel
        slack = 1.0 if exact else SLACK
        for one in candidates(row, families):
            if one.bytes <= slack * budget:
                out.append(one)
            if one.bytes <= budget:
                best = min(best, one.us)
        if len(out) >= fitting or row.us >= _MARGIN * best:
            break  # closed forms are too short, mostly: no other row is faster
    return sorted(out, key=lambda one: one.us)


def candidates(row: Row, families: Families) -> Iterator[Candidate]:
    """A row's: one for each split of the layers."""
    space, job, spec = row.space, row.job, row.spec()
    found = families.of(spec)
    if found is None:
        return
    order, held = found
    for split in space.splits(job, order, held):
        work = space.workload(job, spec.microbatches, split)
        costs = work.costs.in_pairs()
        most = max(rank_work(costs, order.placement))
        # Every further microbatch on the rank with most work.
        time = makespan_of(order, costs) + (spec.microbatches - order.microbatches) * most
        if spec.barriers:
            time += order.microbatches * (most - max(costs.per_rank_work(order.placement)))
        size = max(with_passes(work.ranks(order), work.stages, order, spec.microbatches))
        if spec.overlap:  # a pair's F takes memory before its B frees any
            size += max(stage.sets.bytes_f_to_b for stage in work.stages)
        us = float(time) + work.overhead(order.placement).total * 1e6
        one = Candidate(row, replace(spec, costs=work.costs), work, us, size)
        moved = one if row.offload is None else _offloaded(one, order)
        if moved is not None:
            yield moved


def _offloaded(one: Candidate, order: Schedule) -> Candidate | None:
    """With its row's offload; None: the link is too slow for that, or in use."""
    if any(stage.sets.host for stage in one.workload.stages):
        return None  # its MoE layers use the link to the host by themselves
    kind, always = str(one.row.offload), one.row.space.always_offload
    offload = OffloadSpec(kind, one.row.space.link(one.workload, order.placement))
    moved = _moved(one, kind)
    load = _load(one, offload, moved)
    least, over = _least_bytes(one, moved, order), max(Fraction(0), load - 1)
    us, size = one.us * float(1 + over / 2), least
    if kind == "auto":  # what the link cannot carry stays
        us = one.us
        size += int((1 - AUTO / max(1.0, float(load))) * max(0, one.bytes - least))
    elif load > CROWDED and not always:
        return None
    return replace(one, spec=replace(one.spec, offload=offload), us=us, bytes=size)


def _moved(one: Candidate, kind: str) -> list[list[int]]:
    """Per rank, the stages whose sets are to be offloaded.

    The last stage's are not: its B follows its F at once.
    """
    placement = one.spec.placement
    wanted = wanted_chunks(kind, placement.chunks)
    count = placement.chunks if wanted is None else int(wanted)
    last = placement.num_stages - 1
    return [[s for s in row[:count] if s != last] for row in placement.stages]


def _load(one: Candidate, offload: OffloadSpec, moved: Sequence[Sequence[int]]) -> Fraction:
    """Share of its time that the busiest link needs for what it is asked to move."""
    placement, costs = one.spec.placement, one.workload.costs
    times = offload.link.times(placement, costs.durations(placement))
    busiest = max(
        sum(way[s] for s in stages) for stages in moved for way in (times.to_host, times.to_device)
    )
    return Fraction(busiest, times.durations.scale) / max(rank_work(costs, placement))


def _least_bytes(one: Candidate, moved: Sequence[Sequence[int]], order: Schedule) -> int:
    """Bytes of the fullest rank with two of its sets on their way or in use, of those that leave
    (PipeOffload, section 3)."""
    stages = list(one.workload.stages)
    for stage in (stage for row in moved for stage in row):
        sets = stages[stage].sets
        two = sets.layer + 2 * sets.bytes_f_to_b
        gone = sets._replace(bytes_f_to_b=0, bytes_b_to_w=0, layer=two)
        stages[stage] = stages[stage]._replace(sets=gone)
    ranks = rank_bytes(order, stages, message_bytes(one.workload.job))
    return max(with_passes(ranks, stages, order, one.spec.microbatches))


SLACK = 1.03  # bytes of short orders were up to 3 % too many
_MARGIN = 1.02
_LOOKED_AT = 600  # rows
_FEW = 3  # microbatches a rank
