"""Pictures of one device's streams."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from megatron_ext.view.streams import Lane, Pass, Span, Streams, render_svg, render_text, to_trace

COMPUTE = Lane(
    "compute", (Span("C0", "the experts", 1.0, 3.0), Span("C1", "the experts", 3.0, 5.0))
)
NETWORK = Lane("network", (Span("S0", "to <them>", 0.0, 1.0), Span("R0", "back", 3.0, 3.05)))
SAVED = Lane("to host", (Span("D0", "copy", 3.0, 10.0),))
PICTURE = Streams("a layer", (Pass("forward", (COMPUTE, NETWORK, SAVED), 6.0),), "ms")


def test_text_is_to_scale():
    lines = render_text(PICTURE, 50).splitlines()
    assert lines[:3] == ["a layer", "", "forward: 6 ms"]
    assert lines[3] == "compute |....C0------C1------....................|"
    assert lines[4] == "network |S0--...................................." + "|"
    assert lines[5] == "to host |............D0--------------------------|"
    assert lines[-1] == ("C the experts; S to <them>; R back; D copy; dots: idle"), (
        "R0 is too short for a column, not for the legend"
    )
    assert all(len(line) <= 50 for line in lines[:6])
    assert len(render_text(PICTURE).splitlines()[3]) <= 120


def test_svg_is_to_scale():
    root = ET.fromstring(render_svg(PICTURE))
    rects = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            rects[title.text.split(",")[0]] = rect
    assert list(rects) == ["C0", "C1", "S0", "R0", "D0"]
    x, width = ({k: float(r.get(name)) for k, r in rects.items()} for name in ("x", "width"))
    assert x["S0"] < x["C0"] < x["C1"] and abs(x["C1"] - x["D0"]) < 1
    assert abs(width["D0"] / width["C0"] - 3.5) < 0.02
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a layer", "forward: 6 ms", "C0", "D copy", "S to <them>", "ms"} <= set(texts)
    assert "R0" not in texts


def test_trace_has_a_track_a_stream():
    data = to_trace(PICTURE)
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["compute", "network", "to host"]
    (first, *_), passed = data["traceEvents"], [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert first["args"] == {"name": "forward"}
    assert passed[0]["name"] == "C0" and (passed[0]["ts"], passed[0]["dur"]) == (1000.0, 2000.0)
    assert len(passed) == 5


def test_an_empty_pass():
    empty = Streams("nothing", (Pass("forward", (Lane("compute", ()),), 0.0),))
    assert "forward: 0" in render_text(empty)
    ET.fromstring(render_svg(empty))
