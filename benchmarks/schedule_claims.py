"""Every claim on the schedules: what was expected, what was measured, and whether it holds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.schedule_scope import ATTENTION, PROFILED, SKEWED, UNIT, Cost, Scope
from benchmarks.schedule_sweep import Row, describe
from megatron_ext.schedule import AUTO, Costs, Placement, Schedule, Simulation, generate, simulate
from megatron_ext.schedule.generators import NAMES
from megatron_ext.schedule.generators.blocks import gis_peak, grouped_block
from megatron_ext.schedule.generators.cap import unit_bound, v_cap_limits


@dataclass(frozen=True)
class Claim:
    """One line of the report. ``holds`` is None for what is only measured."""

    group: str
    what: str
    expected: str
    measured: str
    holds: bool | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def all_claims(scope: Scope) -> list[Claim]:
    """All but the generation times; minutes for the full scope."""
    return [
        *closed_forms(scope),
        *grouped(scope),
        *interleaved_zb(scope),
        *caps(scope),
        *steady_states(),
        *fixed_points(),
        *heavy_last_stage(),
    ]


def _tally(group: str, what: str, expected: str, cases: Iterable[tuple[str, bool]]) -> Claim:
    """One line for many exact comparisons; names the first that fail."""
    results = list(cases)
    wrong = [name for name, equal in results if not equal]
    measured = f"{len(results) - len(wrong)} of {len(results)} exact"
    if wrong:
        measured += f"; not: {', '.join(wrong[:3])}" + (" ..." if len(wrong) > 3 else "")
    return Claim(group, what, expected, measured, not wrong)


# name -> (text, makespan(p, m), peak in microbatches(p)), at F = B = W = 1 and no hop.
_Form = tuple[str, Callable[[int, int], Fraction | int], Callable[[int], Fraction | int]]


def _v(sets: Callable[[int], int]) -> Callable[[int, int], Fraction]:
    # The second term is the work of a rank and the way to the last one; it counts at p = 2.
    return lambda p, m: Fraction(max(6 * m + 6 * p - 3 * sets(p) - 1, 6 * m + p - 1), 2)


_FORMS: dict[str, _Form] = {
    "1f1b": ("3(m + p - 1), peak p", lambda p, m: 3 * (m + p - 1), lambda p: p),
    "zb-h1": ("3m + p - 1, peak p", lambda p, m: 3 * m + p - 1, lambda p: p),
    "zb-h2": ("3m + p - 1, peak 2p - 1", lambda p, m: 3 * m + p - 1, lambda p: 2 * p - 1),
    "v-min": (
        "(6m + 6p - 3k - 1)/2, peak k/2 = floor((p + 4)/3)",
        _v(lambda p: 2 * ((p + 4) // 3)),
        lambda p: (p + 4) // 3,
    ),
    "v-half": (
        "(6m + 6p - 3k - 1)/2, peak k/2 = floor((p + 2)/2)",
        _v(lambda p: 2 * ((p + 2) // 2)),
        lambda p: (p + 2) // 2,
    ),
    "v-zb": ("(6m + p - 1)/2, peak p", lambda p, m: Fraction(6 * m + p - 1, 2), lambda p: p),
}


def closed_forms(scope: Scope) -> list[Claim]:
    """Makespan and peak at unit costs, m = 2p, 3p + 1 and 4p."""
    group = f"closed forms, F = B = W = 1, no hop, p = {scope.closed[0]} to {scope.closed[-1]}"
    claims = []
    for name, (text, makespan, peak) in _FORMS.items():
        cases = []
        for p in scope.closed:
            for m in (2 * p, 3 * p + 1, 4 * p):
                run = simulate(generate(name, p, m))
                found = run.makespan, max(run.peak_activation)
                cases.append((f"p={p} m={m}", found == (makespan(p, m), peak(p))))
        claims.append(_tally(group, name, text, cases))
    spans = []
    for p in scope.closed:
        run = simulate(generate("zb-h2", p, 4 * p))
        spans.append((f"p={p}", run.span_bubble == 0))
    claims.append(_tally(group, "zb-h2, a rank's own span", "3m", spans))
    for chunks in (2, 3, 4):
        cases = []
        for p in scope.closed:
            for m in (2 * p, 4 * p):
                run = simulate(generate("interleaved", p, m, chunks))
                expected = 3 * m + Fraction(3 * (p - 1), chunks), p + Fraction(p - 1, chunks)
                found = run.makespan, max(run.peak_activation)
                cases.append((f"p={p} m={m}", found == expected))
        text = "3m + 3(p - 1)/v, peak p + (p - 1)/v"
        claims.append(_tally(group, f"interleaved, v = {chunks}", text, cases))
    return claims


def grouped(scope: Scope) -> list[Claim]:
    """GIS's peak and bubble, at all group sizes, m a multiple of the group, three cost triples."""
    most = max(scope.caps_all)
    group = f"GIS(g), every g, v = 2 and 3, p = {scope.closed[0]} to {most}"
    exact, shaped, peaks = [], [], []
    for p in (p for p in scope.closed if p <= most):
        for cost in (UNIT, ATTENTION, SKEWED):
            costs = Costs.of(*cost)
            for chunks in (2, 3):
                for g in range(-(-p // 2), p + 1):
                    m = g * (-(-2 * p // g))
                    name = f"p={p} g={g} m={m} v={chunks} {','.join(cost)}"
                    ranks = tuple(map(tuple, grouped_block(p, chunks, g, "next").stamp(m)))
                    fixed = simulate(Schedule("gis", Placement.loop(p, chunks), m, ranks, costs))
                    expected = _gis_bubble(p, g, chunks, costs)
                    work = m * _work(costs)
                    exact.append((name, fixed.makespan - work == expected))
                    peaks.append((name, fixed.peak_sets == gis_peak(p, m, chunks, g)))
                    ours = simulate(generate("gis", p, m, chunks, costs, group_size=g))
                    shaped.append((name, ours.makespan - work <= expected))
    text = "(p-1)(f+b) + (v-1)[(p-g)f + max(0, pb - g(b+w))]"
    return [
        _tally(group, "bubble of the published order", text, exact),
        _tally(group, "peak of every rank", "min(mv, min(g,m)(v-1) + p - i) sets", peaks),
        _tally(group, "bubble of the order we make for the costs", f"at most {text}", shaped),
    ]


def _gis_bubble(p: int, g: int, chunks: int, costs: Costs) -> Fraction:
    f, b, w = (x / chunks for x in (costs.forward, costs.backward_input, costs.backward_weight))
    return (p - 1) * (f + b) + (chunks - 1) * ((p - g) * f + max(Fraction(0), p * b - g * (b + w)))


def _work(costs: Costs) -> Fraction:
    return costs.forward + costs.backward_input + costs.backward_weight


def interleaved_zb(scope: Scope) -> list[Claim]:
    """Work and the way to the last rank, no more, without hops; what hops add."""
    group = f"interleaved-zb, p = {scope.closed[0]} to {scope.closed[-1]}"
    exact = []
    for p in scope.closed:
        for chunks in (2, 3, 4) if p <= 16 else (2,):
            for m in (2 * p, 4 * p):
                run = simulate(generate("interleaved-zb", p, m, chunks))
                expected = 3 * m + Fraction(p - 1, chunks), p
                found = run.makespan, max(run.peak_activation)
                exact.append((f"p={p} m={m} v={chunks}", found == expected))
    claims = [_tally(group, "unit costs, no hop", "3m + (p - 1)/v, peak p", exact)]
    for cost in (PROFILED, ATTENTION, SKEWED):
        for hop in ("0", "0.05"):
            costs, worst, where = Costs.of(*cost, hop), Fraction(-1), ""
            for p in (4, 8, 16):
                if p > scope.closed[-1]:
                    continue
                m = 4 * p
                run = simulate(generate("interleaved-zb", p, m, costs=costs))
                ideal = m * _work(costs) + (p - 1) * (costs.forward / 2 + costs.hop)
                excess = run.makespan / ideal - 1
                if excess > worst:
                    worst, where = excess, f"p={p} m={m}"
            claims.append(
                Claim(
                    group,
                    f"costs {','.join(cost)}, hop {hop}, v = 2, m = 4p: above work and one way",
                    "measured only",
                    f"at most {_percent(worst)} ({where})",
                    None,
                )
            )
    return claims


def caps(scope: Scope) -> list[Claim]:
    """v-cap against what no schedule can beat, and against the weaker bound of the literature."""
    cases = [(p, cap) for p in scope.caps_all for cap in _cap_range(p)]
    for p in scope.caps_some:
        low, high = v_cap_limits(p)
        cases += [(p, cap) for cap in sorted({low + 1, p + 2, (low + high) // 2})]
    above: dict[int, int] = {}
    paper: dict[int, int] = {}
    over = []
    for p, cap in cases:
        m = 2 * p
        run = simulate(generate("v-cap", p, m, memory_cap=cap))
        units = int(2 * run.makespan)
        excess = units - unit_bound(p, m, cap)
        above[excess] = above.get(excess, 0) + 1
        excess = units - max(6 * m + 6 * p - 3 * cap - 1, 6 * m + p - 1)
        paper[excess] = paper.get(excess, 0) + 1
        over.append((f"p={p} cap={cap}", max(run.peak_sets) <= cap))
    group = "v-cap, F = B = W = 1, no hop, m = 2p; in half-stage passes"
    claims = [
        Claim(
            group,
            f"above 6m + max(6p - 3k - 1, 3p - 1 - k), {len(cases)} pairs of p and cap",
            "0 or 1",
            _counts(above),
            max(above) <= 1 and min(above) >= 0,
        ),
        Claim(
            group,
            "above 6m + max(6p - 3k - 1, p - 1), the bound of the smallest pipelines",
            "0 or 1",
            _counts(paper),
            max(paper) <= 1,
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
                group,
                f"costs {','.join(cost)}, hop {hop}, {name}'s memory ({cap} sets)",
                f"at most {_percent(most)}",
                f"{_percent(found)} (the published {name}: {_percent(fixed)})",
                found <= most,
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


def fixed_points() -> list[Claim]:
    """The optimum known by exhaustive search."""
    claims = []
    for name, options in (("v-half", {}), ("v-cap", {"memory_cap": 6})):
        run = simulate(generate(name, 4, 4, **options))
        units = 2 * run.makespan
        claims.append(
            Claim(
                "few microbatches",
                f"{name}, p = m = 4, 6 sets, in half-stage passes",
                "29, the optimum of an exhaustive search",
                f"{units}, peak {max(run.peak_sets)} sets",
                units == 29,
            )
        )
    return claims


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
                    "last stage 1.5 times as long as the others",
                    f"{name}, p = {p}, m = {m}: order for these costs, over that for equal ones",
                    "not slower",
                    f"{_percent(gain)} shorter ({_short(blind)} to {_short(ours)})",
                    gain >= 0,
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
    taken: dict[int, list[float]] = {}
    for _ in range(scope.timed_rounds):
        for number, (name, pp, microbatches, cost, hop, _) in enumerate(cases):
            seconds = _generation_seconds(name, pp, microbatches, cost, hop)
            taken.setdefault(number, []).append(seconds)
    claims = []
    for number, (name, pp, microbatches, cost, hop, limit) in enumerate(cases):
        seconds = statistics.median(taken[number])
        claims.append(
            Claim(
                f"{TIMES}, median of {scope.timed_rounds}",
                f"{name}, p = {pp}, m = {microbatches}, costs {','.join(cost)}, hop {hop}",
                f"below {limit} s",
                f"{seconds:.2f} s",
                seconds < limit,
            )
        )
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
