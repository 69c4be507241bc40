"""The tuner on given times and memory: what it tries, what it takes, and that ranks agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.moe.autotune import STEPS, StepReport, Tuner
from megatron_ext.moe.plan import STOCK, LayerPlan, LayerShape, Strategy, candidates, saved_bytes

SHAPE = LayerShape(64, 96)
PLANS = candidates()
ROWS = 1000


def row_bytes(strategy: Strategy) -> float:
    return saved_bytes(SHAPE, 1, strategy)


def run(
    time: Callable[[LayerPlan], float],
    room: float = float("inf"),
    plans: object = PLANS,
    rows: int = ROWS,
) -> tuple[LayerPlan, list[LayerPlan], list[str]]:
    """The choice, the plans in the order of their trials, and the log.

    Args:
        room: that a plan without memory would leave.
    """
    log: list[str] = []
    tuner, tried = Tuner(plans, row_bytes, log.append), list[LayerPlan]()  # type: ignore[arg-type]
    while tuner.tries:
        plan = tuner.plan
        tried.append(plan)
        first = tried.count(plan) == 1  # slow, and it does not count
        left = room - rows * row_bytes(plan.strategy)
        tuner.end_step(StepReport((10 if first else 1) * time(plan), left, rows))
    return tuner.plan, list(dict.fromkeys(tried)), log


@pytest.mark.parametrize("fastest", PLANS, ids=str)
def test_the_fastest_is_taken(fastest: LayerPlan) -> None:
    found, tried, log = run(lambda plan: 1 if plan == fastest else 1.1)
    assert found == fastest
    assert tried == list(reversed(PLANS))
    assert len(log) == 2 and log[0] == f"trying 6 plans, {STEPS} steps each"
    assert log[1].startswith(f"{fastest}, of ") and all(str(plan) in log[1] for plan in PLANS)


def test_a_plan_must_be_faster_than_a_simpler_one() -> None:
    assert run(lambda plan: 1.0 if plan.strategy is Strategy.S4 else 1.005)[0] == STOCK


def test_each_plan_runs_three_steps() -> None:
    counts: dict[LayerPlan, int] = {}
    tuner = Tuner(PLANS, row_bytes, lambda line: None)
    while tuner.tries:
        counts[tuner.plan] = counts.get(tuner.plan, 0) + 1
        tuner.end_step(StepReport(1.0))
    assert counts == dict.fromkeys(PLANS, STEPS)


def test_what_has_no_room_is_not_tried() -> None:
    """Everything is kept by the fastest plans, and the device has room for s0 at most."""
    kept = ROWS * row_bytes(Strategy.S0)
    found, tried, log = run(lambda plan: 1 + (not plan.stock), kept + 1)
    assert {plan.strategy for plan in tried} == {Strategy.S0, Strategy.S3, Strategy.S4}
    assert found == LayerPlan(4, Strategy.S0)
    assert sum("is not tried" in line for line in log) == 3 and " left" in log[-1]
    # Without room even for what keeps least, that is what runs.
    found, tried, _ = run(lambda plan: 1, 0)
    assert tried == [LayerPlan(4, Strategy.S4)] == [found]


def test_the_real_peak_decides() -> None:
    """A plan that took more than was predicted is not chosen, however fast it is."""
    tuner = Tuner(PLANS, row_bytes, lambda line: None)
    while tuner.tries:
        stock = tuner.plan.stock
        tuner.end_step(StepReport(1 if stock else 2, -1 if stock else 1e9, ROWS))
    assert tuner.plan == LayerPlan(2)


def test_ranks_agree() -> None:
    """Each rank has its own times and memory; all get one report, of the slowest and fullest."""
    assert StepReport.of([StepReport(1, 5, 2), StepReport(3, 4, 1)]) == StepReport(3, 4, 2)
    tuners = [Tuner(PLANS, row_bytes, lambda line: None) for _ in range(2)]
    while tuners[0].tries:
        plan = tuners[0].plan
        mine = [StepReport(1 + plan.chunks * r / 8, 1e9 * (2 - r), ROWS * r) for r in (0, 1)]
        for tuner in tuners:
            tuner.end_step(StepReport.of(mine))
        assert tuners[0].plan == tuners[1].plan and tuners[0].tries == tuners[1].tries
    assert tuners[0].plan == STOCK  # one chunk is fastest on the slower rank


def test_what_is_given_is_not_varied() -> None:
    assert candidates("8") == [LayerPlan(8, s) for s in map(Strategy, ("none", "s0", "s3", "s4"))]
    assert candidates("auto", "s1") == [LayerPlan(n, Strategy.S1) for n in (1, 2, 4)]
    assert candidates("auto", "none") == PLANS[:3]
    assert run(lambda plan: plan.chunks, plans=candidates("auto", "s2"))[0].chunks == 1
    with pytest.raises(ValueError, match="at least 1 chunk"):
        candidates("0")
