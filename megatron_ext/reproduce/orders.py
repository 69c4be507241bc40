"""Papers' tables that an order under given times answers, and no closed form of a grid."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from ..schedule import (
    Costs,
    Link,
    ScheduleSpec,
    Simulation,
    generate,
    offload_pass,
    select,
    simulate,
)
from ..schedule.generators import Objective
from ..schedule.memory_cap import ShareCap
from .quantities import run
from .rows import Cell, published


def _periods(data: dict[str, Any]) -> Iterator[Cell]:
    """Whether 32 more microbatches take longer than their passes (Controllable Memory)."""
    costs = Costs.of(*data["costs"])
    for name, value in data["rows"].items():
        few, many = (run(name, 4, m, costs=costs).makespan for m in (32, 64))
        idle = (many - few) / 32 - sum(data["costs"])
        # Less than a hundredth of a period is the ends', not the period's.
        found = "a bubble in every period" if idle > Fraction(sum(data["costs"]), 100) else "none"
        yield Cell(f"{name}, F,B,W=3,4,2", value, found)


def _caps(data: dict[str, Any]) -> Iterator[Cell]:
    for costs, values in data["rows"].items():
        times = data["costs"][costs]
        for share, value in zip(data["caps"], values):
            cap = Fraction(share)
            spec = ScheduleSpec("v-cap", 8, 16, costs=Costs.of(*times), cap=ShareCap(cap))
            makespan = simulate(select(spec).schedule).makespan
            yield Cell(f"F,B,W={','.join(times)}, cap={float(cap):g}", value, float(makespan))


# Zero Bubble: ours, and for which time those with split backward passes are made.
_ZERO_BUBBLE: dict[str, tuple[str, Objective]] = {
    "1F1B": ("1f1b", "makespan"),
    "1F1B-I": ("interleaved", "makespan"),
    "ZB-1P": ("zb-h1", "span"),
    "ZB-2P": ("zb-h2", "span"),
    "V-ZB": ("v-zb", "span"),
}


def _profiled(name: str, p: int, m: int, v: int, times: list[float]) -> tuple[Simulation, Fraction]:
    """A schedule at a profile's F, B, W and hop in ms, and the bubble that counts.

    That is of the longest rank's own span where an optimizer does not wait.
    """
    ours, objective = _ZERO_BUBBLE[name]
    chunks = v if ours == "interleaved" else None
    found = run(ours, p, m, chunks, Costs.of(*map(str, times)), objective)
    return found, found.span_bubble if objective == "span" else found.bubble


def _throughput(data: dict[str, Any]) -> Iterator[Cell]:
    for model, cells in data["rows"].items():
        p, size, chunks, *times = data["models"][model]
        for name in ("1F1B", "1F1B-I", "ZB-1P", "ZB-2P"):
            for m, value in zip(cells["m"], cells[name]):
                found, bubble = _profiled(name, p, m, chunks, times)
                seconds = float(found.makespan * ((1 - found.bubble) / (1 - bubble))) / 1e3
                yield Cell(f"{model}, m={m}, {name}", value, m * size / (seconds * p))


def _rates(data: dict[str, Any]) -> Iterator[Cell]:
    """Bubble rates with the hop at which 1F1B's, at the first m, is the published one."""
    for model, cells in data["rows"].items():
        p, ms, times = cells["p"], cells["m"], data["models"][model][3:6]
        low, high = 0.0, 10.0
        for _ in range(14):
            middle = (low + high) / 2
            bubble = _profiled("1F1B", p, ms[0], 1, [*times, round(middle, 3)])[1]
            low, high = (middle, high) if bubble < cells["1F1B"][0] else (low, middle)
        for name in ("V-ZB", "1F1B"):
            for m, value in zip(ms, cells[name]):
                if (name, m) != ("1F1B", ms[0]):
                    rate = _profiled(name, p, m, 1, [*times, round(low, 3)])[1]
                    yield Cell(f"{model}, p={p}, m={m}, {name}", value, float(rate))


def _slowdown(data: dict[str, Any]) -> Iterator[Cell]:
    """Of 1F1B with full offload, at the printed k of each cell (PipeOffload)."""
    base = generate("1f1b", 8, 32)
    alone = simulate(base).makespan

    @cache
    def stall(k: float) -> float:
        link = Link.of(8, Fraction(round(k * 100), 200), policy=data["policy"])
        return float(100 * offload_pass(base, link, "full").stall / alone)

    table = published()["pipeoffload"]["tables"]["k"]
    for hidden, values in data["rows"].items():
        for sequence, value, k in zip(table["sequences"], values, table["rows"][hidden]):
            reason = data["faster"] if value < 0 else ""
            yield Cell(f"h={hidden}, s={sequence} (k={k:.2f})", value, stall(k), reason=reason)


def _selective(data: dict[str, Any]) -> Iterator[Cell]:
    """PO's peak when n chunks leave, and whether it falls faster than the chunks that stay."""
    p = v = 8
    base = generate("po", p, 4 * p, v)
    every = max(simulate(base).peak_sets)
    for n in data["leaving"]:
        sets = max(offload_pass(base, Link.of(p, "0.25"), str(n)).peak_sets) if n else every
        row = f"p=8, v=8, {n} of 8 chunks: sets"
        if data["linear"]:
            less = "less than linear" if sets * v < every * (v - n) else "not less"
            yield Cell(row, "less than linear", less)
        else:
            yield Cell(row, p * (v - n) * (v - n + 1) / (2 * v), sets)


def _constant(data: dict[str, Any]) -> Iterator[Cell]:
    layers = data["models"]["5.8B"][0]
    for p in data["ranks"]:
        base = generate("po", p, 4 * p, layers // p)
        plan = offload_pass(base, Link.of(p, "0.3"), "full")
        yield Cell(f"5.8B, p={p}, v={layers // p}: layers", data["layers"], max(plan.peak_sets))


class Device(NamedTuple):
    """A row of DualPipe's comparison.

    Attributes:
        exchange: in F and in B each, of a stage that computes F = B = W = 1.
        paired: ours is our fastest schedule with pairs, on the method's devices, in its memory.
    """

    method: str
    stages: int
    exchange: Fraction
    paired: bool

    @property
    def own(self) -> int:
        """Of DualPipe's stages, on one device."""
        return 2 if self.method == "DualPipeV" else 1

    def generated(self, microbatches: int) -> Simulation:
        """The method's own schedule; of DualPipe and DualPipeV the latter."""
        name = {"1F1B": "1f1b", "ZB1P": "zb-h1"}.get(self.method, "dualpipev")
        return run(name, self.stages // self.own, microbatches, costs=self.costs)

    @property
    def costs(self) -> Costs:
        """Of a device."""
        longer = self.own * (1 + self.exchange)
        return Costs.of(longer, longer, self.own).with_exchange([[self.own * self.exchange] * 2])

    @property
    def simulated(self) -> Simulation:
        """What ours is taken from."""
        return _paired(self) if self.paired else self.generated(2 * self.stages)

    def idle(self) -> float:
        """A step's time but for the passes of the method's most idle device.

        DualPipe runs DualPipeV's order for half of the microbatches on each half of its devices.
        """
        passes = self
        microbatches = 2 * self.stages
        if self.paired:
            passes = self._replace(method="DualPipeV")
            microbatches //= 2 if self.method == "DualPipe" else 1
        return float(self.simulated.makespan - _busy(passes.generated(microbatches)))

    def bubble(self) -> float:
        """As published."""
        f, w = 1 + self.exchange, 1
        b = f + w
        if self.method in ("1F1B", "ZB1P"):
            return float((self.stages - 1) * (f + b - (2 * w if self.method == "ZB1P" else 0)))
        both = max(Fraction(3), 2 * self.exchange, b)  # computation, communication, and B alone
        return float((self.stages // 2 - 1) * (both + b - 3 * w))


@cache
def _paired(device: Device) -> Simulation:
    ranks = device.stages // device.own
    cap = ShareCap(Fraction(device.stages + 1, device.own * ranks))
    names, m = ("v-half", "v-zb"), 2 * device.stages
    spec = ScheduleSpec("auto", ranks, m, None, device.costs, cap, names=names, overlap=True)
    return simulate(select(spec).schedule)


def _busy(found: Simulation) -> Fraction:
    """Time of all passes of the most idle rank."""
    durations = found.schedule.costs.durations(found.schedule.placement)
    each = (
        sum(durations.joint([(part.op, part.stage) for part in action.parts]) for action in row)
        for row in found.schedule.compute().ranks
    )
    return Fraction(min(each), durations.scale)


def _devices(data: dict[str, Any]) -> Iterator[Cell]:
    every = product((8, 16), (0, 0.5, 1), data["rows"], (False, True))
    for stages, exchange, method, paired in every:
        # DualPipe itself is not made here; without an exchange pairs gain nothing.
        if method == "DualPipe" and not paired:
            continue
        if paired and not (exchange and method.startswith("DualPipe")):
            continue
        one = Device(method, stages, Fraction(exchange), paired)
        value: float
        if data["quantity"] == "bubble":
            value, ours = one.bubble(), one.idle()
        elif data["quantity"] == "activations":
            value = stages + data["rows"][method]["more_sets"]
            ours = float(one.own * max(one.simulated.peak_activation))
        else:
            # Every stage is on one rank, and ranks have equally many.
            value, ours = data["rows"][method]["parameters"], stages / one.simulated.schedule.pp
        row = f"PP={stages}, exchange {float(one.exchange):g}, {method}"
        yield Cell(row + ": our pairs on as many devices" * paired, value, ours)


class Recipe(NamedTuple):
    """One large-scale recipe's pipeline, at equal costs."""

    label: str
    pp: int
    chunks: int
    microbatches: int

    @property
    def row(self) -> str:
        """For people."""
        return f"{self.label}: PP {self.pp}, VP {self.chunks}, m {self.microbatches}"

    @property
    def published(self) -> float:
        """Stock's idle share in per cent, from the settings alone."""
        idle = self.pp - 1
        return float(100 * Fraction(idle, self.chunks * self.microbatches + idle))

    def run(self, name: str) -> Simulation:
        """A schedule with the recipe's virtual stages, where it takes any number of them.

        Args:
            name: or ``stock``: 1F1B or Megatron's interleaved 1F1B; or ``zero-bubble``: of 1F1B's
                memory, with the recipe's virtual stages or, for two, V-ZB.
        """
        if name == "stock":
            name = "1f1b" if self.chunks == 1 else "interleaved"
        elif name == "zero-bubble":
            name = "interleaved-zb" if self.chunks > 2 else "v-zb"
        chunks = self.chunks if name.startswith("interleaved") else None
        return run(name, self.pp, self.microbatches, chunks)

    def memory(self, name: str) -> float:
        """The worst rank's peak as a fraction of 1F1B's."""
        return float(max(self.run(name).peak_activation)) / self.pp

    def idle(self, name: str) -> float:
        """In per cent."""
        return float(100 * self.run(name).bubble)

    def limit(self, name: str) -> float:
        """How many times as fast as stock an iteration can get, if nothing but passes counts."""
        return float(self.run("stock").makespan / self.run(name).makespan)


def _recipes(data: dict[str, Any]) -> Iterator[Cell]:
    name = data["schedule"]
    for row in data["rows"]:
        one = Recipe(*row)
        note = f"{one.run(name).schedule.name}, memory {one.memory(name):.2f}"
        if name != "stock":
            note += f", limit {one.limit(name):.2f}x"
        yield Cell(one.row, one.published, one.idle(name), 3, note=note)


CELLS = (
    _periods,
    _caps,
    _throughput,
    _rates,
    _slowdown,
    _selective,
    _constant,
    _devices,
    _recipes,
)
