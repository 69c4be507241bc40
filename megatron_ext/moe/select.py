"""Which chunks, strategy, order and slots make a MoE layer fastest within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .costs import DIRECTIONS, LayerCosts, LayerShape, Times, chunk_times
from .layout import ALTERNATE, DISPATCH_FIRST, ORDERS, Layout, Ring
from .memory import Footprint, Load, footprint
from .simulate import lower_bound_ms, simulate
from .strategies import Strategy

CHUNKS = (1, 2, 4, 8)
AUTO = "auto"

# By what they need: nothing, all-to-alls and computation, then more and more of the host.
SIMPLEST_FIRST = ("none", "s4", "s3", "s2", "s1")

_EQUAL = 1e-9  # times closer than this, relative, are rounding; then the simpler one is taken


@dataclass(frozen=True)
class Space:
    """What may be chosen from; what a user fixes has one entry.

    Attributes:
        chunks: n. Powers of two: GEMM times that go in steps leave other searches in local minima.
        strategies: names of ``Strategy``.
        orders: of the all-to-alls. ``dispatch-first`` keeps a slot for every chunk.
        lookaheads: dispatches before the first combine, for ``alternate``; cut to twice the slots,
            beyond which they would wait for themselves.
        depths: slots of T_DI and T_DO; None: as many as the lookahead, two at least, which is what
            the runtime has. middles: slots of T_M.
        packed: see ``Layout``; not chosen, but what the runtime does.
    """

    chunks: tuple[int, ...] = CHUNKS
    strategies: tuple[str, ...] = SIMPLEST_FIRST
    orders: tuple[str, ...] = ORDERS
    lookaheads: tuple[int, ...] = (2, 3)
    depths: tuple[int, ...] | None = (2, 3)
    middles: tuple[int, ...] = (1, 2)
    packed: bool = True

    def __post_init__(self) -> None:
        for name in ("chunks", "strategies", "orders", "lookaheads", "depths", "middles"):
            if getattr(self, name) == ():
                raise ValueError(f"there is nothing to choose from: {name} is empty")
        if min(self.chunks) < 1:
            raise ValueError(f"a layer has at least one chunk, got {min(self.chunks)}")
        for strategy in self.strategies:
            Strategy(strategy)
        unknown = [order for order in self.orders if order not in ORDERS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(ORDERS)}")

    @classmethod
    def of(cls, chunks: str | int = AUTO, strategy: str = AUTO) -> Space:
        """What the runtime can do within the flags' values; ``auto`` leaves a part free.

        Raises:
            ValueError: a number of chunks that is none, or an unknown strategy.
        """
        space = cls(depths=None, middles=(2,))
        if chunks != AUTO:
            try:
                number = int(chunks)
            except ValueError:
                raise ValueError(f"chunks must be {AUTO} or a number, got {chunks!r}") from None
            space = replace(space, chunks=(number,))
        return space if strategy == AUTO else replace(space, strategies=(strategy,))

    def layouts(self, strategy: str) -> Iterator[Layout]:
        """All that differ, the simpler ones first."""
        seen = set()
        for chunks in sorted(set(self.chunks)):
            for layout in self._of(chunks, strategy):
                ring = layout.ring
                # Slots beyond the chunks, and all of them where nothing is reused, are the same.
                same = ring.input, ring.middle, layout.ahead
                if strategy == "none":
                    same = None, None, layout.ahead
                if (chunks, same) not in seen:
                    seen.add((chunks, same))
                    yield layout

    def _of(self, chunks: int, strategy: str) -> Iterator[Layout]:
        for order in (one for one in (ALTERNATE, DISPATCH_FIRST) if one in self.orders):
            alternate = order == ALTERNATE
            for ahead in sorted(set(self.lookaheads)) if alternate else (2,):
                depths = (max(2, ahead),) if self.depths is None else sorted(set(self.depths))
                for depth in depths if alternate else (chunks,):
                    for middle in sorted(set(self.middles)):
                        slots = min(depth, chunks)
                        ring = Ring(slots, min(middle, chunks), slots)
                        most = min(ahead, chunks, 2 * slots)
                        yield Layout(chunks, strategy, order, most, ring, packed=self.packed)


class Choice(NamedTuple):
    """What was chosen: a layout, its simulated time forward and backward, its bytes."""

    layout: Layout
    time_ms: float
    footprint: Footprint


class BudgetError(ValueError):
    """Nothing that may be chosen keeps the budget.

    Attributes:
        needed_bytes: the smallest budget that would do.
    """

    def __init__(self, text: str, needed_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


def choose(
    shape: LayerShape,
    load: Load,
    costs: LayerCosts,
    budget_bytes: int | None = None,
    space: Space | None = None,
) -> Choice:
    """The fastest layout by simulation whose predicted peak keeps the budget.

    MPipeMoE chooses the strategy by its slowest stream (equation 10) after n is known; here all of
    it is chosen at once, and n = 1 with ``none`` is among the candidates unless it was ruled out:
    so by prediction the choice is never slower than the layer as it is, where that fits.
    Of equally fast ones the one with fewer chunks is taken, then the simpler strategy, the paper's
    order, and fewer slots. It depends on nothing but the arguments.

    Args:
        shape, costs: the layer.
        load: rows must be the most over the ranks that exchange, so that all choose the same.
        budget_bytes: for the MoE layers of the device; None: no limit.
        space: default all.

    Raises:
        BudgetError: nothing fits.
    """
    space = Space() if space is None else space
    timer = _Timer(shape, load.rows, costs)
    fitting = what_fits(shape, load, budget_bytes, space)
    bounds = [timer.bound(layout) for layout, _ in fitting]
    least, times = float("inf"), dict[int, float]()
    for i in sorted(range(len(fitting)), key=lambda k: (bounds[k], k)):
        if bounds[i] > least * (1 + 2 * _EQUAL):  # neither it nor those after it can win
            break
        times[i] = timer.time(fitting[i][0])
        least = min(least, times[i])
    best = min(i for i, time in times.items() if time <= least * (1 + _EQUAL))
    layout, needs = fitting[best]
    return Choice(layout, times[best], needs)


def what_fits(
    shape: LayerShape, load: Load, budget_bytes: int | None, space: Space
) -> list[tuple[Layout, Footprint]]:
    """All layouts that keep the budget, the simpler ones first; arguments as of ``choose``.

    Raises:
        BudgetError: there is none.
    """
    layouts = [one for strategy in space.strategies for one in space.layouts(strategy)]
    found = [(layout, footprint(shape, load, layout)) for layout in layouts]
    found.sort(key=lambda one: _simplicity(one[0]))
    fitting = [one for one in found if budget_bytes is None or one[1].peak_bytes <= budget_bytes]
    if not fitting:
        raise _too_little(*min(found, key=lambda one: one[1].peak_bytes), budget_bytes)
    return fitting


def predicted_ms(shape: LayerShape, costs: LayerCosts, rows: int, layout: Layout) -> float:
    """Simulated forward and backward of a call with ``rows`` rows on the busiest rank."""
    return _Timer(shape, rows, costs).time(layout)


class _Timer:
    """Simulated times of one layer, forward and backward."""

    def __init__(self, shape: LayerShape, rows: int, costs: LayerCosts) -> None:
        self._shape, self._rows, self._costs = shape, rows, costs
        self._chunks: dict[int, tuple[Times, ...]] = {}

    def _times(self, chunks: int) -> tuple[Times, ...]:
        if chunks not in self._chunks:
            self._chunks[chunks] = chunk_times(self._shape, self._costs, self._rows, chunks)
        return self._chunks[chunks]

    def time(self, layout: Layout) -> float:
        times = self._times(layout.chunks)
        return sum(simulate(layout, direction, times).makespan_ms for direction in DIRECTIONS)

    def bound(self, layout: Layout) -> float:
        """Never more than ``time``, and cheap."""
        times = self._times(layout.chunks)
        total = sum(lower_bound_ms(layout, direction, times) for direction in DIRECTIONS)
        return total * (1 - 1e-12)  # its sums round differently


def _simplicity(layout: Layout) -> tuple[int, ...]:
    ring = layout.ring
    return (
        layout.chunks,
        SIMPLEST_FIRST.index(layout.strategy),
        ORDERS.index(layout.order),
        layout.ahead,
        (ring.input or layout.chunks) + (ring.output or layout.chunks),
        ring.middle or layout.chunks,
    )


def _too_little(layout: Layout, needs: Footprint, budget_bytes: int | None) -> BudgetError:
    """Says the least that would do, which is ``layout``'s, and what takes it."""
    what, cure = _binding(needs)
    return BudgetError(
        f"a budget of {budget_bytes} bytes on the device is too small for the MoE layers: the "
        f"least is {needs.peak_bytes} bytes, with {layout.chunks} chunks and {layout.strategy} "
        f"({what}); raise it to that, or allow {cure}",
        needs.peak_bytes,
    )


def _binding(needs: Footprint) -> tuple[str, str]:
    """What takes most of the device's peak, and what could be done about it."""
    if needs.saved_bytes >= needs.ring_bytes + needs.temporary_bytes:
        return (
            f"most of it is kept for backward: {needs}",
            "another strategy, or have fewer microbatches in flight or MoE layers on the rank",
        )
    return f"most of it are the buffers of one chunk: {needs}", "more chunks, or fewer tokens"
