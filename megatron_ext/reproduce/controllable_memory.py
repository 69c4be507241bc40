"""Controllable Memory's tables: building blocks, any cap, pure pipelines, the grid search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from typing import Any

from ..plan import calibration
from ..plan.point import Point
from ..schedule import Costs, ScheduleSpec, generate, select, simulate
from ..schedule.memory_cap import ShareCap
from .grid_search import best_by_schedule
from .jobs import ASSUMPTIONS, GPU, Model, activation_gib, simulated
from .plots import against, lines_by
from .rows import Cell, Kind, Paper, Table, gpu_table, pairs_in_order, published

_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
_SCORES = f"{_DROPOUT} --attention-backend unfused"  # kept at 1,024 tokens
_SIZES = {"9.6B": 2, "38.5B": 1}  # samples a microbatch


def _peak(name: str, p: int) -> int:
    """Chunks on a rank (V-Min: M/3, V-Half: M/2, V-ZB: M, of 1F1B's M = 2p)."""
    return {"v-min": 2 * ((p + 4) // 3), "v-half": 2 * ((p + 2) // 2), "v-zb": 2 * p}[name]


def _blocks(data: dict[str, Any]) -> Iterator[Cell]:
    for p in (8, 16, 32):
        m = 4 * p
        for name in ("v-min", "v-half", "v-zb"):
            k = _peak(name, p)
            run = simulate(generate(name, p, m))
            yield Cell(f"{name}, p={p}: chunks", k, max(run.peak_sets))
            time = 6 * m + (p - 1 if name == "v-zb" else 6 * p - 3 * k - 1)
            yield Cell(f"{name}, p={p}, m={m}: time", time, float(2 * run.makespan))


def _periods(data: dict[str, Any]) -> Iterator[Cell]:
    costs = Costs.of(*data["costs"])
    for name, value in data["rows"].items():
        few, many = (simulate(generate(name, 4, m, costs=costs)).makespan for m in (32, 64))
        idle = (many - few) / 32 - sum(data["costs"])
        # Less than a hundredth of a period is the ends', not the period's.
        found = "a bubble in every period" if idle > Fraction(sum(data["costs"]), 100) else "none"
        yield Cell(f"{name}, F,B,W=3,4,2", value, found)


def _caps(data: dict[str, Any]) -> Iterator[Cell]:
    for costs, values in data["rows"].items():
        for cap, value in zip(data["caps"], values):
            spec = ScheduleSpec(
                "v-cap", 8, 16, costs=Costs.of(*data["costs"][costs]), cap=ShareCap(Fraction(cap))
            )
            run = simulate(select(spec).schedule)
            label = ",".join(data["costs"][costs])
            yield Cell(f"F,B,W={label}, cap={float(Fraction(cap)):g}", value, float(run.makespan))


@cache
def _pure(name: str, schedule: str, microbatches: int, size: int) -> tuple[Model, Point]:
    layers, hidden, heads, pp = published()["controllable-memory"]["models"][name]
    model = Model(layers, hidden, heads, 1024, more=_SCORES)
    return model, simulated(model, schedule, pp, microbatches, 2, size)


def _figure_7(data: dict[str, Any]) -> Iterator[tuple[str, str, list[float], tuple[Model, Point]]]:
    for name, cells in data["rows"].items():
        pp = published()["controllable-memory"]["models"][name][3]
        for schedule, values in cells.items():
            yield name, schedule, values, _pure(name, schedule, 4 * pp, _SIZES[name])


Of = Callable[[Model, Point], float]


def _gib(_: Model, point: Point) -> float:
    return activation_gib(point)


def _seven(data: dict[str, Any], place: int, of: Of) -> Iterator[Cell]:
    for name, schedule, values, own in _figure_7(data):
        yield Cell(f"{name}, {schedule}", values[place], of(*own))


def _ratio_7(data: dict[str, Any], place: int, of: Of) -> Iterator[Cell]:
    every = list(_figure_7(data))
    for name, schedule, values, own in every:
        if schedule != "1F1B":
            one = next(x for x in every if x[:2] == (name, "1F1B"))
            ratio = of(*own) / of(*one[3])
            yield Cell(f"{name}, {schedule}", values[place] / one[2][place], ratio)


def _table_4(data: dict[str, Any]) -> Iterator[Cell]:
    values = data["rows"]
    found = {}
    for schedule in values:
        model, point = _pure("38.5B", schedule, 512, 1)
        found[schedule] = model.mfu(point)
    for schedule, mfu in found.items():
        if schedule != "1F1B":
            yield Cell(
                f"38.5B, m=512, {schedule}", values[schedule] / values["1F1B"], mfu / found["1F1B"]
            )


@cache
def _grid(sequence: int, batch: int) -> dict[str, tuple[float, str]]:
    layers, hidden, heads, world = published()["controllable-memory"]["models"]["98.5B"]
    model = Model(layers, hidden, heads, sequence, more=_SCORES if sequence == 1024 else _DROPOUT)
    names = ("1F1B", "1F1B-R", "ZB-1P", "V-Half", "V-Min", "V-ZB")
    return best_by_schedule(model, world, batch, names)


def _grid_rows(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], dict[str, Any]]]:
    for sequence, values in data["rows"].items():
        found = _grid(int(sequence), values["batch"])
        published_ = {name: value for name, value in values.items() if name in found}
        yield sequence, published_, found


def _grid_mfu(data: dict[str, Any]) -> Iterator[Cell]:
    for sequence, values, found in _grid_rows(data):
        for name, value in values.items():
            reason = _V_MIN if name == "V-Min" else _GRID_FAST[sequence]
            mfu, layout = found[name]
            yield Cell(f"s={sequence}, {name}", value, mfu, reason=reason, note=layout)


def _grid_layout(data: dict[str, Any]) -> Iterator[Cell]:
    found = _grid(1024, data["rows"]["1024"]["batch"])
    yield Cell("s=1024, 1F1B", data["layout"], found["1F1B"][1].rpartition(", ")[0])


def _grid_gain(data: dict[str, Any]) -> Iterator[Cell]:
    for sequence, values, found in _grid_rows(data):
        best = max(values, key=lambda name: values[name])
        value = 100 * (values[best] / values["1F1B"] - 1)
        yield Cell(
            f"s={sequence}: {best} over 1F1B",
            value,
            100 * (found[best][0] / found["1F1B"][0] - 1),
        )


def _grid_order(data: dict[str, Any]) -> Iterator[Cell]:
    for sequence, values, found in _grid_rows(data):
        good, total = pairs_in_order([(value, found[name][0]) for name, value in values.items()])
        yield Cell(f"s={sequence}", float(total), float(good))


def _single(data: dict[str, Any], quantity: str, scale: float) -> Iterator[Cell]:
    """Passes of one layer, from the figures that the planner's times are compared with."""
    every = calibration.published(GPU.name)["figures"]
    for each in calibration.compare(GPU, [x for x in every if x["source"] in data["passes"]]):
        if each.quantity == quantity:
            row = f"{each.source.rpartition(', ')[2]}, {each.what}"
            note = "fitted" if each.fitted else ""
            yield Cell(row, scale * each.published, scale * each.ours, note=note)


_PASSES = partial(_single, quantity="MFU", scale=100)
_PURE = (
    *ASSUMPTIONS,
    "samples of 1,024 tokens, 2 (9.6B) and 1 (38.5B) a microbatch, as a third party has the "
    "figure's labels; attention scores are kept, as its GB need",
    "ZB-1P is zb-h1 and ZB-2P zb-h2; 1F1B-R recomputes whole layers",
)
_UNKNOWN = (
    "the plot was read by a third party, and what the paper counts as activations, and whether its "
    "GB are GiB, is not known (in GB of 10^9 bytes ours are 7 % more); ratios tell more"
)
_FAST = (
    "the paper's pipelines lose more than passes and bubbles account for, and ours do not: table "
    "5's 65 % in 1F1B's bubble, with 30 of 32 layers, is 49 % at 9.6B, where figure 7 has 43.5 %"
)
_ONE = (
    "one layer; attention scores kept at 1,024 tokens, flash attention at 3,072",
    "the A100's rates were fitted to the rows marked so; the others were held out "
    "(docs/concepts/pass-times.md)",
)
_V_MIN = (
    "V-Min's order is made for the planner's costs; the order for equal passes, with a longer "
    "bubble in every period (figure 5), takes 9 to 10 % longer and puts V-Min below 1F1B"
)
_GRID_FAST = {
    "1024": "the optimizer, gradient reductions and waits are not in ours, and 1F1B's best layout "
    "is faster than the published one",
    "3072": "single passes with tensor parallelism are 7 to 12 % faster in ours than in figure "
    "12b, and the optimizer, gradient reductions and waits are not in it",
}
_GRID = (
    *ASSUMPTIONS,
    "attention scores are kept at 1,024 tokens, flash attention at 3,072",
    "every TP, PP, DP of 40 ranks that divides the model, microbatches of 1, 2, 4, in 74 GiB, the "
    "distributed optimizer; long runs are extended from a shorter one with the same period",
)

PAPER = Paper(
    "controllable-memory",
    (
        Table(
            "table1", "V-Min, V-Half, V-ZB: peak and time", "table1", Kind.ORDER, "", _blocks,
            ("F = B = W, four microbatches a rank, times in passes of a chunk",),
        ),
        Table("fig5", "Bubbles of a period at unequal passes", "fig5", Kind.EXACT, "", _periods,
              ("p=4; the time of 32 more microbatches",),
              above="ours places the passes for these costs"),
        Table(
            "appb", "Makespan at any cap, v-cap and the adaptive scheduler", "appb", Kind.ORDER,
            "", _caps, ("p=8, m=16, no hop; the same sets for both, on every rank",),
            above="the search for an order at a cap is not exhaustive",
            plot=lines_by("cap", "cap, of 1F1B's peak", "makespan"),
        ),
        Table(
            "fig7-mfu", "Pure pipelines: MFU", "fig7", Kind.TIME, "%",
            partial(_seven, place=0, of=Model.mfu), _PURE,
            above=_FAST, plot=against("published, %", "ours, %"),
        ),
        Table(
            "fig7-mfu-ratio", "Pure pipelines: MFU over 1F1B's", "fig7", Kind.TIME, "",
            partial(_ratio_7, place=0, of=Model.mfu), _PURE,
            below="ours counts a whole iteration; ZB-2P has no bubble only with post-validation",
        ),
        Table(
            "fig7-memory", "Pure pipelines: activation memory", "fig7", Kind.BYTES, "GB",
            partial(_seven, place=1, of=_gib), _PURE,
            below=_UNKNOWN,
            plot=against("published, GB", "ours, GB"),
        ),
        Table(
            "fig7-memory-ratio", "Pure pipelines: activation memory over 1F1B's", "fig7",
            Kind.TIME, "", partial(_ratio_7, place=1, of=_gib), _PURE,
            above="the plot was read by a third party: its 1F1B-I is 1.57 of 1F1B at p=16, 1.31 at "
            "p=32, where the schedule holds 1.47 and 1.48 times the sets",
            below="the 4 GB of 1F1B-R were read from a plot by a third party; table 4 has 1 GB",
        ),
        Table("table3", "Grid search: MFU", "table3", Kind.TIME, "%", _grid_mfu, _GRID),
        Table(
            "table3-layout", "Grid search: best layout", "table3", Kind.EXACT, "", _grid_layout,
            _GRID, above="the two are close: the published one, with microbatches of 2, has 53.5 % "
            "in ours, 2 % less, and 71 GiB where ours has 73 of the 74 allowed",
        ),
        Table(
            "table3-gain", "Grid search: gain", "table3", Kind.GAIN, "%", _grid_gain, _GRID,
            below="V-ZB without tensor parallelism does not fit beside kept attention scores; with "
            "flash attention it does in ours, and gains 17 %; over the published layout of 1F1B it "
            "gains 11 %",
        ),
        Table(
            "table3-order", "Grid search: pairs in the published order", "table3", Kind.TIME,
            "pairs", _grid_order, _GRID,
            below=_V_MIN,
        ),
        Table("table4", "38.5B, 512 microbatches: MFU over 1F1B's", "table4", Kind.TIME, "",
              _table_4, (*ASSUMPTIONS, "1,024 tokens a microbatch and kept attention scores, as in "
                        "figure 7; the table's own are not known")),
        Table(
            "fig12-mfu", "Single passes: MFU", "fig12", Kind.TIME, "%", _PASSES, _ONE,
            above="flash attention is assumed at 3,072 tokens, where kept scores would not fit; no "
            "row of figure 12b was fitted, and all are faster in ours",
        ),
        Table("table5-mfu", "Single passes: MFU of one layer", "table5", Kind.TIME, "%", _PASSES,
              _ONE),
        Table("table5-time", "Single passes: F of one layer", "table5", Kind.TIME, "ms",
              partial(_single, quantity="F", scale=1), _ONE),
        gpu_table("controllable-memory-gpu"),
    ),
)  # fmt: skip
