"""The best layout of every schedule on a number of devices: TP x PP x DP x microbatch.

A loop over the planner's own times and bytes, for the papers' models with a layer less at both
ends; the planner's search of layouts is for models as Megatron divides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..plan.point import evaluate
from ..plan.space import Workload
from ..schedule import ScheduleSpec, generate
from ..schedule.bounds import makespan_bound
from .jobs import BUDGET, SCHEDULES, Model, request


def best_by_schedule(
    model: Model, world: int, batch: int, names: Sequence[str]
) -> dict[str, tuple[float, str]]:
    """MFU in per cent and the layout, for every name of ``SCHEDULES`` that fits somewhere.

    Args:
        model: its tensor and data parallelism are replaced.
        batch: samples an iteration.
    """
    best: dict[str, tuple[float, str]] = {}
    for name in names:
        chunks = 2 if SCHEDULES[name][0].startswith("v-") else 1
        tried = [
            _Layout(*one, batch, name, chunks)
            for one in layouts(model, world, batch)
            if (model.layers + 2) % (one[1] * chunks) == 0
        ]
        # What may be fastest first: then little else needs an order.
        for layout in sorted(tried, key=_Layout.ideal, reverse=True):
            least = best[name][0] if name in best else 0.0
            if layout.ideal() > least and (found := layout.mfu()) > least:
                best[name] = found, str(layout)
    return best


def layouts(model: Model, world: int, batch: int) -> Iterator[tuple[Model, int, int]]:
    """(model, pipeline ranks, samples a microbatch)."""
    for tensor in (1, 2, 4, 8):
        for pp in range(2, world // tensor + 1):
            data, rest = divmod(world // tensor, pp)
            if rest or world % tensor or batch % data or (model.layers + 2) % pp:
                continue
            more = model.more + " --use-distributed-optimizer"
            for size in (1, 2, 4):
                if batch // data % size == 0:
                    yield model._replace(tensor=tensor, data=data, more=more), pp, size


class _Layout(NamedTuple):
    model: Model
    pp: int
    size: int
    batch: int
    name: str
    chunks: int

    def __str__(self) -> str:
        flat = self.model
        return f"DP {flat.data}, TP {flat.tensor}, PP {self.pp}, microbatch {self.size}"

    @property
    def microbatches(self) -> int:
        return self.batch // (self.model.data * self.size)

    def request(self, microbatches: int) -> tuple[ScheduleSpec, Workload]:
        return request(self.model, self.name, self.pp, microbatches, self.chunks, self.size)

    def share(self, time_us: float) -> float:
        return self.model.mfu_in(time_us, self.microbatches, self.pp, self.size)

    def ideal(self) -> float:
        """MFU that no order exceeds."""
        spec, work = self.request(self.microbatches)
        return self.share(float(makespan_bound(spec.placement, self.microbatches, work.costs)))

    def mfu(self) -> float:
        """In per cent; 0 where it does not fit."""
        p, m = self.pp, self.microbatches
        short = m if m <= 4 * p else 3 * p
        spec, work = self.request(short)
        # The order for equal costs has the same sets, and is made at once.
        alike = generate(spec.name, p, min(m, 2 * p), self.chunks)
        if work.peak(alike) > BUDGET:
            return 0.0
        point = evaluate(spec, work)
        if point.worst.total > BUDGET:
            return 0.0
        time = point.makespan_us
        if m > short:
            longer = evaluate(replace(spec, microbatches=4 * p), work).makespan_us
            time = longer + (m - 4 * p) * (longer - time) / p
        return self.share(float(time))
