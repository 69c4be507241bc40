"""Copies between device and host in every picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from megatron_ext.schedule import Link, generate, simulate
from megatron_ext.schedule.passes.offload import offload
from megatron_ext.view import page, svg, text, timeline, trace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run():
    plan = offload(generate("po", 4, 8), Link.of(4, "0.25"), "full")
    return timeline.planned(simulate(plan.schedule))


def _copies(run):
    return sorted(str(box.action) for row in run.copies for box in row)


def test_timeline_has_them_in_the_units_of_the_costs(run):
    copies = [box for row in run.copies for box in row]
    assert len(copies) > 60
    assert {round(box.end - box.start, 9) for box in copies} == {0.25 * 1.5}
    assert run.peak_activation == [1, 1, 1, 1]
    twice = timeline.planned(simulate(generate("1f1b", 4, 8))).scaled_to(run)
    assert twice.copies == ()
    assert run.scaled_to(run).copies == run.copies


def test_svg_and_page(run):
    root = ElementTree.fromstring(svg.render(run))
    drawn = [e for e in root.iter(f"{SVG}rect") if e.get("class", "").startswith("copy ")]
    titles = [e.find(f"{SVG}title").text.split(":")[0] for e in drawn]
    assert sorted(titles) == _copies(run)
    lanes = {(e.get("class"), e.get("y")) for e in drawn}
    assert len(lanes) == 2 * 4
    assert "to host" in svg.render(run)
    assert page.render(run).count(',"OFFLOAD"]') == len(titles) // 2
    without = svg.render(timeline.planned(simulate(generate("po", 4, 8))))
    assert "OFFLOAD" not in without
    assert "to host" not in without


def test_trace(run):
    events = trace.to_trace([run])["traceEvents"]
    names = [e["name"] for e in events if e["ph"] == "X" and e["cat"] in ("OFFLOAD", "RELOAD")]
    assert sorted(names) == _copies(run)
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert tracks == ["planned", "to host, planned", "to device, planned"]


def test_text(run):
    lines = text.render(run).splitlines()
    copies = [line for line in lines if line.startswith("  copies ")]
    assert len(copies) == 4
    assert all(set(line.split("|")[1]) <= {" ", ">", "<", "x"} for line in copies)
    assert {len(line) for line in lines if "|" in line} == {len(copies[0])}
    assert "> to the host, < back" in lines[2]
