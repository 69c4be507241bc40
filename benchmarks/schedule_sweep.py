"""The table: every schedule for many pipelines and costs, and who loses to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Loss:
    """How often ``loser`` has the larger makespan than the best of ``winners``.

    Attributes:
        lost, settings: in how many settings, of how many.
        at_no_more_memory: of the lost, where the winner's peak is not larger either.
        worst: largest ratio of makespans minus one, with the setting and the winner.
        memory: winner's and loser's peak there, as shares of 1F1B's.
    """

    loser: str
    winners: str
    lost: int
    settings: int
    at_no_more_memory: int
    worst: float
    where: str
    memory: tuple[float, float]


def losses(rows: Sequence[Row], loser: str, winners: str) -> Loss:
    """``loser`` against all rows whose name starts with ``winners``."""
    by_setting: dict[Setting, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    lost = count = cheap = 0
    worst, where, memory = 0.0, "", (0.0, 0.0)
    for setting, here in by_setting.items():
        mine = next((row for row in here if row.name == loser), None)
        theirs = [row for row in here if row.name.startswith(winners) and row.name != loser]
        if mine is None or not theirs:
            continue
        count += 1
        faster = [row for row in theirs if row.makespan < mine.makespan * (1 - 1e-9)]
        if not faster:
            continue
        lost += 1
        cheap += any(row.peak <= mine.peak for row in faster)
        best = min(faster, key=lambda row: row.makespan)
        if mine.makespan / best.makespan - 1 > worst:
            worst = mine.makespan / best.makespan - 1
            where = f"{best.name}, {describe(setting)}"
            memory = best.memory, mine.memory
    return Loss(loser, winners, lost, count, cheap, worst, where, memory)


@dataclass(frozen=True)
class Faster:
    """A setting in which a rival is faster than anything of ours with no more memory.

    Attributes:
        rival: the row of Megatron's or PyTorch's order.
        ours: our fastest that takes no more memory; None if there is none.
    """

    rival: Row
    ours: Row | None

    @property
    def by(self) -> float:
        """How much longer ours is, as a share; infinite where there is none."""
        return float("inf") if self.ours is None else self.ours.makespan / self.rival.makespan - 1


def is_rival(row: Row) -> bool:
    """True for PyTorch's orders and those that stock Megatron has."""
    return row.name == "1f1b" or row.name.startswith(("torch ", "interleaved v="))


def faster_rivals(rows: Sequence[Row]) -> tuple[list[Faster], int]:
    """Where a rival wins at no less memory than ours, and in how many comparisons of all."""
    by_setting: dict[Setting, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    found, count = [], 0
    for here in by_setting.values():
        for rival in filter(is_rival, here):
            count += 1
            fitting = [r for r in here if not is_rival(r) and r.peak <= rival.peak]
            best = min(fitting, key=lambda row: row.makespan, default=None)
            if best is None or best.makespan > rival.makespan * (1 + 1e-9):
                found.append(Faster(rival, best))
    return found, count


def dominated(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """name -> (settings in which another row is faster and no larger, settings)."""
    by_setting: dict[Setting, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    found: dict[str, tuple[int, int]] = {}
    for here in by_setting.values():
        for row in here:
            beaten = any(
                other.makespan < row.makespan * (1 - 1e-9) and other.peak <= row.peak
                for other in here
            )
            times, total = found.get(row.name, (0, 0))
            found[row.name] = times + beaten, total + 1
    return found


def describe(setting: Setting) -> str:
    """For people."""
    return (
        f"p = {setting.pp}, m = {setting.microbatches}, costs {','.join(setting.cost)}, "
        f"hop {setting.hop}"
    )


def from_json(data: dict[str, Any]) -> list[Row]:
    """The rows of a results file."""
    return [
        Row(name, Setting(pp, m, tuple(cost.split(",")), hop), makespan, bubble, peak)
        for name, pp, m, cost, hop, makespan, bubble, peak in data["rows"]
    ]


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Columns and rows, compact."""
    columns = ["schedule", "pp", "microbatches", "cost", "hop", "makespan", "bubble", "peak"]
    data = [
        [
            row.name,
            row.setting.pp,
            row.setting.microbatches,
            ",".join(row.setting.cost),
            row.setting.hop,
            round(row.makespan, 4),
            round(row.bubble, 5),
            round(row.peak, 4),
        ]
        for row in rows
    ]
    return {"columns": columns, "rows": data}
