"""Closed forms of every configuration: its time, its bytes, and whether it may fit.

A *row* is a division with a microbatch size, recompute, vocabulary, plan of MoE layers, schedule
and, where it does not fit without, offload. Its time is that of the rank with most work, under the
best split of the layers, with the idle time of the schedule's order for equal costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from ..schedule import Costs, Placement, Schedule, ScheduleSpec, select
from ..schedule.effects import peak_sets
from ..schedule.simulate import makespan_of
from .forms import Forms, forms_of
from .model import Job
from .moe_job import keeps_from_offload
from .space import SearchSpace
from .vocabulary import BARRIERS, NOT_WITH


class Row(NamedTuple):
    """One configuration.

    Attributes:
        job: with its microbatch size, recompute, vocabulary and MoE plan.
        us: of an iteration, with what is beside its passes.
        bytes: of the fullest rank.
        offload: as ``--offload``; None: none.
    """

    space: SearchSpace
    job: Job
    family: ScheduleSpec
    microbatches: int
    us: float
    bytes: int
    offload: str | None = None

    def spec(self) -> ScheduleSpec:
        """The request, without costs."""
        return replace(
            self.family,
            microbatches=self.microbatches,
            barriers=BARRIERS * self.job.vocab_parallel,
            overlap=self.job.overlap_moe_expert_parallel_comm,
        )


@dataclass
class Families:
    """Orders of few microbatches for equal costs, made once for all divisions."""

    orders: dict[ScheduleSpec, tuple[Schedule, list[int]] | None] = field(default_factory=dict)
    numbers: dict[tuple[object, ...], tuple[float, float, float] | None] = field(
        default_factory=dict
    )

    def of(self, spec: ScheduleSpec) -> tuple[Schedule, list[int]] | None:
        """An order of two microbatches a rank, and each rank's most sets; None: there is none."""
        few = min(spec.microbatches, 2 * spec.pp)
        key = ScheduleSpec(spec.name, spec.pp, few, spec.chunks, effort=1.0)
        if key not in self.orders:
            try:
                order = select(key).schedule
                self.orders[key] = order, peak_sets(order.ranks)
            except ValueError:
                self.orders[key] = None
        return self.orders[key]

    def form(self, spec: ScheduleSpec, microbatches: int) -> tuple[float, float, float] | None:
        """Idle time of a rank whose F, B and W take 1 each, and activations in microbatches: the
        mean of the ranks' most, and the most. They grow with the ranks: from a few for many."""
        small = min(spec.pp, _RANKS)
        few = max(1, round(min(microbatches, 2 * spec.pp) * small / spec.pp))
        few = max(small, few) if microbatches >= spec.pp else few
        key = spec.name, spec.pp, spec.chunks, few
        if key not in self.numbers:
            found = self.of(replace(spec, pp=small, microbatches=few))
            self.numbers[key] = None
            if found is not None:
                order, sets = found
                idle = float(makespan_of(order, Costs()) - 3 * few)
                each = spec.pp / small / order.chunks
                self.numbers[key] = (
                    *(idle * (spec.pp - 1) / (small - 1), sum(sets) / len(sets) * each),
                    max(sets) * each,
                )
        return self.numbers[key]


def rows(
    space: SearchSpace, budget: float, families: Families, limit: float = inf
) -> Iterator[list[Row]]:
    """Of every job of a division all that may fit.

    Args:
        budget: bytes of a rank.
        limit: microseconds of an iteration that is known: nothing slower is looked at.

    Raises:
        PlanError: no job is possible.
    """
    specs = [(spec, spec.placement) for spec in space.specs()]
    for job, microbatches in space.jobs():
        forms = forms_of(space, job, microbatches, budget, limit)
        yield [] if forms is None else list(_of_job(forms, specs, budget, families))


def _of_job(
    forms: Forms,
    specs: list[tuple[ScheduleSpec, Placement]],
    budget: float,
    families: Families,
) -> Iterator[Row]:
    space, job, m = forms.space, forms.job, forms.microbatches
    work: dict[object, float | None] = {}
    own = space.balance and not job.stages_are_given
    pairs = job.overlap_moe_expert_parallel_comm
    moves = () if pairs or keeps_from_offload(job) else space.offload
    for spec, placement in specs:
        stages = placement.num_stages
        if (job.vocab_parallel and spec.name in NOT_WITH) or stages > max(job.num_layers, 1) + 2:
            continue
        if space.stock and placement.chunks > 1 and m % space.pp:
            continue  # Megatron's interleaving takes whole groups
        key = placement.is_vee(), 0 if own else stages
        if key not in work:
            work[key] = forms.heaviest(placement)
        heaviest, numbers = work[key], families.form(spec, m)
        if heaviest is None or numbers is None:
            continue
        idle, mean, most = numbers
        held = (mean if own else most) + pairs
        held += job.vocab_parallel and m > held  # every rank keeps a microbatch more
        each = job.num_layers * forms.layer / space.pp + forms.shard
        us = 1e6 * (m * heaviest + idle * each / 3 + forms.beside)
        fixed = forms.states + forms.passing
        size = int(fixed + held * forms.sets)
        if size <= budget and not space.always_offload:
            yield Row(space, job, spec, m, us, size)
            continue
        if 3 * stages * m > _LARGE and not space.always_offload:
            continue
        for kind in moves:  # the first that fits and that the link can carry
            share = {"half": 0.5 if placement.chunks > 1 else 0.0}.get(kind, 1.0)
            sent = share * forms.sets * (1 / space.gpu.to_host + 1 / space.gpu.to_device)
            carried = min(1.0, heaviest / sent) if sent else 1.0
            stays = 1 - (AUTO if kind == "auto" else share) * carried
            moved = int(fixed + (2 / placement.chunks + stays * held) * forms.sets)
            late = kind != "auto" and sent > CROWDED * heaviest
            if moved <= budget and (not late or space.always_offload):
                yield Row(space, job, spec, m, us, moved, kind)
                break


_RANKS = 16  # larger orders for equal costs are taken to be longer in proportion
_LARGE = 30_000  # passes: their offload takes long to plan
AUTO = 0.5  # of the activations that the link can carry, by which ``auto`` lowers the peak
CROWDED = 9 / 8  # of its time: a link that is asked for more only makes passes wait
