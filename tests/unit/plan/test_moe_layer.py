"""One MoE layer's streams against closed forms, counted cases and the papers' statements."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.papers.compare import PUBLISHED
from megatron_ext.moe.plan import LayerPlan, Restore, Step, Strategy
from megatron_ext.plan.moe_layer import (
    GivenCosts,
    Kind,
    Stream,
    backward,
    forward,
    run_layer,
    simulate_streams,
)

PLANS = [LayerPlan.of(n, s, a) for n in (1, 2, 3, 8) for s in Strategy for a in (1, 2, 3, 8)]

WORK = PUBLISHED["mpipemoe"]["tables"]["table1"]["rows"]


def closed_form_ms(chunks: int, dispatch: float, compute: float, combine: float) -> float:
    """Time of one direction without copies and restores, by MPMoE's paradigm 1.

    Args:
        chunks: all equal, at least 1.
        dispatch, compute, combine: milliseconds of one chunk's S, C and R.
    """
    if chunks == 1:
        return dispatch + compute + combine
    steady = (chunks - 2) * max(dispatch + combine, compute)
    return dispatch + max(dispatch, compute) + steady + max(combine, compute) + combine


def speed_up(chunks, exchange, *, one_queue=False):
    """Of forward, for experts that take 1."""
    one, many = (
        run_layer(LayerPlan(n), GivenCosts(exchange, 1.0), one_queue=one_queue).forward.makespan
        for n in (1, chunks)
    )
    return one / many


@pytest.mark.parametrize("exchange", [0.25, 0.5, 0.875, 2.0])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_the_closed_form_of_paradigm_1(chunks, exchange):
    """MPMoE: without copies and restores; forward, and backward likewise, in which the weight
    gradients of all chunks follow the last one's input gradient."""
    run, n = run_layer(LayerPlan(chunks), GivenCosts(exchange, 1.0)), chunks
    expected = closed_form_ms(n, exchange / n, 1 / n, exchange / n)
    assert run.forward.makespan == pytest.approx(expected)
    last = max(end for o, _, end in run.backward.on(Stream.COMPUTE) if o.kind is Kind.EXPERTS)
    own = chunks == 1  # Megatron's own layer computes both gradients before it sends one
    late = 2 + 2 * exchange if own else max(expected, last + 1)
    assert run.backward.makespan == pytest.approx(late)


def test_weight_gradients_hide_the_last_message():
    """Once for all chunks: two chunks then take what four took with one of each chunk, where
    messages take 7/8 of the experts' time; with four they come too late to hide those between."""
    once = [run_layer(LayerPlan(n), GivenCosts(0.875, 1.0)).backward.makespan for n in (2, 4)]
    each = [closed_form_ms(n, 0.875 / n, 2 / n, 0.875 / n) for n in (2, 4)]
    assert once == [2.4375, 2.59375] and each == [2.875, 2.4375]


def test_one_hardware_queue_hides_no_more_than_two_chunks_do():
    """An operation that waits holds back those behind it; numbers of a model made apart."""
    for exchange, many, one in ((0.25, (1.33, 1.41), 1.20), (0.5, (1.60, 1.78), 1.33)):
        for chunks, free in zip((4, 8), many):
            assert speed_up(chunks, exchange) == pytest.approx(free, abs=0.005)
            assert speed_up(chunks, exchange, one_queue=True) == pytest.approx(one, abs=0.005)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_operations_are_those_of_the_plan(plan):
    """In the plan's order, one of each a chunk; streams run one at a time; no wait is broken."""
    times = GivenCosts(0.7, 1.0, 0.3, 0.9, latency=0.01, launch=0.02)(plan)
    letters = {Step.DISPATCH: Kind.SEND, Step.COMPUTE: Kind.EXPERTS, Step.COLLECT: Kind.ADD}
    for issued, last in ((forward(plan, times), None), (backward(plan, times), plan.chunks - 1)):
        wanted = [
            (letters[step], i if last is None else last - i)
            for step, i in plan.operations()
            if step in letters
        ]
        assert [(o.kind, o.chunk) for o in issued if o.kind in letters.values()] == wanted
        run = simulate_streams(issued)
        for number, one in enumerate(run.operations):
            assert all(run.end[k] <= run.start[number] for k in one.after)
        for stream in Stream:
            rows = list(run.on(stream))
            assert all(a[2] <= b[1] for a, b in pairwise(rows))
            assert run.busy(stream) <= max(run.end) + 1e-9


@pytest.mark.parametrize("strategy", Strategy)
def test_amounts_are_the_papers(strategy):
    """Table I, for F = 4M: GEMMs count two a forward pass of the experts, and fc1 alone again.
    ``s0``, which is not in it, has ``none``'s."""
    plan, name = LayerPlan.of(4, strategy.value), strategy.value.replace("s0", "none")
    (gemms, messages, copied), (gemms_back, messages_back, copied_back) = WORK[name]
    run = run_layer(plan, GivenCosts(1.0, 2.0, 1.0, 4.0))
    for one, *amounts in (
        (run.forward, gemms, messages, copied),
        (run.backward, gemms_back, messages_back, copied_back),
    ):
        copies = one.busy(Stream.TO_HOST) + one.busy(Stream.TO_DEVICE)
        assert [one.busy(Stream.COMPUTE), one.busy(Stream.NETWORK), copies] == amounts


def test_copies_hold_back_the_chunks_whose_memory_they_read():
    """s1: a third chunk's experts wait for the first one's copy, which takes 10 chunks' time."""
    run = run_layer(LayerPlan.of(4, "s1"), GivenCosts(0.0, 4.0, 0.0, 40.0)).forward
    starts = {o.chunk: s for o, s, _ in run.on(Stream.COMPUTE) if o.kind is Kind.EXPERTS}
    assert starts == {0: 0, 1: 1, 2: 11, 3: 21}
    assert run.makespan == 22 and max(run.end) == 41  # the last copies outlast the pass
    # s3 sends its input away while its experts compute; the slots are the messages'.
    run = run_layer(LayerPlan.of(4, "s3", 3), GivenCosts(0.0, 4.0, 40.0, 0.0)).forward
    starts = {o.chunk: s for o, s, _ in run.on(Stream.COMPUTE) if o.kind is Kind.EXPERTS}
    assert starts == {0: 0, 1: 1, 2: 2, 3: 10}


def test_backward_restores_before_it_computes():
    """The first chunk's copies are exposed; s4 sends twice as much, and computes once more."""
    costs = GivenCosts(1.0, 2.0, 0.5, 1.5)
    kept, s1, s4 = (run_layer(LayerPlan.of(2, s), costs).backward for s in ("none", "s1", "s4"))
    assert [o.chunk for o, *_ in s1.on(Stream.TO_DEVICE)] == [1, 0]
    assert next(s for o, s, _ in s1.on(Stream.COMPUTE)) == 1.0 == (0.5 + 1.5) / 2
    assert kept.makespan == 0.5 + 2 * 2 and s1.makespan == 1.0 + 2 * 2 + 0.5
    assert s4.makespan == 1.0 + 2 * 2.5 + 0.5


def test_weight_gradients_wait_for_w_only_where_their_rows_are_kept():
    costs = GivenCosts(1.0, 2.0)
    for strategy in Strategy:
        whole, split = (
            run_layer(LayerPlan.of(2, strategy.value), costs, split=x) for x in (False, True)
        )
        keeps = strategy.keeps_products
        assert (whole.weights, split.weights) == (0, 2.0 * keeps)
        assert (split.backward.makespan < whole.backward.makespan) is keeps


def test_small_chunks_pay_for_launches():
    """Each operation costs so much on top: then n falls with the rows, down to 1."""
    found = []
    for rows in (64, 16, 4, 1):
        costs = GivenCosts(rows / 64, rows / 64, latency=0.02, launch=0.02)
        found.append(min((1, 2, 4, 8), key=lambda n: run_layer(LayerPlan(n), costs).time))
    assert found == sorted(found, reverse=True) and found[0] > 1 and found[-1] == 1


def paper(hidden, rows, n):
    """A layer of MPipeMoE's table III on 64 A100: forward with n chunks.

    Assumed: TF32 at 60 %, 25 GB/s a device; 0.35 ms an all-to-all of 64 ranks, 50 us an operation.
    """
    exchange = rows * hidden * 4 * 63 / 64 / 25e9
    experts = 4 * rows * hidden * 4 * hidden / (0.6 * 156e12)
    costs = GivenCosts(exchange, experts, latency=350e-6, launch=50e-6)
    return run_layer(LayerPlan(n), costs).forward.makespan


def test_the_papers_granularity():
    """IPDPS, section V: GPT3-XL takes n = 2 below 8k tokens, 4 up to 22k, 8 above; and for GPT3-S
    with 4k pipelining does not help."""
    best = {
        rows: min((1, 2, 4, 8), key=lambda n: paper(2048, rows, n))
        for rows in (4096, 6144, 8192, 12288, 16384, 22528, 32768)
    }
    assert list(best.values()) == [2, 2, 4, 4, 4, 4, 8]
    assert min((1, 2, 4, 8), key=lambda n: paper(768, 4096, n)) == 1
    assert min((1, 2, 4, 8), key=lambda n: paper(768, 16384, n)) == 2


def test_messages_of_a_call():
    """S and R a chunk each way; where rows are sent again, in the same message."""
    for plan in (LayerPlan.of(4), LayerPlan.of(4, "s2")):
        run = run_layer(plan, GivenCosts(1.0, 1.0))
        resends = plan.strategy.input is Restore.RESEND
        for one, longer in ((run.forward, 0), (run.backward, resends)):
            sent = [o for o, *_ in one.on(Stream.NETWORK)]
            assert len(sent) == 2 * plan.chunks
            assert sum(o.time for o in sent if o.kind is Kind.SEND) == 1 + longer
