"""Which chunks, strategy, order and slots make a MoE layer fastest within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .costs import BACKWARD, FORWARD, STRATEGIES, LayerCosts, LayerShape, Times, chunk_times
from .layout import ALTERNATE, DISPATCH_FIRST, ORDERS, Layout, Ring
from .memory import Footprint, Load, footprint
from .simulate import lower_bound_ms, simulate

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
        strategies: of ``STRATEGIES``.
        orders: of the all-to-alls. ``dispatch-first`` keeps a slot for every chunk.
        lookaheads: dispatches before the first combine, for ``alternate``; cut to twice the slots,
            beyond which they would wait for themselves.
        depths: slots of T_DI and T_DO; None: as many as the lookahead, two at least, which is what
            the runtime has. middles: slots of T_M.
        packed: see ``Layout``; not chosen, but what the runtime does.
        per_direction: forward and backward each have their own n, order and lookahead.
    """

    chunks: tuple[int, ...] = CHUNKS
    strategies: tuple[str, ...] = SIMPLEST_FIRST
    orders: tuple[str, ...] = ORDERS
    lookaheads: tuple[int, ...] = (2, 3)
    depths: tuple[int, ...] | None = (2, 3)
    middles: tuple[int, ...] = (1, 2)
    packed: bool = True
    per_direction: bool = False

    def __post_init__(self) -> None:
        for name in ("chunks", "strategies", "orders", "lookaheads", "depths", "middles"):
            if getattr(self, name) == ():
                raise ValueError(f"there is nothing to choose from: {name} is empty")
        if min(self.chunks) < 1:
            raise ValueError(f"a layer has at least one chunk, got {min(self.chunks)}")
        for known, names in ((STRATEGIES, self.strategies), (ORDERS, self.orders)):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}")

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


def only(space: Space, layout: Layout) -> Space:
    """``space`` with nothing in it but ``layout``, which must be one of its own."""
    return replace(
        space,
        chunks=(layout.chunks,),
        strategies=(layout.strategy,),
        orders=(layout.order,),
        lookaheads=(layout.ahead,),
    )


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what is predicted for it.

    Attributes:
        forward, backward: they differ in strategy never, and otherwise only if that was asked for.
        forward_ms, backward_ms: simulated.
        footprint: bytes.
        unpipelined_ms: forward and backward with n = 1 and ``none``.
        tried: how many layouts were compared.
    """

    forward: Layout
    backward: Layout
    forward_ms: float
    backward_ms: float
    footprint: Footprint
    unpipelined_ms: float
    tried: int

    @property
    def time_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    @property
    def strategy(self) -> str:
        """Of both directions."""
        return self.forward.strategy

    def __str__(self) -> str:
        one, other = self.forward, self.backward
        chunks = f"{one.chunks}" if one.chunks == other.chunks else f"{one.chunks}/{other.chunks}"
        return (
            f"{chunks} chunks, {self.strategy}, {one.order}: {self.time_ms:.3f} ms predicted, "
            f"unpipelined {self.unpipelined_ms:.3f} ms; {self.footprint.peak_bytes} bytes at peak"
        )


class BudgetError(ValueError):
    """Nothing that may be chosen keeps the budget.

    Attributes:
        needed_bytes: the smallest budget of the kind exceeded that would do, the other kept if it
            can be.
        on_host: whether it is the host's.
    """

    def __init__(self, text: str, needed_bytes: int, on_host: bool) -> None:
        super().__init__(text)
        self.needed_bytes, self.on_host = needed_bytes, on_host


def choose(
    shape: LayerShape,
    load: Load,
    costs: LayerCosts,
    budget_bytes: int | None = None,
    space: Space | None = None,
    *,
    host_budget_bytes: int | None = None,
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
        host_budget_bytes: for what offload keeps on the host.

    Raises:
        BudgetError: nothing fits.
    """
    space = Space() if space is None else space
    timer = _Timer(shape, load.rows, costs)
    fitting = what_fits(shape, load, budget_bytes, space, host_budget_bytes)
    best = fastest([pair for pair, _ in fitting], timer.bound, timer.time)
    pair, needs = fitting[best]
    plain = Layout()
    return Choice(
        *pair,
        timer(pair[0], FORWARD),
        timer(pair[1], BACKWARD),
        needs,
        timer(plain, FORWARD) + timer(plain, BACKWARD),
        len(fitting),
    )


Pair = tuple[Layout, Layout]


def what_fits(
    shape: LayerShape,
    load: Load,
    budget_bytes: int | None,
    space: Space,
    host_budget_bytes: int | None = None,
) -> list[tuple[Pair, Footprint]]:
    """All layouts that keep the budgets, the simpler ones first; arguments as of ``choose``.

    Raises:
        BudgetError: there is none.
    """
    pairs = list(_pairs(space))
    prints = [footprint(shape, load, *pair) for pair in pairs]
    fitting = [
        (pair, needs)
        for pair, needs in zip(pairs, prints)
        if _keeps(needs.peak_bytes, budget_bytes) and _keeps(needs.host_bytes, host_budget_bytes)
    ]
    if not fitting:
        raise _too_little(pairs, prints, budget_bytes, host_budget_bytes)
    return sorted(fitting, key=lambda one: _simplicity(*one[0]))


def fastest(
    pairs: Sequence[Pair], bound: Callable[[Pair], float], time: Callable[[Pair], float]
) -> int:
    """Index of the first of ``pairs`` that no other beats by more than rounding.

    Args:
        pairs: the simpler ones first.
        bound: never more than ``time``, and cheap; those that cannot win are not timed.
        time: of forward and backward.
    """
    least = float("inf")
    times: dict[int, float] = {}
    bounds = [bound(pair) for pair in pairs]
    for i in sorted(range(len(pairs)), key=lambda k: (bounds[k], k)):
        if bounds[i] > least * (1 + 2 * _EQUAL):
            break
        times[i] = time(pairs[i])
        least = min(least, times[i])
    return min(i for i, t in times.items() if t <= least * (1 + _EQUAL))


def predicted_ms(shape: LayerShape, costs: LayerCosts, rows: int, layout: Layout) -> float:
    """Simulated forward and backward of a call with ``rows`` rows on the busiest rank."""
    return _Timer(shape, rows, costs).time((layout, layout))


class _Timer:
    """Simulated times of one layer, each simulated once."""

    def __init__(self, shape: LayerShape, rows: int, costs: LayerCosts) -> None:
        self._shape, self._rows, self._costs = shape, rows, costs
        self._chunks: dict[int, tuple[Times, ...]] = {}
        self._known: dict[tuple[Layout, str], float] = {}
        self._bounds: dict[tuple[Layout, str], float] = {}

    def _times(self, chunks: int) -> tuple[Times, ...]:
        if chunks not in self._chunks:
            self._chunks[chunks] = chunk_times(self._shape, self._costs, self._rows, chunks)
        return self._chunks[chunks]

    def __call__(self, layout: Layout, direction: str) -> float:
        key = layout, direction
        if key not in self._known:
            times = self._times(layout.chunks)
            run = simulate(layout, direction, times)
            self._known[key] = run.makespan_ms
        return self._known[key]

    def time(self, pair: Pair) -> float:
        return self(pair[0], FORWARD) + self(pair[1], BACKWARD)

    def bound(self, pair: Pair) -> float:
        total = 0.0
        for layout, direction in zip(pair, (FORWARD, BACKWARD)):
            key = layout, direction
            if key not in self._bounds:
                times = self._times(layout.chunks)
                self._bounds[key] = lower_bound_ms(layout, direction, times)
            total += self._bounds[key]
        return total * (1 - 1e-12)  # its sums round differently


def _pairs(space: Space) -> Iterator[Pair]:
    for strategy in space.strategies:
        layouts = list(space.layouts(strategy))
        for one in layouts:
            for other in layouts if space.per_direction else (one,):
                yield one, other


def _simplicity(forward: Layout, backward: Layout) -> tuple[int, ...]:
    both = (forward, backward)
    return (
        sum(one.chunks for one in both),
        max(one.chunks for one in both),
        SIMPLEST_FIRST.index(forward.strategy),
        sum(ORDERS.index(one.order) for one in both),
        sum(one.ahead for one in both),
        sum((one.ring.input or one.chunks) + (one.ring.output or one.chunks) for one in both),
        sum(one.ring.middle or one.chunks for one in both),
        forward.chunks,
    )


def _keeps(needed: int, budget: int | None) -> bool:
    return budget is None or needed <= budget


def _too_little(
    pairs: Sequence[Pair],
    prints: Sequence[Footprint],
    budget_bytes: int | None,
    host_budget_bytes: int | None,
) -> BudgetError:
    """Says which budget is exceeded, the least that would do, and what takes it."""
    within = [i for i, one in enumerate(prints) if _keeps(one.host_bytes, host_budget_bytes)]
    on_host = not within
    if on_host:  # offload was asked for, and there is no room for it
        budget, where = host_budget_bytes, "on the host"
        i = min(range(len(pairs)), key=lambda k: (prints[k].host_bytes, _simplicity(*pairs[k])))
        needed, what = prints[i].host_bytes, "all of it offloaded"
        cure = "a strategy that offloads less: s3, s4 or none"
    else:
        budget, where = budget_bytes, "on the device"
        i = min(within, key=lambda k: (prints[k].peak_bytes, _simplicity(*pairs[k])))
        needed = prints[i].peak_bytes
        what, cure = _binding(prints[i])
    one, other = pairs[i]
    chunks = str(one.chunks) if one.chunks == other.chunks else f"{one.chunks}/{other.chunks}"
    return BudgetError(
        f"a budget of {budget} bytes {where} is too small for the MoE layers: the least is "
        f"{needed} bytes, with {chunks} chunks and {one.strategy} ({what}); raise it to that, or "
        f"allow {cure}",
        needed,
        on_host,
    )


def _binding(needs: Footprint) -> tuple[str, str]:
    """What takes most of the device's peak, and what could be done about it."""
    if needs.saved_bytes >= needs.ring_bytes + needs.temporary_bytes:
        return (
            f"most of it is kept for backward: {needs}",
            "another strategy, or have fewer microbatches in flight or MoE layers on the rank",
        )
    return f"most of it are the buffers of one chunk: {needs}", "more chunks, or fewer tokens"
