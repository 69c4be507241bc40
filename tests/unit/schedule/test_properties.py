"""Properties that hold for every schedule, drawn by hypothesis."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_ext.schedule import NAMES, Link, ScheduleError, check, generate, lower, simulate
from megatron_ext.schedule.actions import Op
from megatron_ext.schedule.bounds import makespan_bound
from megatron_ext.schedule.generators.blocks import gis_peak
from megatron_ext.schedule.io import load, save
from megatron_ext.schedule.passes.offload import offload
from tests.harness.strategies import TENTHS, Request, mutated, requests

examples = settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def cap_of(request: Request) -> list[int]:
    """Sets that each rank may keep under the name's memory."""
    options = dict(request.options)
    if "memory_cap" in options:
        return [options["memory_cap"]] * request.pp
    if "group_size" in options:
        return list(
            gis_peak(request.pp, request.microbatches, request.chunks, options["group_size"])
        )
    many = generate(request.name, request.pp, 4 * request.pp, request.chunks, effort=0)
    return [max(simulate(many).peak_sets)] * request.pp


@examples
@given(requests())
def test_valid_and_within_memory_and_bound(request: Request) -> None:
    """``check`` passes, before and after lowering; the peak is within the name's cap, and no order
    beats the bound nor loses to the name's order for equal costs."""
    schedule = request.make()
    report = check(schedule)
    assert check(lower(schedule)) == report
    assert all(peak <= cap for peak, cap in zip(report.peak_sets, cap_of(request), strict=True))
    run = simulate(schedule)
    bound = makespan_bound(
        schedule.placement, request.microbatches, request.costs, max(report.peak_sets)
    )
    assert bound <= run.makespan
    published = generate(
        request.name, request.pp, request.microbatches, request.chunks, **dict(request.options)
    )
    assert run.makespan <= simulate(published, request.costs).makespan


@examples
@given(requests(), st.integers(2, 1000))
def test_scaling_costs_changes_nothing(request: Request, factor: int) -> None:
    """An order depends on ratios."""
    one, many = request.make(), request.make(request.scaled(factor))
    assert one.ranks == many.ranks
    assert simulate(one).makespan * factor == simulate(many).makespan


@examples
@given(requests())
def test_a_file_keeps_everything(request: Request) -> None:
    """Saved and loaded, lowered or not, a schedule is itself."""
    with tempfile.TemporaryDirectory() as folder:
        for schedule in (request.make(), lower(request.make())):
            save(schedule, Path(folder) / "s.json")
            assert load(Path(folder) / "s.json") == schedule


def replayed(request: Request, ranks: object) -> Fraction | None:
    """The makespan by brute force, one rank's next action at a time; None: nothing can go on."""
    schedule, costs = request.make(), request.costs
    place, last = schedule.placement, schedule.placement.num_stages - 1
    times = costs.durations(place) if hasattr(costs, "durations") else None
    done: dict[tuple[str, int, int], Fraction] = {}
    clock, at = [Fraction(0)] * request.pp, [0] * request.pp

    def cost(op: Op, stage: int) -> Fraction:
        if times is not None:
            return Fraction(times.of(op, stage), times.scale)
        f, b, w = request.stages[stage] if request.stages else request.times[:3]
        return {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}[op]

    def ready(op: Op, stage: int, j: int, rank: int) -> Fraction | None:
        if op is Op.F:
            needs = [("F", stage - 1)] if stage else []
        elif op is Op.W:
            needs = [("B", stage)]
        else:
            needs = [("F", stage)] + ([("B", stage + 1)] if stage < last else [])
        when = Fraction(0)
        for kind, other in needs:
            end = done.get((kind, other, j))
            if end is None:
                return None
            hop = request.times[3] if place.rank_of(other) != rank else 0
            when = max(when, end + hop)
        return when

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(ranks):
            while at[rank] < len(row):
                action, begin = row[at[rank]], clock[rank]
                whens = [ready(p.op, p.stage, p.microbatch, rank) for p in action.parts]
                if None in whens:
                    break
                begin = max([begin, *whens])
                clock[rank] = begin + sum(cost(p.op, p.stage) for p in action.parts)
                for p in action.parts:
                    kind = "B" if p.op is Op.BW else p.op.value
                    done.setdefault((kind, p.stage, p.microbatch), clock[rank])
                at[rank] += 1
                moved = True
    return max(clock) if all(a == len(r) for a, r in zip(at, ranks)) else None


@examples
@given(requests(most=5))
def test_simulate_is_a_brute_force_replay(request: Request) -> None:
    """To the last fraction."""
    schedule = request.make()
    assert simulate(schedule).makespan == replayed(request, schedule.ranks)


def in_order(ranks: object) -> bool:
    """Passes of one kind of a stage run in microbatch order, which check asks for too."""
    last: dict[tuple[str, int], int] = {}
    for p in (p for row in ranks for action in row for p in action.parts):
        kind = "B" if p.op is Op.BW else p.op.value
        if last.get((kind, p.stage), -1) > p.microbatch:
            return False
        last[kind, p.stage] = p.microbatch
    return True


@examples
@given(st.data())
def test_a_changed_order_is_refused_where_a_replay_stops(data: st.DataObject) -> None:
    """check finds what cannot run, and accepts what can."""
    request = data.draw(requests(most=4))
    schedule = request.make()
    changed = data.draw(mutated(schedule))
    same = sorted(str(a) for r in schedule.ranks for a in r) == sorted(
        str(a) for r in changed.ranks for a in r
    )
    runs = same and in_order(changed.ranks) and replayed(request, changed.ranks) is not None
    try:
        check(changed)
        refused = ""
    except ScheduleError as error:
        refused = str(error)
    event(f"runs {runs}, refused {bool(refused)}")
    assert bool(refused) != runs, f"{changed.ranks} {refused or 'accepted'}"


@examples
@given(
    requests(tuple(n for n in NAMES if n != "dualpipev"), most=4),
    TENTHS,
    TENTHS,
    st.sampled_from(["auto", "half", "full"]),
)
def test_offload(request: Request, out: Fraction, back: Fraction, how: str) -> None:
    """Valid after lowering (so no two copies on a link), never more memory than without, no stall
    under ``auto``, and half of the chunks at most under ``half``."""
    base = request.make()
    plan = offload(base, Link.of(request.pp, out / 4, back / 4), how)
    assert check(lower(plan.schedule)) == check(plan.schedule)
    assert plan.peak_sets == plan.schedule.peak_sets()
    assert all(a <= b for a, b in zip(plan.peak_sets, base.peak_sets(), strict=True))
    stall = simulate(plan.schedule).makespan - simulate(base).makespan
    assert stall == plan.stall and (how != "auto" or stall == 0)
    if how == "half":
        moved = [sum(per_rank) for per_rank in zip(*plan.moved, strict=True)]
        assert sum(map(bool, moved)) <= -(-request.chunks // 2)
