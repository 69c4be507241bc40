"""Controllable Memory's grid search: the best TP x PP x DP x microbatch of every schedule.

A loop over the planner's own times and bytes, for the papers' models with a layer less at both
ends; the planner's search of layouts is for models as Megatron divides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ..plan.point import evaluate
from ..plan.workload import Workload
from ..schedule import ScheduleSpec, generate
from ..schedule.bounds import makespan_bound
from .jobs import BUDGET, SCHEDULES, Model, mfu, request, with_dropout
from .rows import Cell


class _Layout(NamedTuple):
    model: Model
    name: str
    pp: int
    size: int
    microbatches: int

    def __str__(self) -> str:
        flat = self.model
        return f"DP {flat.data}, TP {flat.tensor}, PP {self.pp}, microbatch {self.size}"

    def request(self, microbatches: int) -> tuple[ScheduleSpec, Workload]:
        return request(self.model, self.name, self.pp, microbatches, 1, self.size)

    def ideal(self) -> float:
        """MFU in per cent that no order exceeds."""
        m = self.microbatches
        spec, work = self.request(m)
        return mfu(work.job, m, float(makespan_bound(spec.placement, m, work.costs)))

    def mfu(self) -> float:
        """In per cent; 0 where it does not fit."""
        p, m = self.pp, self.microbatches
        short = m if m <= 4 * p else 3 * p
        spec, work = self.request(short)
        # The order for equal costs has the same sets, and is made at once.
        alike = generate(spec.name, p, min(m, 2 * p), spec.chunks)
        if work.peak(alike) > BUDGET:
            return 0.0
        point = evaluate(spec, work)
        if point.worst.total > BUDGET:
            return 0.0
        time = point.makespan_us
        if m > short:
            longer = evaluate(replace(spec, microbatches=4 * p), work).makespan_us
            time = longer + (m - 4 * p) * (longer - time) / p
        return mfu(work.job, m, float(time))


def _layouts(name: str, model: Model, world: int, batch: int) -> Iterator[_Layout]:
    chunks = SCHEDULES[name][1] or 1
    more = model.more + " --use-distributed-optimizer"
    for tensor in (1, 2, 4, 8):
        for pp in range(2, world // tensor + 1):
            data, rest = divmod(world // tensor, pp)
            if rest or world % tensor or batch % data or (model.layers + 2) % (pp * chunks):
                continue
            flat = model._replace(tensor=tensor, data=data, more=more)
            for size in (1, 2, 4):
                if batch // data % size == 0:
                    yield _Layout(flat, name, pp, size, batch // (data * size))


@cache
def _best(name: str, sequence: int, batch: int) -> tuple[float, str]:
    """MFU in per cent and the layout of a schedule; no text if it fits nowhere."""
    model, world = with_dropout("98.5B", sequence)
    best, text = 0.0, ""
    # What may be fastest first: then little else needs an order.
    layouts = _layouts(name, model, world, batch)
    for layout in sorted(layouts, key=_Layout.ideal, reverse=True):
        if layout.ideal() > best and (found := layout.mfu()) > best:
            best, text = found, str(layout)
    return best, text


def _grid_search(data: dict[str, Any]) -> Iterator[Cell]:
    for sequence, values in data["rows"].items():
        for name, value in values.items():
            if name == "batch":
                continue
            found, layout = _best(name, int(sequence), values["batch"])
            if layout:
                yield Cell(f"s={sequence}, {name}", value, found, note=layout)


def _best_layout(data: dict[str, Any]) -> Iterator[Cell]:
    layout = _best("1F1B", 1024, data["rows"]["1024"]["batch"])[1]
    yield Cell("s=1024, 1F1B", data["layout"], layout.rpartition(", ")[0])


CELLS = (_grid_search, _best_layout)
