"""How each call of a MoE layer runs: predicted by simulation, corrected by times of the run.

At the first call of a layer its operations are measured once. From that the selector takes the
strategy and the layouts that keep the memory budget; calls are then timed with each number of
chunks, and with each order that may be best, and the fastest one stays (MPipeMoE, sections III-C
and III-E).
Plain Python: what touches devices comes from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .costs import LayerCosts, LayerShape
from .layout import Layout
from .memory import Load, saved_bytes
from .search import Agreed, Search, Settings, bucket, largest
from .select import BudgetError, Space, choose, predicted_ms, what_fits
from .settings import Trial, Watch, Way

MESSAGES = (
    4  # buffers of a chunk's rows for each chunk under way: sent and received, there and back
)
SETTINGS = Settings(samples=3, max_trials=100, recheck_every=5000)
NEAR = 1.1  # predicted times over the least that make another order worth a trial


def load_of(rows: int, layers: int, in_flight: int) -> Load:
    """What the runtime keeps: its messages have buffers of their own."""
    return Load(rows, layers, in_flight, messages=MESSAGES)


class Measured(NamedTuple):
    """What one layer costs; the same on all ranks of its groups.

    Attributes:
        costs: of its operations.
        kept_bytes: that its experts keep for backward per row, besides their input.
    """

    costs: LayerCosts
    kept_bytes: float


class Name(NamedTuple):
    """What layers that cost the same have in common.

    Attributes:
        shape: as the configuration has it.
        experts: on a rank.
    """

    shape: LayerShape
    experts: int

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"MoE layers of hidden size {shape.hidden}, expert FFN size {shape.ffn}, "
            f"{self.experts * shape.ranks} experts on {shape.ranks} ranks"
        )


class Signature(NamedTuple):
    """What times are good for: a layer, its strategy, and the layouts to try, by code."""

    name: Name
    strategy: str
    codes: tuple[int, ...]


def code(layout: Layout) -> int:
    """What stands for a layout in the search; more chunks, and then more lookahead, are more."""
    return layout.chunks << 8 | layout.ahead


class Chooser:
    """Decides for all MoE layers of a rank.

    Args:
        space: what may be chosen, see ``Space.of``.
        budget_bytes: of all MoE layers of the rank on the device; None: no limit.
        load: (layers, microbatches in flight) of the rank, as one product.
        say: takes a line for the log, at every change of a decision.
        settings: of the search.

    Attributes:
        finest: the most chunks of any call.
    """

    def __init__(
        self,
        space: Space,
        budget_bytes: int | None,
        load: Callable[[], tuple[int, int]],
        say: Callable[[str], None],
        settings: Settings = SETTINGS,
    ) -> None:
        self.space, self.budget_bytes, self.load, self.say = space, budget_bytes, load, say
        self.finest = max(space.chunks)
        self._layers: dict[Name, _Layer] = {}
        codes = {code(layout) for name in space.strategies for layout in space.layouts(name)}
        self.search = Search(sorted(codes), settings=settings, prior=self._prior, allowed=_allowed)
        self._agreed = Agreed()
        self._trial: _Trial | None = None

    def layer(self, name: Name, measure: Callable[[int], Measured]) -> _Layer:
        """Decides for the layers of ``name``, see ``settings.Decides``.

        Args:
            measure: gives the costs, for calls of about so many rows. It is called once, on all
                ranks of the layer's groups at the same time.
        """
        if name not in self._layers:
            self._layers[name] = _Layer(self, name, measure)
        return self._layers[name]

    def summary(self) -> list[str]:
        """What ran how often, and how well it was predicted: a line for each way of each layer."""
        return [line for layer in self._layers.values() for line in layer.summary()]

    # --- for the layers ---

    def outgoing(self) -> tuple[int, int]:
        """Of the open trial, if this rank's clock has been read."""
        trial = self._trial
        if trial is not None and trial.watch is not None:
            took = trial.watch.microseconds()
            if took is not None:
                trial.watch = None
                self._agreed.measured(trial.ticket, max(1, took))
        return self._agreed.outgoing()

    def hear(self, notes: Sequence[Sequence[int]]) -> None:
        """What all ranks had to say."""
        for timing in self._agreed.incoming([(ticket, time) for ticket, time in notes]):
            self.search.feed(timing)
            trial = self._trial
            if trial is not None and trial.ticket == timing.ticket:
                trial.seen.took(timing.time_us / 1000)
                self._trial = None

    def open(self, ticket: int, seen: _Seen) -> Trial:
        """The call of ``ticket`` begins."""
        self._trial = _Trial(ticket, seen)
        return self._trial

    def _prior(self, signature: Hashable, rows: int) -> int:
        assert isinstance(signature, Signature)
        return self._layers[signature.name].predicted(largest(bucket(rows)))


def _allowed(signature: Hashable) -> Sequence[int]:
    assert isinstance(signature, Signature)
    return signature.codes


@dataclass
class _Seen:
    """Calls with one layout in one bucket of rows."""

    calls: int = 0
    time_ms: float | None = None  # the least that was measured; its first trial does not count
    trials: int = 0
    rows: int = 0  # on this rank, where it was weighed
    nbytes: int | None = None

    def took(self, time_ms: float) -> None:
        """A trial's time."""
        self.trials += 1
        if self.trials > 1:
            self.time_ms = time_ms if self.time_ms is None else min(time_ms, self.time_ms)


class _Trial:
    """A timed call."""

    def __init__(self, ticket: int, seen: _Seen) -> None:
        self.ticket, self.seen = ticket, seen
        self.watch: Watch | None = None
        self.weighs = seen.nbytes is None

    def weighed(self, nbytes: int, rows: int) -> None:
        """See ``settings.Trial``."""
        self.seen.nbytes, self.seen.rows = nbytes, rows

    def timed(self, watch: Watch) -> None:
        """See ``settings.Trial``."""
        self.watch = watch


@dataclass
class _Plan:
    """What the budget leaves for calls of up to ``rows`` rows."""

    rows: int
    strategy: str
    layouts: dict[int, Layout]  # by code
    signature: Signature


class _Layer:
    """Decides for the layers of one name."""

    def __init__(self, chooser: Chooser, name: Name, measure: Callable[[int], Measured]) -> None:
        self._chooser, self._name, self._measure = chooser, name, measure
        self._costs: LayerCosts | None = None
        self._shape = name.shape
        self._planned: _Plan | None = None
        self._repeats = False
        self._seen: dict[tuple[int, Layout], _Seen] = {}  # by bucket of rows
        self._said: dict[int, Layout] = {}  # what the log has, by bucket

    @property
    def finest(self) -> int:
        """See ``settings.Decides``."""
        return self._chooser.finest

    def outgoing(self) -> Sequence[int]:
        """See ``settings.Decides``."""
        return self._chooser.outgoing()

    def decide(self, rows: int, notes: Sequence[Sequence[int]], saves: bool) -> Way:
        """See ``settings.Decides``."""
        chooser = self._chooser
        chooser.hear(notes)
        if self._costs is None:
            measured = self._measure(rows)
            self._costs = measured.costs
            kept = measured.kept_bytes / (self._shape.ffn * self._shape.element_bytes)
            self._shape = replace(self._shape, kept_per_ffn=kept)
        number = bucket(rows)
        # Memory is for the worst call so far, so it is planned anew when rows rise, never when
        # they fall.
        plan = self._planned
        if plan is None or largest(number) > plan.rows:
            plan = self._planned = self._plan(largest(number))
        # A forward pass that is run again must be cut as it was, so nothing is tried there.
        self._repeats |= not saves
        timed = not self._repeats
        decision = chooser.search.decide(plan.signature, rows, timed)
        layout = plan.layouts[decision.chunks]
        if not decision.ticket:
            self._say(number, layout)
        seen = self._seen.setdefault((number, layout), _Seen())
        seen.calls += saves
        trial = chooser.open(decision.ticket, seen) if decision.ticket else None
        return Way(layout.chunks, layout.restore, layout.ahead, trial)

    @property
    def shape(self) -> LayerShape:
        """With what the experts keep as measured, once it is."""
        return self._shape

    def settled(self, rows: int) -> bool:
        """Whether all trials of calls with so many rows are over."""
        plan = self._planned
        if plan is None:
            return False
        return self._chooser.search.settled(plan.signature, rows) is not None

    def predicted(self, rows: int) -> int:
        """The code of the layout that simulates fastest; the least of equals."""
        assert self._planned is not None
        layouts = self._planned.layouts
        times = {number: self._predicted(layout, rows) for number, layout in layouts.items()}
        least = min(times.values()) * (1 + 1e-9)
        return min(number for number, time in times.items() if time <= least)

    def _predicted(self, layout: Layout, rows: int) -> float:
        assert self._costs is not None
        return predicted_ms(self._shape, self._costs, rows, layout)

    def _plan(self, rows: int) -> _Plan:
        """Strategy and layouts for calls of up to ``rows`` rows."""
        chooser, budget = self._chooser, self._chooser.budget_bytes
        space, costs, load = chooser.space, self._costs, load_of(rows, *chooser.load())
        assert costs is not None
        try:
            best = choose(self._shape, load, costs, budget, space)
        except BudgetError as error:
            # Routing can send a rank more rows than anyone planned for; that ends no training.
            budget = error.needed_bytes
            best = choose(self._shape, load, costs, budget, space)
            chooser.say(f"{self._name}, up to {rows} rows on a rank: {error}; training goes on")
        strategy = best.layout.strategy
        fitting = what_fits(self._shape, load, budget, replace(space, strategies=(strategy,)))
        times = {layout: self._predicted(layout, rows) for layout, _ in fitting}
        least: dict[int, float] = {}
        for layout, time in times.items():
            least[layout.chunks] = min(time, least.get(layout.chunks, time))
        near = min(least.values()) * NEAR
        layouts = {
            code(layout): layout
            for layout, time in times.items()
            if time <= max(near, least[layout.chunks])
        }
        return _Plan(rows, strategy, layouts, Signature(self._name, strategy, tuple(layouts)))

    # --- what people read ---

    def _say(self, number: int, layout: Layout) -> None:
        if self._said.get(number) == layout:
            return
        nearest = min(self._said, key=lambda other: abs(other - number), default=None)
        news = number in self._said or nearest is None or self._said[nearest] != layout
        self._said[number] = layout
        if news:
            rows = largest(number)
            text = self._text(number, layout)
            self._chooser.say(f"{self._name}, up to {rows} rows on a rank: {text}")

    def _text(self, number: int, layout: Layout) -> str:
        rows, kept = largest(number), functools.partial(saved_bytes, self._shape)
        seen = self._seen.get((number, layout), _Seen())
        text = (
            f"{_count(layout.chunks, 'chunk')}, {layout.strategy}, {layout.ahead} ahead; a call "
            f"takes {self._predicted(layout, rows):.3f} ms predicted"
        )
        if seen.time_ms is not None:
            text += f", {seen.time_ms:.3f} ms measured"
        text += f", and keeps {kept(rows, layout.strategy)} bytes predicted"
        if seen.nbytes is not None:
            own = kept(seen.rows, layout.strategy)
            text += f" ({own} for this rank's {seen.rows} rows, {seen.nbytes} measured)"
        return text

    def summary(self) -> list[str]:
        """See ``Chooser.summary``."""
        ways: dict[Layout, list[tuple[int, int]]] = {}
        for (number, layout), seen in self._seen.items():
            if seen.calls:
                ways.setdefault(layout, []).append((seen.calls, number))
        return [
            f"{_count(sum(calls for calls, _ in used), 'call')} of {self._name}, most of them with "
            f"up to {largest(max(used)[1])} rows on a rank: {self._text(max(used)[1], layout)}"
            for layout, used in sorted(ways.items(), key=lambda way: -sum(n for n, _ in way[1]))
        ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
