"""The Chrome/Perfetto trace."""

from __future__ import annotations

import json

import pytest

from megatron_ext.schedule.generators import generate
from megatron_ext.schedule.simulate import simulate
from megatron_ext.view.timeline import measured, planned
from megatron_ext.view.trace import to_trace


def _phase(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_passes_counters_and_arrows():
    trace = json.loads(json.dumps(to_trace([planned(simulate(generate("1f1b", 4, 8)))])))
    passes = {event["name"]: event for event in _phase(trace, "X")}
    assert len(passes) == 4 * 16
    event = passes["PP:BW3.1"]
    assert (event["pid"], event["ts"], event["dur"]) == (3, 7000, 2000)
    assert event["args"] == {"stage": 3, "chunk": 0, "microbatch": 1}
    peaks = [
        max(e["args"]["sets"] for e in _phase(trace, "C") if e["pid"] == rank) for rank in range(4)
    ]
    assert peaks == [4, 3, 2, 1]
    # Three rank borders, eight microbatches, forth and back.
    starts, ends = _phase(trace, "s"), _phase(trace, "f")
    assert len(starts) == len(ends) == 3 * 8 * 2
    assert {e["id"] for e in starts} == {e["id"] for e in ends}
    by_id = {e["id"]: e for e in starts}
    assert all(by_id[e["id"]]["ts"] <= e["ts"] and by_id[e["id"]]["pid"] != e["pid"] for e in ends)


def test_planned_and_measured_are_two_tracks_of_each_rank():
    schedule = generate("zb-h1", 2, 1)
    events = [
        [
            {"action": str(action), "start_us": 10.0 * i, "end_us": 10.0 * i + 5}
            for i, action in enumerate(row)
        ]
        for row in schedule.ranks
    ]
    trace = to_trace([planned(simulate(schedule)), measured(schedule, events)])
    assert {e["tid"] for e in _phase(trace, "X")} == {0, 1}
    names = {e["args"]["name"] for e in _phase(trace, "M") if e["name"] == "thread_name"}
    assert names == {"planned", "measured"}
    second = next(e for e in _phase(trace, "X") if e["tid"] == 1 and e["name"] == "PP:B0.0")
    assert (second["ts"], second["dur"]) == pytest.approx((10, 5))
