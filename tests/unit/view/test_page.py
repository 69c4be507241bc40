"""The HTML page: every pass in its data, self-contained, planned and measured, stacked."""

from __future__ import annotations

import json
import re

import pytest

from megatron_ext.schedule import Link, generate, simulate
from megatron_ext.schedule.passes.offload import offload
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.view import page
from megatron_ext.view.palette import MEANING, shades
from megatron_ext.view.timeline import measured, planned


def _runs(text: str) -> list[dict]:
    return json.loads(re.search(r"^const TIMELINE = (.*);$", text, re.M)[1])["runs"]


@pytest.mark.parametrize(("name", "pp", "m"), [("1f1b", 4, 8), ("v-half", 3, 5), ("zb-h2", 2, 1)])
def test_data_are_the_simulation(name, pp, m):
    schedule = generate(name, pp, m)
    result = simulate(schedule)
    (run,) = _runs(page.render(planned(result)))
    for rank, (actions, passes) in enumerate(zip(schedule.ranks, run["rows"])):
        assert [(op, stage, micro) for _, _, op, stage, micro in passes] == [
            (a.op.value, a.stage, a.microbatch) for a in actions
        ]
        scale = result.scale
        assert [p[:2] for p in passes] == [
            [s / scale, e / scale] for s, e in zip(result.start[rank], result.end[rank])
        ]
    assert run["makespan"] == float(result.makespan)
    assert run["peaks"] == [float(peak) for peak in result.peak_activation]
    assert all(abs(idle - float(result.bubble)) < 1e-4 for idle in run["idle"])
    assert run["chunk"] == [schedule.placement.chunk_of(s) for s in range(pp * schedule.chunks)]
    assert {op for row in run["rows"] for _, _, op, _, _ in row} == set(run["ops"])
    assert all(len(run["colors"][op]) == schedule.chunks for op in run["ops"])


def test_memory_is_in_microbatches():
    (run,) = _runs(page.render(planned(simulate(generate("v-half", 4, 8)))))
    for peak, steps in zip(run["peaks"], run["memory"]):
        assert max(held for _, held in steps) == peak == 3
        assert steps[-1][1] == 0


def test_copies_and_joint_passes():
    plan = offload(generate("po", 4, 8), Link.of(4, "0.25"), "full")
    (run,) = _runs(page.render(planned(simulate(plan.schedule))))
    assert {op for row in run["copies"] for _, _, op in row} == {"OFFLOAD", "RELOAD"}
    assert run["ops"][-2:] == ["OFFLOAD", "RELOAD"] and run["peaks"] == [1, 1, 1, 1]
    (pairs,) = _runs(page.render(planned(simulate(generate("dualpipev", 2, 8)))))
    assert {len(p) for row in pairs["rows"] for p in row} <= {5, 8}


def test_planned_and_measured_share_a_unit():
    schedule = generate("zb-h1", 2, 2)
    run = simulate(schedule)
    events = [
        [
            {"action": str(a), "start_us": 1000.0 * s, "end_us": 1500.0 * e}
            for a, s, e in zip(row, starts, ends)
        ]
        for row, starts, ends in zip(schedule.ranks, run.start, run.end)
    ]
    plan, real = _runs(page.render(planned(run), measured(schedule, events)))
    assert (plan["unit"], real["unit"]) == ("ms", "ms")
    assert real["title"] == "zb-h1, measured" and plan["title"] == "zb-h1"
    work = [sum(e - s for row in r["rows"] for s, e, *_ in row) for r in (plan, real)]
    assert work[0] == pytest.approx(work[1])


def test_several_schedules():
    runs = [planned(simulate(generate(name, 4, 8))) for name in ("1f1b", "v-half")]
    first, second = _runs(page.render(*runs))
    assert (first["title"], second["title"]) == ("1f1b", "v-half")
    assert (
        first["facts"] == "p = 4, m = 8: makespan 33   bubble 27.3 %   peak activation 4 (1F1B 4)"
    )
    assert len(first["colors"]["F"]) == 1 and len(second["colors"]["F"]) == 2


def test_is_self_contained():
    text = page.render(planned(simulate(generate("v-half", 4, 8))))
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"href|src=|url\(|<image|@import|<link", text)
    assert text.count("<script>") == text.count("</script>") == 1
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text


def test_names_are_escaped():
    schedule = generate("1f1b", 2, 1)
    odd = Schedule("</script><b>&", schedule.placement, 1, schedule.ranks)
    text = page.render(planned(simulate(odd)))
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;, pp 2" in text
    assert text.count("</script>") == 1


def test_chunks_are_shades_of_one_colour():
    for op in MEANING:
        assert len(set(shades(op, 8))) == 8 and shades(op, 1) == shades(op, 2)[:1]
