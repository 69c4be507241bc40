"""Plans of MoE layers: their order, the table of strategies, and the formula of their bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.papers.compare import PUBLISHED
from megatron_ext.moe.plan import (
    DEPTH,
    STOCK,
    LayerPlan,
    LayerShape,
    Restore,
    Step,
    Strategy,
    copied_bytes,
    saved_bytes,
)

WORK = PUBLISHED["mpipemoe"]["tables"]["table1"]["rows"]
MODULES = ["plan", "autotune"]
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
    """A message back leaves with its chunk's C."""
    assert order(LayerPlan(1)) == "S0 C0 A0"
    assert order(LayerPlan(4)) == "S0 S1 C0 S2 C1 A0 S3 C2 A1 C3 A2 A3"
    assert order(LayerPlan(3), "LC") == "L0 L1 C0 L2 C1 C2"
    assert order(LayerPlan(3), "CAW") == "C0 C1 A0 C2 W2 A1 A2"


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_every_chunk_takes_every_step_once_within_its_slots(chunks: int) -> None:
    """A slot of chunk i is taken by chunk i + DEPTH only when chunk i has left it."""
    plan = LayerPlan(chunks)
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
        if i >= DEPTH:
            assert place[Step.COMPUTE, i - DEPTH] < place[Step.DISPATCH, i]
            assert place[Step.COLLECT, i - DEPTH] < place[Step.COMPUTE, i]


def test_plans_are_checked() -> None:
    for wrong, said in (((0, "none"), "at least 1 chunk"), ((2, "s5"), "s5")):
        with pytest.raises(ValueError, match=said):
            LayerPlan.of(*wrong)
    assert LayerPlan.of(1) == STOCK and STOCK.stock
    assert not LayerPlan.of(1, "s4").stock and not LayerPlan(2).stock
    assert str(LayerPlan.of(4, "s1")) == "4 chunks, s1"


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
