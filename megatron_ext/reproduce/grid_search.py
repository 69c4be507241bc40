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
from ..plan.space import Workload
from ..schedule import ScheduleSpec, generate
from ..schedule.bounds import makespan_bound
from .jobs import BUDGET, SCHEDULES, Model, mfu, request
from .rows import Cell, published

_NAMES = ("1F1B", "1F1B-R", "ZB-1P", "V-Half", "V-Min", "V-ZB")


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
def _best(sequence: int, batch: int) -> dict[str, tuple[float, str]]:
    """MFU in per cent and the layout, for every schedule that fits somewhere."""
    layers, hidden, heads, world = published()["controllable-memory"]["models"]["98.5B"]
    scores = " --attention-backend unfused" * (sequence == 1024)  # kept
    more = f"--hidden-dropout 0.1 --attention-dropout 0.1{scores}"
    model = Model(layers, hidden, heads, sequence, more=more)
    best: dict[str, tuple[float, str]] = {}
    for name in _NAMES:
        # What may be fastest first: then little else needs an order.
        layouts = _layouts(name, model, world, batch)
        for layout in sorted(layouts, key=_Layout.ideal, reverse=True):
            least = best[name][0] if name in best else 0.0
            if layout.ideal() > least and (found := layout.mfu()) > least:
                best[name] = found, str(layout)
    return best


def _mfu(data: dict[str, Any]) -> Iterator[Cell]:
    for sequence, values in data["rows"].items():
        best = _best(int(sequence), values["batch"])
        for name, value in values.items():
            if name in best:
                found, layout = best[name]
                yield Cell(f"s={sequence}, {name}", value, found, note=layout)


def _layout(data: dict[str, Any]) -> Iterator[Cell]:
    best = _best(1024, data["rows"]["1024"]["batch"])
    yield Cell("s=1024, 1F1B", data["layout"], best["1F1B"][1].rpartition(", ")[0])


CELLS = {"grid search": _mfu, "best layout": _layout}
