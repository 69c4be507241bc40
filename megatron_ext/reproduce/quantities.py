"""Quantities by name: of a simulation, in closed form, and of rows that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from ..schedule import Costs, Simulation, generate, simulate
from ..schedule.generators import Objective
from .rows import Cell

_EQUAL = Costs.of(1, 1, 1)


@cache
def run(
    name: str,
    p: int,
    m: int,
    v: int | None = None,
    costs: Costs = _EQUAL,
    objective: Objective = "makespan",
) -> Simulation:
    """Of a generated schedule: p ranks, m microbatches, v chunks a rank."""
    return simulate(generate(name, p, m, v, costs, objective=objective))


class Setting(NamedTuple):
    """A schedule under given times of a rank's passes; ``m`` of 0: four microbatches a rank."""

    schedule: str
    p: int
    m: int = 0
    v: int | None = None
    f: float = 1
    b: float = 1
    w: float = 1

    @property
    def work(self) -> float:
        """Of all passes of a rank."""
        return self.m * (self.f + self.b + self.w)


SIMULATED: dict[str, Callable[[Setting, Simulation], float]] = {
    "sets": lambda s, run: max(run.peak_sets),
    "microbatches": lambda s, run: float(max(run.peak_activation)),
    "makespan": lambda s, run: float(run.makespan),
    "makespan in chunk units": lambda s, run: float(2 * run.makespan),
    "bubble": lambda s, run: float(run.makespan - Fraction(s.work)),
    "span bubble": lambda s, run: float(s.work / (1 - run.span_bubble) - Fraction(s.work)),
}


def _v_peak(s: Setting) -> int:
    """Chunks on a rank (V-Min: M/3, V-Half: M/2, V-ZB: M, of 1F1B's M = 2p)."""
    p = s.p
    return {"v-min": 2 * ((p + 4) // 3), "v-half": 2 * ((p + 2) // 2), "v-zb": 2 * p}[s.schedule]


def _v_time(s: Setting) -> int:
    more = s.p - 1 if s.schedule == "v-zb" else 6 * s.p - 3 * _v_peak(s) - 1
    return 6 * s.m + more


def _zero_bubble(s: Setting) -> float:
    less = {"1f1b": 0, "zb-h1": 2, "zb-h2": 3}[s.schedule]
    return (s.p - 1) * max(0, s.f + s.b + s.w - less * s.w)


def _few_microbatches(s: Setting) -> float:
    if s.schedule == "1f1b":
        return (s.m + s.p - 1) * (s.f + s.b + s.w)
    return (s.m + s.p - 1) * (s.f + s.b) + s.w


def _group(s: Setting) -> tuple[int, int]:
    """Of GIS: the size of a group of microbatches, and the chunks of a rank."""
    assert s.v is not None
    return (s.p if s.schedule == "gis" else s.p // 2), s.v


def _gis_peak(s: Setting) -> int:
    g, v = _group(s)
    return g * (v - 1) + s.p


def _gis_bubble(s: Setting) -> float:
    g, v = _group(s)
    late = (s.p - g) * s.f + max(0, s.p * s.b - g * (s.b + s.w))
    return ((s.p - 1) * (s.f + s.b) + (v - 1) * late) / v


# As the papers print them (``published.json``: where). None calls what it is compared with.
FORMS: dict[str, Callable[[Setting], float]] = {
    "peak of V schedules": _v_peak,
    "time of V schedules": _v_time,
    "bubble of ZB": _zero_bubble,
    "peak of ZB": lambda s: 2 * s.p - 1 if s.schedule == "zb-h2" else s.p,
    "time of few microbatches": _few_microbatches,
    "peak of GIS": _gis_peak,
    "bubble of GIS": _gis_bubble,
}


def closed_forms(data: dict[str, Any]) -> Iterator[Cell]:
    """Every quantity of ``columns`` at every setting of ``grid``, beside its closed form.

    A name of ``grid`` may be several fields of ``Setting`` in a row; a column may change fields.
    """
    objective = data.get("objective", "makespan")
    for values in product(*data["grid"].values()):
        fields: dict[str, Any] = {}
        for names, value in zip(data["grid"], values):
            several = value if isinstance(value, list) else [value]
            fields |= zip(names.split(","), several, strict=True)
        for column in data["columns"]:
            setting = Setting(**fields | column.get("with", {}))
            setting = setting._replace(m=setting.m or 4 * setting.p)
            name, p, m, v, f, b, w = setting
            ours = SIMULATED[column["quantity"]](
                setting, run(name, p, m, v, Costs.of(f, b, w), objective)
            )
            row = column["row"].format(**setting._asdict())
            yield Cell(row, FORMS[column["form"]](setting), ours)


class _Named(NamedTuple):
    """A row whose last part names a schedule or a method, and its numbers."""

    setup: str
    name: str
    published: float
    ours: float


def _named(cells: Iterable[Cell]) -> list[_Named]:
    found = []
    for cell in cells:
        assert isinstance(cell.published, int | float) and isinstance(cell.ours, int | float)
        setup, _, name = cell.row.rpartition(", ")
        found.append(_Named(setup, name, cell.published, cell.ours))
    return found


def _setups(rows: Iterable[_Named]) -> dict[str, dict[str, _Named]]:
    found: dict[str, dict[str, _Named]] = {}
    for row in rows:
        found.setdefault(row.setup, {})[row.name] = row
    return found


def over(cells: Iterable[Cell], base: str) -> Iterator[Cell]:
    """Ratios to the row of the same setup that names ``base``."""
    rows = _named(cells)
    setups = _setups(rows)
    for row in rows:
        if row.name != base:
            one = setups[row.setup][base]
            label = f"{row.setup}, {row.name}"
            yield Cell(label, row.published / one.published, row.ours / one.ours)


def gain(cells: Iterable[Cell], base: str) -> Iterator[Cell]:
    """The best published of every setup over ``base``, in per cent."""
    for setup, names in _setups(_named(cells)).items():
        best, one = max(names.values(), key=lambda row: row.published), names[base]
        value, ours = best.published / one.published, best.ours / one.ours
        yield Cell(f"{setup}: {best.name} over {base}", 100 * (value - 1), 100 * (ours - 1))


def in_order(cells: Iterable[Cell], base: str) -> Iterator[Cell]:
    """Pairs of every setup that are in the published order, and how many there are."""
    for setup, names in _setups(_named(cells)).items():
        good, total = pairs_in_order([(row.published, row.ours) for row in names.values()])
        if total:
            yield Cell(setup, float(total), float(good))


DERIVED: Mapping[str, Callable[[Iterable[Cell], str], Iterator[Cell]]] = {
    "over": over,
    "gain": gain,
    "order": in_order,
}


def pairs_in_order(values: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """How many pairs (published, ours) are in the published order, and of how many.

    Equal published values are no pair.
    """
    good = total = 0
    for i, (a, x) in enumerate(values):
        for b, y in values[i + 1 :]:
            if a != b:
                total += 1
                good += (a - b) * (x - y) > 0
    return good, total
