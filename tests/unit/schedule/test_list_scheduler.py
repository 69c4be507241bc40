"""The list scheduler: both directions of time, and how often it looks at a rank."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from megatron_ext.schedule import Costs, Schedule, check, generate
from megatron_ext.schedule.generators import list_scheduler
from megatron_ext.schedule.generators import request as request_module

GAPS = (0, Fraction(1, 2), 1)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("name", "pp", "m"), [("v-half", 3, 4), ("v-min", 4, 9), ("zb-h1", 3, 7)])
def test_time_may_run_backward(name: str, pp: int, m: int, gap: Fraction | int) -> None:
    """All passes stay, no rank takes more than its cap, and turning round goes on from there."""
    costs = Costs.of("1", "1.25", "0.75", "0.1")
    start = generate(name, pp, m)
    caps, placement = check(start).peak_sets, start.placement
    orders = [list(row) for row in start.ranks]
    for backward in (True, False, True, True):
        durations = costs.durations(placement)
        orders = list_scheduler.list_schedule(
            orders, placement, caps, durations, gap, backward=backward
        )
        made = Schedule("made", placement, m, tuple(map(tuple, orders)), costs)
        assert all(map(int.__le__, check(made).peak_sets, caps))
        assert [set(row) for row in orders] == [set(row) for row in start.ranks]


def test_a_rank_looks_again_when_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very unequal passes: to look again after each of the shortest takes minutes."""
    looks, original = Counter[str](), list_scheduler.list_schedule
    choose = list_scheduler._Rank.choose

    def counted(rank: Any, time: int) -> int | None:
        looks["at ranks"] += 1
        return choose(rank, time)

    def checked(orders: Any, *args: Any, **kwargs: Any) -> Any:
        looks.clear()
        result = original(orders, *args, **kwargs)
        # Once at the start, and when a pass ends: its own rank, and one that it feeds.
        assert looks["at ranks"] <= len(orders) + 2 * sum(map(len, orders))
        looks["runs"] += 1
        return result

    monkeypatch.setattr(list_scheduler._Rank, "choose", counted)
    monkeypatch.setattr(request_module, "list_schedule", checked)
    rows = (1, 2, 1), (2**31, 2, 1), (1, 2, 1), (1, 2002, 10**9)
    costs = Costs(stages=tuple((Fraction(f), Fraction(b), Fraction(w)) for f, b, w in rows))
    generate("zb-h1", 4, 3, costs=costs)
    assert looks["runs"] == 1
