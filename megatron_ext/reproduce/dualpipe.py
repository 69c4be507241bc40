"""DualPipe's comparison: bubbles, activations and parameters a device, of equally many stages."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

from ..schedule import Costs, ScheduleSpec, Simulation, generate, select, simulate
from ..schedule.memory_cap import ShareCap
from .rows import Cell, Kind, Paper, Table

_STAGES = (8, 16)
_EXCHANGES = (Fraction(0), Fraction(1, 2), Fraction(1))  # in F and in B each, of a stage
_NAMES = {"1F1B": "1f1b", "ZB1P": "zb-h1"}
_DUALPIPEV = "DualPipeV"
_PAIRED = "our pairs on as many devices"


def _ranks(stages: int, method: str) -> tuple[int, int]:
    """How many, and how many of DualPipe's stages each one has."""
    return (stages, 1) if method in (*_NAMES, "DualPipe") else (stages // 2, 2)


@cache
def _run(method: str, stages: int, exchange: Fraction, microbatches: int) -> Simulation:
    """Of the method's own schedule."""
    ranks, own = _ranks(stages, method)
    name = _NAMES.get(method, "dualpipev")
    return simulate(generate(name, ranks, microbatches, costs=_costs(own, exchange)))


@cache
def _paired(method: str, stages: int, exchange: Fraction) -> Simulation:
    """Of our fastest with pairs on the method's devices, in its memory."""
    ranks, own = _ranks(stages, method)
    costs, cap = _costs(own, exchange), ShareCap(Fraction(stages + 1, own * ranks))
    names = ("v-half", "v-zb")
    spec = ScheduleSpec("auto", ranks, 2 * stages, None, costs, cap, names=names, overlap=True)
    return simulate(select(spec).schedule)


def _costs(own: int, exchange: Fraction) -> Costs:
    """Of a rank with so many stages, F = B = W = 1 each and the exchange besides."""
    longer = own * (1 + exchange)
    return Costs.of(longer, longer, own).with_exchange([[own * exchange] * 2])


def _busy(run: Simulation) -> Fraction:
    """Time of all passes of the most idle rank."""
    durations = run.schedule.costs.durations(run.schedule.placement)
    each = (
        sum(durations.joint([(part.op, part.stage) for part in action.parts]) for action in row)
        for row in run.schedule.compute().ranks
    )
    return Fraction(min(each), durations.scale)


def _idle(method: str, stages: int, exchange: Fraction, paired: bool) -> float:
    """A step's time but for the passes of the method's most idle device.

    DualPipe runs DualPipeV's order for half of the microbatches on each half of its devices.
    """
    if not paired:
        run = _run(method, stages, exchange, 2 * stages)
        return float(run.makespan - _busy(run))
    half = 2 if method == "DualPipe" else 1
    passes = _busy(_run("DualPipeV", stages, exchange, 2 * stages // half))
    return float(_paired(method, stages, exchange).makespan - passes)


def _of(method: str, stages: int, exchange: Fraction, paired: bool) -> Simulation:
    if paired:
        return _paired(method, stages, exchange)
    return _run(method, stages, exchange, 2 * stages)


def _cells(data: dict[str, Any]) -> Iterator[tuple[str, str, int, Fraction, bool]]:
    """Label, method, stages, exchange, and whether ours is our schedule with pairs."""
    for stages in _STAGES:
        for exchange in _EXCHANGES:
            row = f"PP={stages}, exchange {float(exchange):g}"
            for method in data["rows"]:
                if method != "DualPipe":
                    yield f"{row}, {method}", method, stages, exchange, False
                if method.startswith("DualPipe") and exchange:
                    yield f"{row}, {method}: {_PAIRED}", method, stages, exchange, True


def _bubble(data: dict[str, Any]) -> Iterator[Cell]:
    for row, method, stages, exchange, paired in _cells(data):
        f, w = 1 + exchange, 1
        b = f + w
        both = max(Fraction(3), 2 * exchange, b)  # computation, communication, and B alone
        value = (stages // 2 - 1) * (both + b - 3 * w)
        if method in _NAMES:
            value = (stages - 1) * (f + b - (2 * w if method == "ZB1P" else 0))
        yield Cell(row, float(value), _idle(method, stages, exchange, paired))


def _activations(data: dict[str, Any]) -> Iterator[Cell]:
    for row, method, stages, exchange, paired in _cells(data):
        held = max(_of(method, stages, exchange, paired).peak_activation)
        value = stages + data["rows"][method]["more_sets"]
        yield Cell(row, value, float(_ranks(stages, method)[1] * held))


def _parameters(data: dict[str, Any]) -> Iterator[Cell]:
    for row, method, stages, exchange, paired in _cells(data):
        # Every stage is on one rank, and ranks have equally many.
        ranks = _of(method, stages, exchange, paired).schedule.pp
        yield Cell(row, data["rows"][method]["parameters"], stages / ranks)


_OURS = (
    "a stage computes F = W = 1 and a full B = 2, and F and B exchange for that time too; "
    "two microbatches a stage; no hop",
    "F&B takes the longer of computation and communication, and no less than B",
    "1F1B is 1f1b, ZB1P zb-h1, DualPipeV dualpipev on half as many devices; DualPipe itself, with "
    "two copies of the parameters, is not made here",
    "our pairs: the faster of v-half and v-zb with passes in pairs, on the method's number of "
    "devices and in its memory; their bubble is their step's time less the passes of DualPipe's "
    "most idle device",
)
PAPER = Paper(
    "dualpipe",
    (
        Table("bubble", "Time of the most idle device without a pass", "comparison", Kind.ORDER,
              "", _bubble, _OURS),
        Table("activation", "Activations of a device, in stages", "comparison", Kind.ORDER, "",
              _activations, _OURS),
        Table("parameter", "Parameters of a device, in stages", "comparison", Kind.ORDER, "",
              _parameters, _OURS),
    ),
)  # fmt: skip
