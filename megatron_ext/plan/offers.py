"""What a candidate may offload: which sets, how much of the link, about how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from ..schedule import OffloadSpec, Schedule
from ..schedule.passes.offload import wanted_chunks
from .candidate import Candidate
from .memory import message_bytes, rank_bytes
from .moe_job import keeps_from_offload
from .space import SearchSpace
from .vocabulary import rank_work, with_passes


def large_sets(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of the smallest schedules those that offload is tried with where nothing fits."""
    return sorted(candidates, key=lambda one: (one.states, one.bytes))[:_TRIED]


def offers(one: Candidate, space: SearchSpace, order: Schedule) -> list[Candidate]:
    """``one`` with the kinds of offload that its link can carry, or that are asked for.

    Args:
        one: without offload.
        space: whose ``offload`` is tried; ``auto``, which takes longest to plan, only if need be.
        order: of its passes for equal costs.
    """
    out: list[Candidate] = []
    if one.spec.overlap:
        return out
    if one.spec.cap is not None:
        return out  # with offload a cap is of what stays on the device: another point
    if any(stage.sets.host for stage in one.workload.stages):
        return out  # its MoE layers use the link to the host by themselves
    if keeps_from_offload(one.workload.job):
        return out
    link = space.link(one.workload, one.spec.placement)
    for wanted in space.offload:
        offload = OffloadSpec(wanted, link)
        load = _load(one, offload)
        if not space.always_offload and (out if wanted == "auto" else load > _CROWDED):
            continue
        over = max(Fraction(0), load - 1) if wanted != "auto" else Fraction(0)
        likely = one.likely_us * float(1 + over / 2)  # what it cannot carry in time stays
        size = _offloaded_bytes(one, offload, order)
        spec = replace(one.spec, offload=offload)
        out.append(replace(one, spec=spec, likely_us=likely, bytes=size))
    return out


def _offloaded(one: Candidate, offload: OffloadSpec) -> list[list[int]]:
    """Per rank, the stages of which sets are to be offloaded.

    The last stage's are not: its B follows its F at once.
    """
    placement = one.spec.placement
    wanted = wanted_chunks(str(offload.wanted), placement.chunks)
    count = placement.chunks if wanted is None else int(wanted)
    last = placement.num_stages - 1
    return [[s for s in row[:count] if s != last] for row in placement.stages]


def _load(one: Candidate, offload: OffloadSpec) -> Fraction:
    """Share of its time that the busiest link needs for what it is asked to move."""
    placement, costs = one.spec.placement, one.workload.costs
    times = offload.link.times(placement, costs.durations(placement))
    busiest = 0
    for stages in _offloaded(one, offload):
        ways = [sum(way[s] for s in stages) for way in (times.to_host, times.to_device)]
        busiest = max(busiest, *ways)
    return Fraction(busiest, times.durations.scale) / max(rank_work(costs, placement))


def _offloaded_bytes(one: Candidate, offload: OffloadSpec, order: Schedule) -> int:
    """Likely bytes of the fullest rank: two sets on their way or in use, of those that leave.

    PipeOffload, section 3 (between two and three sets stay under full offload). ``auto`` sends
    what the link carries, the longest kept first, so what stays falls with the square.
    """
    stages = list(one.workload.stages)
    for row in _offloaded(one, offload):
        for stage in row:
            sets = stages[stage].sets
            offloaded = sets._replace(
                bytes_f_to_b=0, bytes_b_to_w=0, layer=sets.layer + 2 * sets.bytes_f_to_b
            )
            stages[stage] = stages[stage]._replace(sets=offloaded)
    ranks = rank_bytes(order, stages, message_bytes(one.workload.job))
    least = max(with_passes(ranks, stages, order, one.spec.microbatches))
    if offload.wanted != "auto":
        return least
    stays = 1 - 1 / max(Fraction(1), _load(one, offload))
    return least + int(max(0, one.bytes - least) * stays**2)


_CROWDED = Fraction(9, 8)  # beyond, a link that is asked for more only makes compute wait
_TRIED = 12
