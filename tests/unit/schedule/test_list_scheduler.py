"""The list scheduler: how often it looks at a rank."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from megatron_ext.schedule import (
    Costs,
    generate,
)
from megatron_ext.schedule.generators import list_scheduler
from megatron_ext.schedule.generators import request as request_module


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
