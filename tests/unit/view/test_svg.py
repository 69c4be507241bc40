"""The SVG: well-formed, self-contained, one box per pass where the simulation put it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_ext.schedule.generators import generate
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.simulate import simulate
from megatron_ext.view.svg import render
from megatron_ext.view.timeline import measured, planned

SVG = "{http://www.w3.org/2000/svg}"


def _draw(schedule: Schedule) -> ElementTree.Element:
    return ElementTree.fromstring(render(planned(simulate(schedule))))


def _boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [e for e in root.iter(f"{SVG}rect") if e.get("class", "").startswith("box ")]


def _texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("name", "pp", "m"), [("1f1b", 2, 1), ("1f1b", 4, 8), ("interleaved", 3, 6), ("zb-h1", 8, 32)]
)
def test_one_numbered_box_per_action(name, pp, m):
    schedule = generate(name, pp, m)
    root = _draw(schedule)
    actions = [str(action) for _, _, action in schedule.actions()]
    titles = [box.find(f"{SVG}title").text.split(":")[0] for box in _boxes(root)]
    assert sorted(titles) == sorted(actions)
    numbers = [
        "".join(text.itertext())
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "n"
        for text in group
    ]
    assert sorted(numbers) == sorted(str(a.microbatch) for _, _, a in schedule.actions())


def test_boxes_stand_where_the_simulation_puts_them():
    root = _draw(generate("1f1b", 4, 8))
    by_name = {box.find(f"{SVG}title").text.split(":")[0]: box for box in _boxes(root)}
    strip = next(e for e in root.iter(f"{SVG}rect") if e.get("class") == "strip")
    left, width = float(strip.get("x")), float(strip.get("width"))
    for name, start, end in [("F0.0", 0, 1), ("F3.0", 3, 4), ("BW3.0", 4, 6), ("BW0.7", 31, 33)]:
        x, w = float(by_name[name].get("x")), float(by_name[name].get("width"))
        assert x == pytest.approx(left + width * start / 33, abs=0.6)
        assert x + w == pytest.approx(left + width * end / 33, abs=0.6)
    assert float(by_name["F0.0"].get("y")) < float(by_name["F1.0"].get("y"))


def test_title_and_memory_say_the_numbers():
    texts = _texts(_draw(generate("1f1b", 4, 8)))
    assert any("makespan 33   bubble 27.3 %   peak activation 4 (1F1B 4)" in t for t in texts)
    assert any("dashed: peak of 1F1B, 4" in t for t in texts)
    assert texts[-8:] == ["rank 0", "4", "rank 1", "3", "rank 2", "2", "rank 3", "1"]


def test_the_two_chunks_have_two_shades():
    text = render(planned(simulate(generate("interleaved", 2, 4))))
    fills = dict(re.findall(r"\.(F[01]|BW[01])\{fill:(#[0-9a-f]{6})\}", text))
    assert len(set(fills.values())) == 4
    assert 'class="l"' in text


def test_many_microbatches_drop_the_numbers_not_the_boxes():
    schedule = generate("zb-h1", 8, 256)
    root = _draw(schedule)
    assert len(_boxes(root)) == sum(len(row) for row in schedule.ranks)
    assert not [g for g in root.iter(f"{SVG}g") if g.get("class") == "n"]
    assert float(root.get("width")) < 2000


def test_is_self_contained_and_has_a_white_ground():
    text = render(planned(simulate(generate("zb-h1", 4, 8))))
    root = ElementTree.fromstring(text)
    width, height = root.get("width"), root.get("height")
    assert f'<rect width="{width}" height="{height}" fill="#ffffff"/>' in text
    assert not re.search(r"href|url\(|<script|<image|@import", text)


def test_names_are_escaped():
    schedule = generate("1f1b", 2, 1)
    odd = Schedule("<b>&", schedule.placement, 1, schedule.ranks)
    assert any(text.startswith("<b>&") for text in _texts(_draw(odd)))


def test_planned_and_measured_on_one_axis():
    schedule = generate("1f1b", 2, 3)
    run = simulate(schedule)
    events = [
        [
            {"action": str(a), "start_us": 2000.0 * s, "end_us": 2000.0 * e}
            for a, s, e in zip(row, starts, ends)
        ]
        for row, starts, ends in zip(schedule.ranks, run.start, run.end)
    ]
    root = ElementTree.fromstring(render(planned(run), measured(schedule, events)))
    texts = _texts(root)
    assert len(_boxes(root)) == 2 * sum(len(row) for row in schedule.ranks)
    for label in ("planned", "measured"):
        assert any(t.startswith(f"{label}: makespan 24 ms   bubble 25 %") for t in texts)
    assert len([e for e in root.iter(f"{SVG}path") if e.get("class") == "line"]) == 2
    assert "ms" in texts


def test_schedules_stacked_on_one_axis():
    """Rows of both at one scale, the fullest rank's memory of each, and what the shorter saves."""
    runs = [planned(simulate(generate(name, 4, 8))) for name in ("1f1b", "v-half")]
    root = ElementTree.fromstring(render(*runs))
    boxes = _boxes(root)
    assert len(boxes) == sum(len(row) for run in runs for row in run.boxes)
    strips = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "strip"]
    left, width = float(strips[0].get("x")), float(strips[0].get("width"))
    assert len(strips) == 2
    for run, part in zip(runs, (boxes[:64], boxes[64:])):
        ends = [float(box.get("x")) + float(box.get("width")) for box in part]
        assert max(ends) == pytest.approx(left + width * run.makespan / 33, abs=0.6)
    texts = _texts(root)
    assert any(t.startswith("1f1b: makespan 33   bubble 27.3 %") for t in texts)
    assert any(t.startswith("v-half: makespan 26.5   bubble 9.4 %") for t in texts)
    assert "19.7 % less time" in texts
    fills = set(re.findall(r"\.(F\w+)\{fill", render(*runs)))
    assert fills == {"F0", "F1", "F0of1"}
    assert {c for b in boxes[:64] for c in b.get("class").split()} == {"box", "F0of1", "BW0of1"}


def test_themes():
    run = planned(simulate(generate("1f1b", 2, 2)))
    auto, light, dark = (render(run, theme=theme) for theme in ("auto", "light", "dark"))
    assert auto == render(run) and "@media(prefers-color-scheme:dark)" in auto
    assert "@media" not in light + dark and ".idle{fill:#242c35}" in dark
    assert ".idle{fill:#242c35}" not in light
    # Every ground, text and line that is not a pass has a colour on dark.
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', light))
    assert all(f'="{color}"]' in dark for color in used - {"#1f2933"}) and '"#1f2933"]' in dark
