"""The HTML page: one row of data a box, self-contained, planned and measured."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_ext.schedule.generators import generate
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.simulate import simulate
from megatron_ext.view import page, svg
from megatron_ext.view.timeline import decimal, measured, planned


def _passes(text: str) -> list[list]:
    return json.loads(re.search(r"^const PASSES = (.*);$", text, re.M)[1])


def _boxes(text: str) -> list[str]:
    """Titles of the boxes in the order of the document, which is the order of the script."""
    root = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    return [
        "".join(box.itertext())
        for box in root.iter("{http://www.w3.org/2000/svg}rect")
        if box.get("class", "").startswith("box ")
    ]


@pytest.mark.parametrize(("name", "pp", "m"), [("1f1b", 4, 8), ("v-half", 3, 5), ("zb-h2", 2, 1)])
def test_data_match_the_boxes_one_by_one(name, pp, m):
    run = planned(simulate(generate(name, pp, m)))
    text = page.render(run)
    passes = _passes(text)
    assert _boxes(text) == [f"{action}: {start} to {end}" for action, _, start, end, _ in passes]
    assert passes == [
        [str(box.action), rank, decimal(box.start), decimal(box.end), "planned"]
        for rank, row in enumerate(run.boxes)
        for box in row
    ]


def test_the_script_finds_what_it_stretches():
    """Every selector of the script is there, and nothing on the time axis is without one."""
    run = planned(simulate(generate("v-half", 3, 5)))
    text = page.render(run)
    root = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    found = {part for element in root.iter() for part in element.get("class", "").split()}
    selectors = re.search(r'TIMED = "([^"]*)"', text)[1].split(",")
    assert {s.removeprefix(".") for s in selectors} - {"line", "copy"} <= found  # of other runs
    assert {"n", "tick", "left", "right"} <= found
    for element in root.iter("{http://www.w3.org/2000/svg}path"):
        assert element.get("class") in ("axis", "area", "peak", "line")


def test_planned_and_measured():
    schedule = generate("zb-h1", 2, 2)
    run = simulate(schedule)
    events = [
        [
            {"action": str(a), "start_us": 1000.0 * s, "end_us": 1500.0 * e}
            for a, s, e in zip(row, starts, ends)
        ]
        for row, starts, ends in zip(schedule.ranks, run.start, run.end)
    ]
    plan, real = planned(run), measured(schedule, events)
    text = page.render(plan, real)
    passes = _passes(text)
    assert _boxes(text) == [f"{action}: {start} to {end}" for action, _, start, end, _ in passes]
    assert [p[4] for p in passes] == ["planned"] * 12 + ["measured"] * 12
    assert 'const UNIT = " ms";' in text
    assert svg.render(plan, real) in text


def test_is_self_contained():
    text = page.render(planned(simulate(generate("v-half", 4, 8))))
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"href|src=|url\(|<image|@import|<link", text)
    assert text.count("<script>") == text.count("</script>") == 1


def test_names_are_escaped():
    schedule = generate("1f1b", 2, 1)
    odd = Schedule("</script><b>&", schedule.placement, 1, schedule.ranks)
    text = page.render(planned(simulate(odd)))
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;, pp 2" in text
    assert text.count("</script>") == 1
