"""Simulated layers, against closed forms, bounds and what can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from megatron_ext.moe.costs import BACKWARD, DIRECTIONS, FORWARD, Kind, Times
from megatron_ext.moe.layout import (
    ACCESS,
    ALTERNATE,
    DISPATCH_FIRST,
    ORDERS,
    Buffer,
    Layout,
    Ring,
    Stream,
)
from megatron_ext.moe.simulate import Event, Simulation, Stuck, lower_bound_ms, simulate
from megatron_ext.moe.strategies import Strategy
from tests.unit.moe.papers import closed_form_ms

STRATEGIES = tuple(strategy.value for strategy in Strategy)
ALL_SLOTS = Ring(None, None, None)


def paradigm_1(dispatch: float, compute: float, combine: float) -> Times:
    """Forward's times with the computation as one operation."""
    return {Kind.DISPATCH: dispatch, Kind.FC1: 0.0, Kind.FC2: compute, Kind.COMBINE: combine}


def names(layout: Layout, direction: str, stream: Stream) -> str:
    return " ".join(map(str, layout.streams(direction)[stream]))


def random_times(rng: random.Random, chunks: int) -> list[Times]:
    return [{kind: rng.choice([0.0, 1.0, rng.random()]) for kind in Kind} for _ in range(chunks)]


def random_layout(rng: random.Random) -> Layout:
    order = rng.choice(ORDERS)
    depth = rng.choice([1, 2, 3, None])
    return Layout(
        rng.choice([1, 2, 3, 4, 5, 8]),
        rng.choice(STRATEGIES),
        order,
        rng.randint(1, min(4, 2 * (depth or 4))),
        ALL_SLOTS if order == DISPATCH_FIRST else Ring(depth, rng.choice([1, 2, None]), depth),
        rng.random() < 0.5,
    )


def check_slots(events: Sequence[Event], layout: Layout, direction: str) -> None:
    """Replay a run. It shares nothing with the simulator but what each operation reads and writes.

    Chunk i of a buffer has slot i mod its depth. Every read comes after its own chunk's write, with
    no write to that slot in between or meanwhile; two writes never meet, nor two of a stream.
    """
    log = sorted(events, key=lambda event: (event.start, event.end))
    assert {e.op for e in log} == {op for ops in layout.streams(direction).values() for op in ops}
    free: dict[Stream, float] = {}
    slots: dict[tuple[Buffer, int], tuple[list[Event], list[Event]]] = {}
    for event in log:
        access = ACCESS[event.op.kind]
        assert event.start >= free.get(access.stream, 0.0), event
        free[access.stream] = event.end
        for buffers, is_write in ((access.reads, False), (access.writes, True)):
            for buffer in buffers:
                slot = (buffer, event.op.chunk % layout.slots(buffer))
                slots.setdefault(slot, ([], []))[is_write].append(event)
    for slot, (reads, writes) in slots.items():
        assert all(one.end <= other.start for one, other in pairwise(writes)), slot
        if not writes and direction == BACKWARD:
            continue  # kept from forward
        for read in reads:
            (own,) = (write for write in writes if write.op.chunk == read.op.chunk)
            assert own.end <= read.start, (slot, read)
            for write in writes:
                before, after = write.end <= own.start, write.start >= read.end
                assert write is own or before or after, (slot, read, write)


def test_orders() -> None:
    comm = Stream.COMM
    assert names(Layout(4), FORWARD, comm) == "S.0 S.1 R.0 S.2 R.1 S.3 R.2 R.3"
    assert names(Layout(4, lookahead=3), FORWARD, comm) == "S.0 S.1 S.2 R.0 S.3 R.1 R.2 R.3"
    assert names(Layout(2, lookahead=1), FORWARD, comm) == "S.0 R.0 S.1 R.1"
    first = Layout(3, order=DISPATCH_FIRST)
    assert names(first, FORWARD, comm) == "S.0 S.1 S.2 R.0 R.1 R.2"
    assert names(Layout(3), BACKWARD, comm) == "S'.2 S'.1 R'.2 S'.0 R'.1 R'.0"
    assert names(Layout(2, "s2"), BACKWARD, comm) == "S'.1 S2.1 S'.0 S2.0 R'.1 R'.0"
    assert names(Layout(2, "s4"), BACKWARD, comm) == "S2.1 S'.1 S2.0 S'.0 R'.1 R'.0"
    assert (
        names(Layout(2, "s4"), BACKWARD, Stream.COMP) == "C1again.1 B2.1 B1.1 C1again.0 B2.0 B1.0"
    )
    packed = Layout(2, "s2", packed=True)
    assert names(packed, BACKWARD, comm) == "S'+S2.1 S'+S2.0 R'.1 R'.0"
    assert names(Layout(2, "s1", packed=True), BACKWARD, comm) == "S'.1 S'.0 R'.1 R'.0"
    assert names(Layout(2, "s1"), FORWARD, Stream.COPY) == "OUT_DI.0 OUT_M.0 OUT_DI.1 OUT_M.1"
    assert names(Layout(2, "s1"), BACKWARD, Stream.COPY) == "IN_M.1 IN_DI.1 IN_M.0 IN_DI.0"
    assert names(Layout(2, "s3"), BACKWARD, Stream.COPY) == "IN_DI.1 IN_DI.0"


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": 0},
        {"strategy": "s5"},
        {"order": "random"},
        {"lookahead": 0},
    ],
)
def test_layouts_that_are_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Layout(**wrong)  # type: ignore[arg-type]


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="times of 1 chunks"):
        simulate(Layout(2), FORWARD, [paradigm_1(1, 1, 1)])
    with pytest.raises(ValueError, match="sideways"):
        simulate(Layout(1), "sideways", [paradigm_1(1, 1, 1)])
    with pytest.raises(ValueError, match="at least one slot"):
        Ring(0)


@pytest.mark.parametrize("strategy", ["none", "s4"])
def test_the_closed_form(strategy: str) -> None:
    """The paper's order; with the paper's two slots or without reuse, it is the same."""
    rng = random.Random(1)
    for _ in range(300):
        chunks = rng.randint(1, 12)
        costs = [rng.choice([1.0, 2.0, 4 * rng.random()]) for _ in range(3)]
        run = simulate(Layout(chunks, strategy), FORWARD, [paradigm_1(*costs)] * chunks)
        assert run.makespan_ms == pytest.approx(closed_form_ms(chunks, *costs))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(8, "s4"), 17.5),
        (Layout(8, "s4", lookahead=3), 16.75),
        (Layout(8, "s4", lookahead=3, ring=Ring(3, 1, 3)), 16.0),
        (Layout(8, "s4", DISPATCH_FIRST, ring=ALL_SLOTS), 16.0),
        (Layout(8, "s4", DISPATCH_FIRST, ring=Ring(None, 1, 2)), 20.5),
    ],
)
def test_orders_and_slots_at_a_bad_ratio(layout: Layout, expected: float) -> None:
    """Computation takes 1.75 of an all-to-all; no less than 16 is possible."""
    times = [paradigm_1(1.0, 1.75, 1.0)] * 8
    run = simulate(layout, FORWARD, times)
    check_slots(run.events, layout, FORWARD)
    assert run.makespan_ms == expected
    assert lower_bound_ms(layout, FORWARD, times) == 16.0


def test_dispatch_first_needs_slots() -> None:
    layout = Layout(8, "s4", DISPATCH_FIRST)
    with pytest.raises(Stuck, match=r"S\.5 waits for C1\.3"):
        simulate(layout, FORWARD, [paradigm_1(1, 1, 1)] * 8)


def test_a_lookahead_needs_slots() -> None:
    """Twice the slots is fine."""
    times = [dict.fromkeys(Kind, 1.0)] * 8
    for depth in (1, 2):
        ring = Ring(depth, 1, depth)
        for strategy in STRATEGIES:
            for direction in DIRECTIONS:
                simulate(Layout(8, strategy, lookahead=2 * depth, ring=ring), direction, times)
        with pytest.raises(Stuck):
            layout = Layout(8, "s4", lookahead=2 * depth + 1, ring=ring)
            simulate(layout, BACKWARD, times)


def spans(run: Simulation) -> dict[str, tuple[float, float]]:
    return {str(event.op): (event.start, event.end) for event in run.events}


def test_s1_forward_by_hand() -> None:
    """fc1 of the second chunk waits until the first T_M has left its only slot."""
    times = dict.fromkeys(Kind, 1.0) | {Kind.SAVE_MIDDLE: 4.0}
    run = simulate(Layout(2, "s1"), FORWARD, [times] * 2)
    assert spans(run) == {
        "S.0": (0, 1), "S.1": (1, 2), "C1.0": (1, 2), "OUT_DI.0": (1, 2), "C2.0": (2, 3),
        "OUT_M.0": (2, 6), "R.0": (3, 4), "OUT_DI.1": (6, 7), "C1.1": (6, 7), "C2.1": (7, 8),
        "OUT_M.1": (7, 11), "R.1": (8, 9),
    }  # fmt: skip
    assert run.makespan_ms == 11


def test_s4_backward_by_hand() -> None:
    times = dict.fromkeys(Kind, 1.0) | {Kind.FC2_BACKWARD: 2.0, Kind.FC1_BACKWARD: 2.0}
    run = simulate(Layout(2, "s4"), BACKWARD, [times] * 2)
    assert spans(run) == {
        "S2.1": (0, 1), "S'.1": (1, 2), "C1again.1": (1, 2), "S2.0": (2, 3), "B2.1": (2, 4),
        "S'.0": (3, 4), "B1.1": (4, 6), "R'.1": (6, 7), "C1again.0": (6, 7), "B2.0": (7, 9),
        "B1.0": (9, 11), "R'.0": (11, 12),
    }  # fmt: skip


def test_s2_needs_its_input_late() -> None:
    """T_DI is dispatched again while fc2's backward runs; loads run ahead."""
    times = dict.fromkeys(Kind, 1.0)
    run = spans(simulate(Layout(1, "s2"), BACKWARD, [times]))
    assert run["B2.0"] == run["S2.0"] == (1, 2)
    both = dict.fromkeys(Kind, 1.0) | {Kind.BOTH_DISPATCH: 1.5}
    packed = spans(simulate(Layout(1, "s2", packed=True), BACKWARD, [both]))
    assert packed["B2.0"] == (1.5, 2.5)
    ahead = spans(simulate(Layout(3, "s2", ring=Ring(2, 2, 2)), BACKWARD, [times] * 3))
    assert (ahead["IN_M.2"], ahead["IN_M.1"]) == ((0, 1), (1, 2))
    assert ahead["IN_M.0"][0] == ahead["B2.2"][1]


def test_slots_are_kept_and_bounds_hold() -> None:
    """More slots never make a layer slower, either."""
    rng = random.Random(2)
    for _ in range(400):
        layout, direction = random_layout(rng), rng.choice(DIRECTIONS)
        times = random_times(rng, layout.chunks)
        run = simulate(layout, direction, times)
        check_slots(run.events, layout, direction)
        assert run.makespan_ms >= lower_bound_ms(layout, direction, times) - 1e-9
        free = Layout(
            layout.chunks, layout.strategy, layout.order, layout.lookahead, ALL_SLOTS,
            layout.packed,
        )  # fmt: skip
        assert simulate(free, direction, times).makespan_ms <= run.makespan_ms + 1e-9


def test_the_checker_needs_no_simulator() -> None:
    """What ran with all slots is found to have broken a ring of two."""
    rng, found = random.Random(3), 0
    for _ in range(100):
        strategy, direction = rng.choice(["s1", "s2", "s3", "s4"]), rng.choice(DIRECTIONS)
        times = [{kind: rng.random() for kind in Kind}] * 8
        run = simulate(Layout(8, strategy, ring=ALL_SLOTS), direction, times)
        try:
            check_slots(run.events, Layout(8, strategy, ring=Ring(1, 1, 1)), direction)
        except AssertionError:
            found += 1
    assert found > 80


def test_every_single_hazard_is_found() -> None:
    """An operation that starts before what it waits for has ended is always an error."""
    rng = random.Random(4)
    layout = Layout(4, "s1")
    for direction in DIRECTIONS:
        run = simulate(layout, direction, [{kind: 1 + rng.random() for kind in Kind}] * 4)
        for i, event in enumerate(run.events):
            if event.start == 0:
                continue
            early = event._replace(start=event.start - 0.01)
            log = [*run.events[:i], early, *run.events[i + 1 :]]
            with pytest.raises(AssertionError):
                check_slots(log, layout, direction)


def test_every_kind_has_a_stream() -> None:
    assert set(ACCESS) == set(Kind)


def test_alternate_is_the_papers() -> None:
    assert Layout().order == ALTERNATE
    assert (Layout().ring, Layout().lookahead) == (Ring(2, 1, 2), 2)
