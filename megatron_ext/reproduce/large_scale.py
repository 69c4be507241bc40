"""NVIDIA's settings for many GPUs and few microbatches a pipeline, under stock and under ours."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from ..schedule import Simulation, generate, simulate
from .rows import Cell, Kind, Paper, Table


class Setting(NamedTuple):
    """One recipe's pipeline."""

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

    @property
    def zero_bubble(self) -> str:
        """The schedule of 1F1B's memory that keeps the recipe's virtual stages, or V-ZB for two."""
        return "interleaved-zb" if self.chunks > 2 else "v-zb"

    def run(self, name: str) -> Simulation:
        """A schedule at equal costs, with the recipe's virtual stages where it takes any number."""
        return _run(name, self.pp, self.microbatches, self.chunks)

    @property
    def stock(self) -> Simulation:
        """1F1B, or Megatron's interleaved 1F1B."""
        return self.run("1f1b" if self.chunks == 1 else "interleaved")

    def memory(self, run: Simulation) -> float:
        """The worst rank's peak as a fraction of 1F1B's."""
        return float(max(run.peak_activation)) / self.pp

    def limit(self, run: Simulation) -> float:
        """How many times as fast as stock an iteration can get, if nothing but passes counts."""
        return float(self.stock.makespan / run.makespan)


@cache
def _run(name: str, pp: int, microbatches: int, chunks: int) -> Simulation:
    any_number = name in ("interleaved", "interleaved-zb")
    return simulate(generate(name, pp, microbatches, chunks if any_number else None))


def settings(data: dict[str, Any]) -> list[Setting]:
    """The recipes of the data file."""
    return [Setting(*row) for row in data["rows"]]


def idle(run: Simulation) -> float:
    """In per cent."""
    return float(100 * run.bubble)


def _stock(data: dict[str, Any]) -> Iterator[Cell]:
    for one in settings(data):
        note = f"{one.stock.schedule.name}, memory {one.memory(one.stock):.2f}"
        yield Cell(one.row, one.published, idle(one.stock), 3, note=note)


def _ours(data: dict[str, Any], name: str) -> Iterator[Cell]:
    for one in settings(data):
        run = one.run(name or one.zero_bubble)
        note = f"{run.schedule.name}, memory {one.memory(run):.2f}, limit {one.limit(run):.2f}x"
        yield Cell(one.row, one.published, idle(run), note=note)


_ASSUMED = (
    "F = B = W for every stage and no time for messages; memory is the worst rank's activations as "
    "a fraction of 1F1B's",
    "stock is 1F1B, or interleaved 1F1B with the recipe's virtual stages; passes in pairs for the "
    "expert-parallel exchange, CUDA graphs and recompute are left out",
)
_LIMIT = (
    "limit is stock's simulated iteration over ours: a limit of the speed-up, compute only, equal "
    "costs. Nothing was measured; messages, unequal passes and the optimizer reduce it",
)
PAPER = Paper(
    "large-scale",
    (
        Table("stock", "Idle share of stock Megatron", "settings", Kind.EXACT, "%", _stock,
              _ASSUMED),
        Table("idle", "Idle share of a zero-bubble schedule at 1F1B's memory, beside stock's",
              "settings", Kind.ORDER, "%", lambda data: _ours(data, ""),
              (*_ASSUMED, *_LIMIT, "v-zb with two chunks a rank, or interleaved-zb with the "
               "recipe's virtual stages where these are more")),
        Table("half", "Idle share of V-Half, with less memory, beside stock's", "settings",
              Kind.ORDER, "%", lambda data: _ours(data, "v-half"), (*_ASSUMED, *_LIMIT),
              above="V-Half has two chunks a rank and gives up idle time for memory, while stock "
              "has more chunks and at least 1F1B's memory"),
    ),
)  # fmt: skip
