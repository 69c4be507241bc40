"""Timelines: what a simulated and a measured run become before they are drawn."""

from __future__ import annotations

import pytest

from megatron_ext.schedule import Link, offload_pass
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import forward_only, generate
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.simulate import simulate
from megatron_ext.view.timeline import decimal, measured, planned, reference_peak


def _events(schedule, factor_us=1000.0, origin_us=5e6):
    """What a trace of a run exactly as simulated would hold."""
    run = simulate(schedule)
    return [
        [
            {
                "action": str(action),
                "start_us": origin_us + s / run.scale * factor_us,
                "end_us": origin_us + e / run.scale * factor_us,
            }
            for action, s, e in zip(row, starts, ends)
        ]
        for row, starts, ends in zip(run.schedule.ranks, run.start, run.end)
    ]


def test_planned_is_the_simulation():
    run = planned(simulate(generate("1f1b", 4, 8)))
    assert run.makespan == 33
    assert run.bubble == pytest.approx(3 / 11)
    assert run.peak_activation == [4, 3, 2, 1]
    first = run.boxes[1][0]
    assert (str(first.action), first.start, first.end) == ("F1.0", 1, 2)
    assert run.memory[3][:2] == ((0, 0), (3, 1))
    assert run.memory[3][-1] == (27, 0)


def test_planned_divides_by_the_scale():
    run = planned(simulate(generate("1f1b", 2, 2, costs=Costs.of("0.5", 1, 1, "0.25"))))
    assert run.boxes[1][0].start == 0.75


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_a_run_as_simulated_measures_like_the_simulation(name):
    schedule = generate(name, 4, 6)
    plan, real = planned(simulate(schedule)), measured(schedule, _events(schedule))
    assert real.unit == "ms"
    assert real.makespan == pytest.approx(plan.makespan)
    assert real.bubble == pytest.approx(plan.bubble)
    assert real.peak_activation == plan.peak_activation
    assert [[box.action for box in row] for row in real.boxes] == [
        [box.action for box in row] for row in plan.boxes
    ]


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_offloaded_sets_leave_a_measured_run_too(name):
    schedule = offload_pass(generate(name, 4, 6), Link.of(4, "0.25"), "half").schedule
    plan, real = planned(simulate(schedule)), measured(schedule, _events(schedule))
    kept = measured(schedule.compute(), _events(schedule))
    assert real.peak_activation == plan.peak_activation
    assert all(row[-1][1] == 0 and min(n for _, n in row) == 0 for row in real.memory)
    assert max(real.peak_activation) < max(kept.peak_activation)


def test_measured_sorts_and_leaves_transfers_out():
    schedule = generate("1f1b", 2, 1)
    events = _events(schedule)
    events[0].append({"action": "SEND_F0.0", "start_us": 0, "end_us": 1})
    events[0].reverse()
    run = measured(schedule, events)
    assert [str(box.action) for box in run.boxes[0]] == ["F0.0", "BW0.0"]
    assert run.boxes[0][0].start == 0


def test_scaled_to_spends_equally_long_computing():
    schedule = generate("zb-h1", 4, 8)
    real = measured(schedule, _events(schedule, factor_us=2500.0))
    plan = planned(simulate(schedule)).scaled_to(real)
    assert plan.unit == "ms"
    assert plan.work == pytest.approx(real.work)
    assert plan.makespan == pytest.approx(2.5 * 27)


def test_forward_only_keeps_nothing():
    schedule = forward_only(Placement.loop(2), 3)
    assert planned(simulate(schedule)).peak_activation == [0, 0]
    assert measured(schedule, _events(schedule)).peak_activation == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop(), "1 event lists for pp=2"),
        (lambda e: e[0][0].pop("end_us"), "rank 0: bad event"),
        (lambda e: e[0][0].update(action="F0"), "not an action: 'F0'"),
        (lambda e: e[1][0].update(end_us=0.0), r"rank 1: F1.0 runs from \S+ to 0.0 ms"),
        (lambda e: e[1][0].update(action="F0.0"), "rank 1: F0.0 .* the rank holds stages 1"),
    ],
)
def test_bad_traces_say_what_is_wrong(change, message):
    schedule = generate("1f1b", 2, 1)
    events = _events(schedule)
    change(events)
    with pytest.raises(ValueError, match=message):
        measured(schedule, events)


def test_reference_peak_and_decimal():
    assert reference_peak(generate("1f1b", 4, 2)) == 2
    assert reference_peak(generate("1f1b", 4, 20)) == 4
    assert [decimal(x) for x in (3.0, 0.5, 1 / 3, 100.0)] == ["3", "0.5", "0.333", "100"]
