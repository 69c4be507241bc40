"""Candidates of the search, without offload and with what it may offload, before simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..schedule import Costs, Schedule, ScheduleSpec, select
from ..schedule.bounds import makespan_bound
from ..schedule.effects import peak_sets
from ..schedule.simulate import makespan_of
from .cases import ROUNDING, Case
from .memory import states_of
from .space import SearchSpace
from .vocabulary import BARRIERS, NOT_WITH, rank_work, with_passes
from .workload import Workload


@dataclass
class Units:
    """Orders for equal costs with few microbatches; all divisions with as many ranks share them."""

    orders: dict[ScheduleSpec, Schedule] = field(default_factory=dict)
    idles: dict[ScheduleSpec, Fraction] = field(default_factory=dict)
    sets: dict[ScheduleSpec, list[int]] = field(default_factory=dict)

    def _key(self, spec: ScheduleSpec) -> ScheduleSpec:
        few = min(spec.microbatches, 2 * spec.pp)
        plain = replace(spec, cap=None, offload=None, barriers=0, overlap=False)
        return replace(plain, microbatches=few, costs=Costs(), effort=_EFFORT)

    def __call__(self, spec: ScheduleSpec) -> Schedule:
        """The order of a name, of as many microbatches as its peak needs."""
        key = self._key(spec)
        if key not in self.orders:
            self.orders[key] = select(key).schedule
        return self.orders[key]

    def peaks(self, spec: ScheduleSpec) -> list[int]:
        """Most sets of each rank of the order."""
        key = self._key(spec)
        if key not in self.sets:
            self.sets[key] = peak_sets(self(spec).ranks)
        return self.sets[key]

    def idle(self, spec: ScheduleSpec) -> Fraction:
        """Time that is no work on any rank, where F, B and W of a rank take 1 each."""
        key = self._key(spec)
        if key not in self.idles:
            self.idles[key] = makespan_of(self(spec), Costs()) - 3 * key.microbatches
        return self.idles[key]


@dataclass(frozen=True, eq=False)
class Candidate:
    """What may be simulated. Times are of an iteration, with what is beside its passes.

    Attributes:
        space: of its division.
        bound_us: no order is faster.
        likely_us, bytes: what the order for equal costs takes, and holds on the fullest rank; with
            offload about.
        beside_us: of these, what is beside the passes.
        states: of the bytes, what stays without any activation.
        rough: time and bytes are by closed forms.
    """

    space: SearchSpace
    spec: ScheduleSpec
    workload: Workload
    bound_us: float
    likely_us: float
    beside_us: float
    bytes: int
    states: int
    rough: bool = False

    @property
    def hoped_us(self) -> float:
        """What it may take with luck: by a part of the idle time of the order for equal costs less.

        That order's time was up to half of its idle time too long where microbatches are few.
        """
        hoped = self.likely_us - _LUCK * max(0.0, self.likely_us - self.bound_us)
        return hoped * _OF_ROUGH if self.rough else hoped

    @property
    def offload(self) -> str | None:
        """What is offloaded, as ``--offload``."""
        return None if self.spec.offload is None else str(self.spec.offload.wanted)

    def refined(self, units: Units) -> Candidate:
        """With the time and the bytes of the order for equal costs, without offload.

        Vocabulary passes and pairs, which that order has not, are taken to be everywhere.
        """
        order, work = units(self.spec), self.workload
        spec = replace(self.spec, offload=None)
        costs = work.costs.in_pairs()
        most = max(rank_work(costs, order.placement))
        # Every further microbatch on the rank with most work.
        more = spec.microbatches - order.microbatches
        time = makespan_of(order, costs) + more * most
        if spec.barriers:
            time += order.microbatches * (most - max(costs.per_rank_work(order.placement)))
        size = max(with_passes(work.ranks(order), work.stages, order, spec.microbatches))
        if spec.overlap:  # a pair's F takes memory before its B frees any
            size += max(stage.sets.bytes_f_to_b for stage in work.stages)
        bound = makespan_bound(order.placement, spec.microbatches, work.costs.computation())
        return replace(
            self,
            spec=spec,
            bound_us=max(self.bound_us, float(bound) * ROUNDING + self.beside_us),
            likely_us=float(time) + self.beside_us,
            bytes=size,
            rough=False,
        )


def candidates_of(case: Case, units: Units) -> Iterator[Candidate]:
    """All of a case but schedules at a cap and offload, with rough times and bytes."""
    space, job = case.space, case.job
    for spec in space.specs():
        placement = spec.placement
        if placement.is_vee() != case.vee or (job.vocab_parallel and spec.name in NOT_WITH):
            continue
        if placement.num_stages > max(job.num_layers, 1) + 2:
            continue
        if space.stock and placement.chunks > 1 and case.microbatches % space.pp:
            continue  # Megatron's interleaving takes whole groups
        sized = replace(
            spec,
            microbatches=case.microbatches,
            barriers=BARRIERS * job.vocab_parallel,
            overlap=job.overlap_moe_expert_parallel_comm,
        )
        order = units(sized)
        for split in space.splits(job, order, units.peaks(sized)):
            yield _rough(case, sized, space.workload(job, case.microbatches, split), units)


def _rough(case: Case, spec: ScheduleSpec, work: Workload, units: Units) -> Candidate:
    space, m, order = case.space, case.microbatches, units(spec)
    placement = order.placement
    busy = [float(time) for time in rank_work(work.costs.computation(), placement)]
    beside = work.overhead(placement).total * 1e6
    bound = max(case.bound_us, (m * max(busy)) * ROUNDING + beside)
    likely = m * max(busy) + float(units.idle(spec)) * sum(busy) / (3 * len(busy)) + beside
    states = states_of(placement, work.stages)
    sizes = []
    for row, held, own in zip(placement.stages, units.peaks(spec), states):
        sets = [work.stages[s].sets for s in row]
        each = sum(one.bytes_f_to_b for one in sets) / len(row)
        passing = max(one.recompute_bytes + one.layer + one.logits for one in sets)
        sizes.append(own.total + int(held * each) + passing)
    most = max(one.total for one in states)
    return Candidate(space, replace(spec, costs=work.costs), work, bound, likely, beside,
                     max(sizes), most, rough=True)  # fmt: skip


_EFFORT = 1.0  # orders for equal costs are made once
_LUCK, _OF_ROUGH = 0.4, 0.985
