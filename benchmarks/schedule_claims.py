"""Every claim on the schedules: what was expected, what was measured, and whether it holds."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from benchmarks.page import Claim, alternating
from benchmarks.schedule_scope import ATTENTION, PROFILED, SKEWED, UNIT, Cost, Scope
from benchmarks.schedule_sweep import Row, describe
from megatron_ext.schedule import AUTO, Costs, Simulation, generate, simulate
from megatron_ext.schedule.generators import NAMES
from megatron_ext.schedule.generators.cap import unit_bound, v_cap_limits


def all_claims(scope: Scope) -> list[Claim]:
    """All but the generation times; minutes for the full scope."""
    return [
        *interleaved_zb(scope),
        *caps(scope),
        *steady_states(),
        *heavy_last_stage(),
    ]


def _tally(group: str, what: str, expected: str, cases: Iterable[tuple[str, bool]]) -> Claim:
    """One line for many exact comparisons; names the first that fail."""
    results = list(cases)
    wrong = [name for name, equal in results if not equal]
    measured = f"{len(results) - len(wrong)} of {len(results)} exact"
    if wrong:
        measured += f"; not: {', '.join(wrong[:3])}" + (" ..." if len(wrong) > 3 else "")
    return Claim(what, measured, not wrong, expected, group)


def _work(costs: Costs) -> Fraction:
    return costs.forward + costs.backward_input + costs.backward_weight


def interleaved_zb(scope: Scope) -> list[Claim]:
    """What other costs and hops add to work and the way to the last rank."""
    claims = []
    for cost in (PROFILED, ATTENTION, SKEWED):
        for hop in ("0", "0.05"):
            costs = Costs.of(*cost, hop)
            excess = {}
            for p in (4, 8, 16):
                if p <= max(scope.ranks):
                    run = simulate(generate("interleaved-zb", p, 4 * p, costs=costs))
                    ideal = 4 * p * _work(costs) + (p - 1) * (costs.forward / 2 + costs.hop)
                    excess[p] = run.makespan / ideal - 1
            worst = max(excess, key=lambda p: excess[p])
            what = f"costs {','.join(cost)}, hop {hop}, v = 2, m = 4p: above work and one way"
            text = f"at most {_percent(excess[worst])} (p={worst} m={4 * worst})"
            claims.append(Claim(what, text, None, "measured only", "interleaved-zb"))
    return claims


def caps(scope: Scope) -> list[Claim]:
    """v-cap against what no schedule can beat, and against the weaker bound of the literature."""
    cases = [(p, cap) for p in scope.caps_all for cap in _cap_range(p)]
    for p in scope.caps_some:
        low, high = v_cap_limits(p)
        cases += [(p, cap) for cap in sorted({low + 1, p + 2, (low + high) // 2})]
    above, paper = Counter[int](), Counter[int]()
    over = []
    for p, cap in cases:
        m = 2 * p
        run = simulate(generate("v-cap", p, m, memory_cap=cap))
        units = int(2 * run.makespan)
        above[units - unit_bound(p, m, cap)] += 1
        paper[units - max(6 * m + 6 * p - 3 * cap - 1, 6 * m + p - 1)] += 1
        over.append((f"p={p} cap={cap}", max(run.peak_sets) <= cap))
    group = "v-cap, F = B = W = 1, no hop, m = 2p; in half-stage passes"
    claims = [
        Claim(
            f"above 6m + max(6p - 3k - 1, 3p - 1 - k), {len(cases)} pairs of p and cap",
            _counts(above),
            max(above) <= 1 and min(above) >= 0,
            "0 or 1",
            group,
        ),
        Claim(
            "above 6m + max(6p - 3k - 1, p - 1), the bound of the smallest pipelines",
            _counts(paper),
            max(paper) <= 1,
            "0 or 1",
            group,
        ),
        _tally(group, "peak within the cap", "every rank", over),
    ]
    return [*claims, *_monotone(scope)]


def _cap_range(p: int) -> range:
    low, high = v_cap_limits(p)
    return range(low, high + 1)


def _monotone(scope: Scope) -> list[Claim]:
    cases = []
    for p in (p for p in (4, 8) if p <= max(scope.caps_all)):
        costs = Costs.of(*ATTENTION, "0.05")
        times = [
            simulate(generate("v-cap", p, 4 * p, costs=costs, memory_cap=cap)).makespan
            for cap in _cap_range(p)
        ]
        cases += [
            (f"p={p} cap={cap}", after <= before)
            for cap, before, after in zip(_cap_range(p)[1:], times, times[1:])
        ]
    text = f"never slower with a larger cap, costs {','.join(ATTENTION)}, hop 0.05"
    return [_tally("v-cap at unequal costs", text, "every step", cases)] if cases else []


def _counts(found: dict[int, int]) -> str:
    return ", ".join(f"{excess}: {number} times" for excess, number in sorted(found.items()))


def steady_states() -> list[Claim]:
    """Time per microbatch above F + B + W at p = 4, by the difference of m = 90 and m = 60."""
    group = "steady state above F + B + W per microbatch, p = 4"
    wanted = (
        (SKEWED, "0.05", 6, "v-half", Fraction(0)),
        (SKEWED, "0.05", 4, "v-min", Fraction(27, 100)),
        (ATTENTION_HEAVY, "0", 4, "v-min", Fraction(14, 100)),
    )
    claims = []
    for cost, hop, cap, name, most in wanted:
        costs = Costs.of(*cost, hop)
        found = _excess("v-cap", costs, costs, cap)
        fixed = _excess(name, Costs(), costs)
        claims.append(
            Claim(
                f"costs {','.join(cost)}, hop {hop}, {name}'s memory ({cap} sets)",
                f"{_percent(found)} (the published {name}: {_percent(fixed)})",
                found <= most,
                f"at most {_percent(most)}",
                group,
            )
        )
    return claims


ATTENTION_HEAVY = ("1", "1.2", "0.8")


def _excess(name: str, planned: Costs, actual: Costs, cap: int | None = None) -> Fraction:
    """Of the order made for ``planned``, running at ``actual``."""
    few, many = (
        simulate(generate(name, 4, m, costs=planned, memory_cap=cap), actual).makespan
        for m in (60, 90)
    )
    return (many - few) / 30 / _work(actual) - 1


def heavy_last_stage() -> list[Claim]:
    """Output layer and loss make the last stage 1.5 times as long."""
    claims = []
    for p, m in ((4, 16), (8, 32)):
        rows = [("1", "1", "1")] * (2 * p - 1) + [("1.5", "1.5", "1.5")]
        costs = Costs.of(stages=rows)
        for name, options in (("v-zb", {}), ("v-half", {}), ("v-cap", {"memory_cap": 2 * p})):
            blind = simulate(generate(name, p, m, **options), costs)
            ours = simulate(generate(name, p, m, costs=costs, **options))
            gain = 1 - ours.makespan / blind.makespan
            claims.append(
                Claim(
                    f"{name}, p = {p}, m = {m}: order for these costs, over that for equal ones",
                    f"{_percent(gain)} shorter ({_short(blind)} to {_short(ours)})",
                    gain >= 0,
                    "not slower",
                    "last stage 1.5 times as long as the others",
                )
            )
    return claims


# Ours, and those of torch's orders that it has to be no slower than: all on its own placement. A
# loop placement cannot always keep up with a V: a heavy last stage has a rank to share there.
_RIVALS = (
    ("interleaved-zb v=2", ("torch InterleavedZeroBubble",)),
    ("v-zb", ("torch ZBVZeroBubble", "torch DualPipeV")),
    ("v-cap 1", ("torch ZBVZeroBubble", "torch DualPipeV")),
)


def against_torch(rows: Sequence[Row]) -> list[Claim]:
    """Never slower than torch's orders of the same placement, at no more memory than theirs."""
    by_name = {(row.name, row.setting): row for row in rows}
    claims = []
    for name, rivals in _RIVALS:
        cases = []
        for rival in rivals:
            for (other, setting), theirs in by_name.items():
                mine = by_name.get((name, setting))
                if other == rival and mine is not None and mine.peak <= theirs.peak:
                    where = f"{rival}, {describe(setting)}"
                    cases.append((where, mine.makespan <= theirs.makespan * (1 + 1e-9)))
        if cases:
            group = "against torch.distributed.pipelining's orders of the same placement"
            what = f"{name} at no more memory: against {' and '.join(rivals)}"
            claims.append(_tally(group, what, "never slower", cases))
    return claims


TIMES = "generation time"


def generation_times(scope: Scope) -> list[Claim]:
    """Seconds to make one schedule, each in its own process: the median of alternated rounds."""
    p, m = scope.timed
    cases = [
        (name, p, m, cost, hop, 10 if name == "v-cap" else 1)
        for name in scope.timed_names or NAMES
        for cost, hop in ((UNIT, "0"), (ATTENTION, "0.03"))
    ]
    cases.append((AUTO, 8, 32, ATTENTION, "0.03", 10))
    steps = {case: functools.partial(_generation_seconds, *case[:5]) for case in cases}
    claims = []
    for case, taken in alternating(steps, scope.timed_rounds, warm=0).items():
        name, pp, microbatches, cost, hop, limit = case
        seconds = statistics.median(taken)
        what = f"{name}, p = {pp}, m = {microbatches}, costs {','.join(cost)}, hop {hop}"
        group = f"{TIMES}, median of {scope.timed_rounds}"
        holds = seconds < limit
        claims.append(Claim(what, f"{seconds:.2f} s", holds, f"below {limit} s", group))
    return claims


def _generation_seconds(name: str, pp: int, m: int, cost: Cost, hop: str) -> float:
    """As the command line reports it."""
    command = [sys.executable, "-m", "megatron_ext", "simulate", "--json", "--schedule", name]
    command += ["--pp", str(pp), "--microbatches", str(m), "--cost", ",".join(cost), "--hop", hop]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["generation_seconds"])


def _percent(value: Fraction) -> str:
    return f"{float(100 * value):.2f} %"


def _short(run: Simulation) -> str:
    return f"{float(run.makespan):g}"
