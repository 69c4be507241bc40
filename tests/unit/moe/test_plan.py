"""Plans of MoE layers: their order, the table of strategies, and the formula of their bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.papers.compare import PUBLISHED
from megatron_ext.moe.plan import (
    STOCK,
    Budget,
    BudgetError,
    LayerPlan,
    LayerShape,
    Restore,
    Step,
    Strategy,
    copied_bytes,
    footprint,
    saved_bytes,
    simplest_first,
)

WORK = PUBLISHED["mpipemoe"]["tables"]["table1"]["rows"]
MODULES = ["plan", "autotune", "cost_file"]
RESTORING = [strategy for strategy in Strategy if strategy is not Strategy.NONE]
LETTERS = {
    Step.DISPATCH: "S",
    Step.COMPUTE: "C",
    Step.COLLECT: "A",
    Step.FETCH: "L",
    Step.WEIGHTS: "W",
}


def test_the_choice_loads_no_torch(repo_root: Path) -> None:
    code = "import sys\n" + "".join(f"import megatron_ext.moe.{name}\n" for name in MODULES)
    code += "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=repo_root, check=True)


def order(plan: LayerPlan, steps: str = "SCA") -> str:
    texts = (f"{LETTERS[step]}{i}" for step, i in plan.operations())
    return " ".join(text for text in texts if text[0] in steps)


def test_orders() -> None:
    """The papers' is lookahead 2; a message back leaves with its chunk's C."""
    assert order(LayerPlan(1)) == "S0 C0 A0"
    assert order(LayerPlan(4)) == "S0 S1 C0 S2 C1 A0 S3 C2 A1 C3 A2 A3"
    assert order(LayerPlan(4, lookahead=3), "SC") == "S0 S1 S2 C0 S3 C1 C2 C3"
    assert order(LayerPlan(3, lookahead=3), "SC") == "S0 S1 S2 C0 C1 C2"
    assert order(LayerPlan(2, lookahead=1)) == "S0 C0 A0 S1 C1 A1"
    assert order(LayerPlan(2, lookahead=5)) == order(LayerPlan(2))
    assert order(LayerPlan(3), "LC") == "L0 L1 C0 L2 C1 C2"
    assert order(LayerPlan(3), "CAW") == "C0 C1 A0 C2 W2 A1 A2"


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("lookahead", [1, 2, 3, 8, 9])
def test_every_chunk_takes_every_step_once_within_its_slots(chunks: int, lookahead: int) -> None:
    """A slot of chunk i is taken by chunk i + depth only when chunk i has left it."""
    plan = LayerPlan(chunks, lookahead=lookahead)
    operations = list(plan.operations())
    assert sorted((s.value, i) for s, i in operations) == sorted(
        (s.value, i)
        for s in Step
        for i in range(chunks)
        if s is not Step.WEIGHTS or i == chunks - 1
    )
    place = {one: number for number, one in enumerate(operations)}
    for i in range(chunks):
        steps = [place[step, i] for step in (Step.DISPATCH, Step.COMPUTE, Step.COLLECT)]
        assert steps == sorted(steps) and place[Step.FETCH, i] < steps[1]
        if i >= plan.depth:
            assert place[Step.COMPUTE, i - plan.depth] < place[Step.DISPATCH, i]
            assert place[Step.COLLECT, i - plan.depth] < place[Step.COMPUTE, i]


def test_plans_are_checked() -> None:
    for wrong in ((0, "none", 2), (2, "none", 0), (2, "s5", 2)):
        with pytest.raises(ValueError, match=str(wrong[0 if wrong[0] == 0 else 1]) + "|0"):
            LayerPlan.of(*wrong)
    assert LayerPlan.of(1) == STOCK and STOCK.stock
    assert not LayerPlan.of(1, "s4").stock and not LayerPlan(2).stock
    assert str(LayerPlan.of(4, "s1", 8)) == "4 chunks, s1, lookahead 4"
    plans = [LayerPlan.of(2, "s1"), LayerPlan.of(8), LayerPlan.of(1, "s4"), LayerPlan.of(2)]
    assert simplest_first([*plans, STOCK])[:3] == [STOCK, LayerPlan(2), LayerPlan(8)]


@pytest.mark.parametrize("strategy", Strategy)
def test_the_table_is_the_papers(strategy: Strategy) -> None:
    """Table I: copies each way in units of T_DI's, for F = 4M; a message and a GEMM more back.
    ``s0``, which is not in it, has ``none``'s."""
    shape = LayerShape(64, 256, element_bytes=2, kept_bytes=4 * 64 * 2)
    name = "none" if strategy is Strategy.S0 else strategy.value
    (_, _, copies), (gemms, messages, back) = WORK[name]
    assert copied_bytes(shape, 1, strategy) == 64 * 2 * copies == 64 * 2 * back
    assert messages == 2 + (strategy.input is Restore.RESEND)
    assert gemms == 4 + (strategy.inside is Restore.RECOMPUTE)


@pytest.mark.parametrize(("gated", "kappa"), [(True, 6), (False, 3)])
def test_saved_bytes_are_what_was_measured(gated: bool, kappa: int) -> None:
    """R * (M + 1 + kappa*F) * e, and all but the probabilities goes with a strategy."""
    shape, rows = LayerShape(64, 96, gated, element_bytes=4), 50
    assert saved_bytes(shape, rows, Strategy.NONE) == rows * (64 + 1 + kappa * 96) * 4
    fc1 = 2 if gated else 1
    assert saved_bytes(shape, rows, Strategy.S0) == rows * (64 + 1 + fc1 * 96) * 4
    for strategy in RESTORING[1:]:
        assert saved_bytes(shape, rows, strategy) == rows * 4
    measured = shape._replace(kept_bytes=10.5)
    assert saved_bytes(measured, rows, Strategy.NONE) == round(rows * (65 * 4 + 10.5))


def test_ring_bytes() -> None:
    """R_chunk * e * (slots of T_DI, dT_DO, dT_DI * M + kappa*F + dT_M), as moe-planning.md has it;
    what comes from the host has two slots of kappa*F."""
    shape = LayerShape(64, 96, gated=False)  # kappa 3, dT_M 2F

    def ring(plan: LayerPlan, rows: int = 800) -> int:
        return footprint(shape, rows, 1, plan).ring_bytes

    assert ring(LayerPlan.of(8, "s4")) == 100 * 2 * (3 * 2 * 64 + 3 * 96 + 2 * 96)
    assert ring(LayerPlan.of(8, "s1")) == 100 * 2 * (3 * 2 * 64 + 2 * 3 * 96 + 2 * 96)
    assert ring(LayerPlan.of(8, "s4", 3)) == 100 * 2 * (3 * 3 * 64 + 3 * 96 + 2 * 96)
    assert ring(LayerPlan.of(1, "s4")) == 800 * 2 * (3 * 64 + 3 * 96 + 2 * 96)
    # Without reuse, only what lives besides what is saved: of one chunk, or, where weight gradients
    # wait for the last one, of all: inputs and output gradients of fc1 and fc2, 2M + 2F, and those
    # of fc2 joined.
    more, joined = 2 * 64 + 2 * 96 - (64 + 3 * 96), 64 + 96
    assert more < 0
    assert ring(LayerPlan(8)) == 800 * 2 * joined
    assert ring(LayerPlan(1)) == 800 * 2 * (2 * 64 + 2 * 96)
    assert ring(LayerPlan(2, lookahead=2)) == 400 * 2 * (2 * 2 * 64 + 2 * 96)
    # s0 keeps of what lies inside fc1's output alone, and has the rest of one chunk.
    more = 2 * 64 + 2 * 96 - (64 + 96)
    assert ring(LayerPlan.of(8, "s0")) == 800 * 2 * (more + joined)
    assert ring(LayerPlan.of(1, "s0")) == 800 * 2 * (more + 2 * 64 + 2 * 96 + 2 * 96)


def test_copies_and_messages_of_a_chunk() -> None:
    shape = LayerShape(64, 96)
    for plan, buffers in ((LayerPlan(8), 2 + 4 * 2), (LayerPlan(8, lookahead=8), 2 + 4 * 8)):
        found = footprint(shape, 801, 1, plan).temporary_bytes
        assert found == buffers * 101 * 64 * 2


def test_rings_are_paid_once_and_saved_bytes_by_all() -> None:
    shape, plan = LayerShape(64, 96), LayerPlan.of(4, "s1")
    one, many = footprint(shape, 400, 1, plan), footprint(shape, 400, 24, plan)
    assert many.ring_bytes == one.ring_bytes
    assert many.saved_bytes == 24 * one.saved_bytes
    assert many.peak_bytes == many.saved_bytes + many.ring_bytes + many.temporary_bytes


@pytest.mark.parametrize("strategy", RESTORING)
def test_the_peak_falls_with_more_chunks(strategy: Strategy) -> None:
    plans = [LayerPlan(n, strategy) for n in (1, 2, 4, 8, 16)]
    peaks = [footprint(LayerShape(64, 96), 1000, 1, one).peak_bytes for one in plans]
    assert peaks == sorted(peaks, reverse=True)


def test_a_budget_that_nothing_keeps() -> None:
    shape = LayerShape(64, 96)
    plans = [LayerPlan(n, s) for n in (1, 8) for s in (Strategy.NONE, Strategy.S4)]
    least = footprint(shape, 1000, 8, LayerPlan.of(8, "s4")).peak_bytes
    with pytest.raises(BudgetError, match="the least is .* with 8 chunks and s4") as error:
        Budget(least - 1, shape, lambda: 8).require(plans, 1000)
    assert error.value.needed_bytes == least and str(least) in str(error.value)
    assert "most of it are the buffers" in str(error.value)
    Budget(least, shape, lambda: 8).require(plans, 1000)
    with pytest.raises(BudgetError, match="most of it is kept for backward"):
        Budget(least, shape, lambda: 8).require(plans[:1], 1000)
