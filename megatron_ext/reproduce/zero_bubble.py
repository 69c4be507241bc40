"""Zero Bubble's tables: bubbles, throughput from its own profile, few microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ..schedule import Costs, Simulation, generate, simulate
from ..schedule.generators import Objective
from .rows import Cell, Kind, Paper, Table, gpu_table, published

_NAMES = {
    "ZB-1P": "zb-h1",
    "ZB-2P": "zb-h2",
    "V-ZB": "v-zb",
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
}
_SPLIT = {"ZB-1P", "ZB-2P", "V-ZB"}


def _costs(model: str, hop: float | None = None) -> Costs:
    *_, forward, backward_input, backward_weight, measured = published()["zero-bubble"]["models"][
        model
    ]
    given = measured if hop is None else round(hop, 3)
    return Costs.of(*map(str, (forward, backward_input, backward_weight, given)))


@cache
def _run(
    model: str, name: str, p: int, m: int, chunks: int = 1, hop: float | None = None
) -> Simulation:
    """Of the paper's schedule; those with split backward passes are made for their own spans."""
    costs, ours = _costs(model, hop), _NAMES[name]
    if name == "1F1B-I":
        return simulate(generate(ours, p, m, chunks, costs))
    objective: Objective = "span" if name in _SPLIT else "makespan"
    return simulate(generate(ours, p, m, costs=costs, objective=objective))


def _hop(model: str, p: int, m: int, rate: float) -> float:
    """With which 1F1B's bubble is ``rate``; in ms."""
    low, high = 0.0, 10.0
    for _ in range(14):
        middle = (low + high) / 2
        if _run(model, "1F1B", p, m, hop=middle).bubble < rate:
            low = middle
        else:
            high = middle
    return low


def _span(run: Simulation, name: str) -> float:
    """The longest rank's own span where an optimizer does not wait, else the makespan; in ms."""
    share = (1 - run.bubble) / (1 - run.span_bubble) if name in _SPLIT else 1
    return float(run.makespan * share)


def _bubbles(data: dict[str, Any]) -> Iterator[Cell]:
    forms = {
        "1f1b": (0, lambda p: p),
        "zb-h1": (2, lambda p: p),
        "zb-h2": (3, lambda p: 2 * p - 1),
    }
    for p in (4, 8, 16):
        for f, b, w in ((1, 1, 1), (20, 20, 13)):
            for name, (less, peak) in forms.items():
                run = simulate(generate(name, p, 4 * p, costs=Costs.of(f, b, w), objective="span"))
                value = (p - 1) * max(0, f + b + w - less * w)
                work = 4 * p * (f + b + w)
                span = work / (1 - run.span_bubble)
                row = f"{name}, p={p}, F,B,W={f},{b},{w}"
                yield Cell(f"{row}: bubble", value, float(span - work))
                yield Cell(f"{row}: microbatches", peak(p), float(max(run.peak_activation)))


def _throughput(data: dict[str, Any]) -> Iterator[Cell]:
    for model, cells in data["rows"].items():
        p, size, chunks, *_ = published()["zero-bubble"]["models"][model]
        for name in ("1F1B", "1F1B-I", "ZB-1P", "ZB-2P"):
            for m, value in zip(cells["m"], cells[name]):
                seconds = _span(_run(model, name, p, m, chunks), name) / 1e3
                yield Cell(f"{model}, m={m}, {name}", value, m * size / (seconds * p))


def _rates(data: dict[str, Any]) -> Iterator[Cell]:
    for model, cells in data["rows"].items():
        p, ms = cells["p"], cells["m"]
        hop = _hop(model, p, ms[0], cells["1F1B"][0])
        for name in ("V-ZB", "1F1B"):
            for m, value in zip(ms, cells[name]):
                if (name, m) != ("1F1B", ms[0]):
                    run = _run(model, name, p, m, hop=hop)
                    rate = run.span_bubble if name in _SPLIT else run.bubble
                    yield Cell(f"{model}, p={p}, m={m}, {name}", value, float(rate))


def _few(data: dict[str, Any]) -> Iterator[Cell]:
    for p, m in ((8, 2), (8, 4), (8, 8), (16, 8)):
        for f, b, w in ((1, 1, 1), (20, 20, 13)):
            for name in ("1f1b", "zb-h1"):
                run = simulate(generate(name, p, m, costs=Costs.of(f, b, w)))
                value = (m + p - 1) * (f + b + (w if name == "1f1b" else 0))
                value += w if name == "zb-h1" else 0
                yield Cell(f"{name}, p={p}, m={m}, F,B,W={f},{b},{w}", value, float(run.makespan))


_PROFILE = (
    "F, B, W and hop of table 9 for every rank and microbatch; ZB-1P is zb-h1, ZB-2P zb-h2; "
    "schedules with split backward passes as with optimizer post-validation: the longest rank's "
    "own span counts"
)
_OTHER = (
    "the profile is of other microbatches than the table's, whose own is not published: W has "
    "another share of the passes"
)

PAPER = Paper(
    "zero-bubble",
    (
        Table("table2", "Bubble of a rank's own span, and peak", "table2", Kind.ORDER, "",
              _bubbles, ("no hop, four microbatches a rank",)),
        Table("table4", "Samples a GPU and second", "table4", Kind.TIME, "1/s", _throughput,
              (_PROFILE,),
              above="the optimizer is not in ours, and a pass of one of v chunks is taken to be a "
              "v-th of the profile's",
              below="the profile is of passes that were synchronized to be timed"),
        Table("table8", "Bubble rates", "table8", Kind.TIME, "", _rates,
              (_PROFILE, "but the hop: that with which 1F1B's rate at the first m is the published "
               "one, which is left out"),
              above=_OTHER, below=_OTHER),
        Table("appendix-h", "Few microbatches", "small", Kind.ORDER, "", _few,
              ("no hop; makespans",)),
        gpu_table("zero-bubble-gpu"),
    ),
)  # fmt: skip
