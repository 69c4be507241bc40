"""How much of the schedule benchmark runs: sizes and costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

Cost = tuple[str, str, str]

UNIT: Cost = ("1", "1", "1")
# 0.98 and 0.74 are the zero-bubble paper's profile of its 6.2B model, scaled to F = 1.
PROFILED: Cost = ("1", "0.98", "0.74")
ATTENTION: Cost = ("1", "1.1", "0.8")
SKEWED: Cost = ("1", "1.3", "0.6")
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Scope:
    """Sizes of one run of the benchmark.

    Attributes:
        caps_all, caps_some: ranks for which v-cap is checked at every cap, at three caps.
        ranks, factors: the table's p, and its m as multiples of p.
        costs, hops: the table's.
        timed: (p, m) of the generation times, taken ``timed_rounds`` times, of ``timed_names``
            (empty: of all).
        most: largest p x m of the table.
    """

    name: str
    caps_all: range
    caps_some: tuple[int, ...]
    ranks: tuple[int, ...]
    factors: tuple[int, ...]
    costs: tuple[Cost, ...]
    hops: tuple[str, ...]
    timed: tuple[int, int]
    timed_rounds: int
    timed_names: tuple[str, ...] = ()
    most: int = NO_LIMIT


FULL = Scope(
    "full",
    caps_all=range(2, 17),
    caps_some=tuple(range(17, 33)),
    ranks=(4, 8, 16, 32),
    factors=(1, 2, 4, 8),
    costs=(UNIT, PROFILED, ATTENTION, SKEWED),
    hops=("0", "0.05"),
    timed=(32, 256),
    timed_rounds=3,
)
WIDE = replace(
    FULL,
    name="wide",
    caps_all=range(2, 9),
    caps_some=(12,),
    timed_rounds=1,
    most=2048,
)
MEDIUM = replace(WIDE, name="medium", ranks=(4, 8), factors=(1, 2, 4), most=NO_LIMIT)
QUICK = replace(MEDIUM, name="quick", factors=(2, 4), costs=(UNIT, ATTENTION), timed=(16, 128))
SMOKE = Scope(
    "smoke",
    caps_all=range(2, 4),
    caps_some=(),
    ranks=(4,),
    factors=(2,),
    costs=(UNIT,),
    hops=("0",),
    timed=(8, 32),
    timed_rounds=1,
    timed_names=("1f1b", "v-half"),
)
SCOPES = {scope.name: scope for scope in (FULL, WIDE, MEDIUM, QUICK, SMOKE)}
