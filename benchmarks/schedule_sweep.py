"""The table: every schedule for many pipelines and costs, and who loses to whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks import torch_lists
from benchmarks.schedule_scope import Cost, Scope
from megatron_ext.schedule import Costs, Schedule, generate, simulate
from megatron_ext.schedule.generators.cap import v_cap_limits

V_FAMILY = ("v-min", "v-half", "v-zb", "v-cap 0.5", "v-cap 0.75", "v-cap 1")
TUNED = (2, 3, 4, 8)  # chunks that interleaved is tuned over


@dataclass(frozen=True)
class Setting:
    """One pipeline and its costs."""

    pp: int
    microbatches: int
    cost: Cost
    hop: str

    @property
    def costs(self) -> Costs:
        """For the generators and the simulator."""
        return Costs.of(*self.cost, self.hop)


@dataclass(frozen=True)
class Row:
    """One schedule there. Times in units of F; ``peak`` in microbatches, ``memory`` over p."""

    name: str
    setting: Setting
    makespan: float
    bubble: float
    peak: float

    @property
    def memory(self) -> float:
        """Peak as a share of 1F1B's."""
        return self.peak / self.setting.pp


def settings(scope: Scope) -> list[Setting]:
    """All pipelines of the table."""
    return [
        Setting(p, k * p, cost, hop)
        for p in scope.ranks
        for cost in scope.costs
        for hop in scope.hops
        for k in scope.factors
        if p * k * p <= scope.most
    ]


def sweep(setting: Setting, with_torch: bool) -> list[Row]:
    """Every schedule of one setting."""
    rows = [_row(name, setting, schedule) for name, schedule in _ours(setting)]
    if with_torch:
        for name, _, _ in torch_lists.CLASSES:
            try:
                order = torch_lists.schedule(name, setting.pp, setting.microbatches, setting.costs)
            except ValueError:
                continue  # e.g. DualPipeV needs m >= 2p
            rows.append(_row(name, setting, order))
    return rows


def _row(name: str, setting: Setting, schedule: Schedule) -> Row:
    run = simulate(schedule)
    peak = float(max(run.peak_activation))
    return Row(name, setting, float(run.makespan), float(run.bubble), peak)


def _ours(setting: Setting) -> Iterator[tuple[str, Schedule]]:
    pp, m, costs = setting.pp, setting.microbatches, setting.costs
    for name in ("1f1b", "zb-h1", "zb-h2"):
        yield name, generate(name, pp, m, costs=costs)
    for v in TUNED:
        yield f"interleaved v={v}", generate("interleaved", pp, m, v, costs)
    for name in ("interleaved-zb", "gis", "gis-h", "po"):
        yield f"{name} v=2", generate(name, pp, m, 2, costs)
    if pp * m <= 4096:  # beyond, too many passes for a table
        yield "interleaved-zb v=4", generate("interleaved-zb", pp, m, 4, costs)
    for name in ("v-min", "v-half", "v-zb"):
        yield name, generate(name, pp, m, costs=costs)
    low, high = v_cap_limits(pp)
    for share in ("0.5", "0.75", "1"):
        cap = max(low, int(Fraction(share) * high))
        yield f"v-cap {share}", generate("v-cap", pp, m, costs=costs, memory_cap=cap)


def caps_curve(setting: Setting) -> list[Row]:
    """v-cap at every cap."""
    low, high = v_cap_limits(setting.pp)
    return [
        _row(
            f"v-cap {cap}",
            setting,
            generate(
                "v-cap", setting.pp, setting.microbatches, costs=setting.costs, memory_cap=cap
            ),
        )
        for cap in range(low, high + 1)
    ]


def _by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    found: dict[Setting, list[Row]] = {}
    for row in rows:
        found.setdefault(row.setting, []).append(row)
    return list(found.values())


def _faster(row: Row, than: Row) -> bool:
    return row.makespan < than.makespan * (1 - 1e-9)


def losses(rows: Sequence[Row], loser: str, winners: str) -> dict[str, Any]:
    """How often ``loser`` has a larger makespan than the best whose name starts with ``winners``.

    Returns:
        ``lost`` of how many ``settings``; of the lost, where a winner's peak is not larger either
        (``at_no_more_memory``); the largest ratio of makespans minus one (``worst``), ``where`` it
        is, and the winner's and loser's ``memory`` there, as shares of 1F1B's.
    """
    found: dict[str, Any] = dict.fromkeys(("lost", "settings", "at_no_more_memory"), 0)
    found |= {"loser": loser, "worst": 0.0, "where": "", "memory": ""}
    for here in _by_setting(rows):
        mine = next((row for row in here if row.name == loser), None)
        theirs = [row for row in here if row.name.startswith(winners) and row.name != loser]
        if mine is None or not theirs:
            continue
        found["settings"] += 1
        faster = [row for row in theirs if _faster(row, mine)]
        found["lost"] += bool(faster)
        found["at_no_more_memory"] += any(row.peak <= mine.peak for row in faster)
        best = min(faster, key=lambda row: row.makespan, default=mine)
        by = mine.makespan / best.makespan - 1
        if by > found["worst"]:
            found |= {"worst": by, "where": f"{best.name}, {describe(best.setting)}"}
            found["memory"] = f"{best.memory:.2f}, {mine.memory:.2f}"
    return found


def is_rival(row: Row) -> bool:
    """True for PyTorch's orders and those that stock Megatron has."""
    return row.name == "1f1b" or row.name.startswith(("torch ", "interleaved v="))


def faster_rivals(rows: Sequence[Row]) -> tuple[list[tuple[Row, Row | None, float]], int]:
    """Where a rival wins at no less memory than ours, and in how many comparisons of all.

    Returns:
        (the rival, our fastest that takes no more memory, how much longer ours is as a share; None
        and infinite where there is none) each, and the number of comparisons.
    """
    found: list[tuple[Row, Row | None, float]] = []
    count = 0
    for here in _by_setting(rows):
        for rival in filter(is_rival, here):
            count += 1
            fitting = [r for r in here if not is_rival(r) and r.peak <= rival.peak]
            best = min(fitting, key=lambda row: row.makespan, default=None)
            by = float("inf") if best is None else best.makespan / rival.makespan - 1
            if by > 1e-9:
                found.append((rival, best, by))
    return found, count


def dominated(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """name -> (settings in which another row is faster and no larger, settings)."""
    found: dict[str, tuple[int, int]] = {}
    for here in _by_setting(rows):
        for row in here:
            beaten = any(_faster(other, row) and other.peak <= row.peak for other in here)
            times, total = found.get(row.name, (0, 0))
            found[row.name] = times + beaten, total + 1
    return found


def describe(setting: Setting) -> str:
    """For people."""
    return (
        f"p = {setting.pp}, m = {setting.microbatches}, costs {','.join(setting.cost)}, "
        f"hop {setting.hop}"
    )


def from_json(rows: Sequence[Sequence[Any]]) -> list[Row]:
    """The rows of a results file."""
    return [
        Row(name, Setting(pp, m, tuple(cost.split(",")), hop), makespan, bubble, peak)
        for name, pp, m, cost, hop, makespan, bubble, peak in rows
    ]


COLUMNS = ("schedule", "pp", "microbatches", "cost", "hop", "makespan", "bubble", "peak")


def to_json(rows: Sequence[Row]) -> list[list[Any]]:
    """``COLUMNS`` of each."""
    return [
        [
            *(row.name, row.setting.pp, row.setting.microbatches, ",".join(row.setting.cost)),
            *(row.setting.hop, round(row.makespan, 4), round(row.bubble, 5), round(row.peak, 4)),
        ]
        for row in rows
    ]
