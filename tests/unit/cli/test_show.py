"""``show``: blocks and timelines in every form."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from .conftest import options


def test_show_block(run, tmp_path):
    """One stamped block, its repetition, and squeezed: what docs/05 draws."""
    argv = ["show", "--block", "v-half", "--pp", 4]
    status, out, _ = run(*argv)
    assert status == 0
    assert "a microbatch every 6, which holds 3 at most (1F1B 4)" in out
    assert "rank 3 |..................F0 f0 ....................................b0 w0 B0 W0" in out
    out = run(*argv, "--microbatches", 6)[1]
    assert "peak activation per rank, in microbatches (1F1B: 4): 3 3 3 3" in out
    out = run(*argv, "--microbatches", 6, "--squeeze")[1]
    assert "makespan 48, bubble 25 %" in out
    assert "peak activation per rank, in microbatches (1F1B: 4): 3 3 3 3" in out
    for suffix in (".svg", ".html", ".json", ".txt"):
        path = tmp_path / f"block{suffix}"
        assert run(*argv, "--output", path)[0] == 0
        assert "block of v-half" in path.read_text()


def test_show_text(run):
    status, out, _ = run("show", *options("1f1b", 2, 4))
    assert status == 0
    assert "rank 1 |...F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- ......|\n" in out
    narrow = run("show", *options("1f1b", 2, 4), "--width", 40)[1]
    assert max(len(line) for line in narrow.splitlines() if line.startswith("rank")) == 40


def test_show_writes_what_the_suffix_says(run, tmp_path):
    argv = ["show", *options("zb-h1", 4, 8), "--output"]
    for suffix in (".svg", ".html", ".json", ".txt"):
        path = tmp_path / f"timeline{suffix}"
        status, out, _ = run(*argv, path)
        assert (status, out) == (0, f"{path}: zb-h1, pp 4, makespan 27\n")
    assert ElementTree.parse(tmp_path / "timeline.svg").getroot().tag.endswith("svg")
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 4 * 24
    assert (tmp_path / "timeline.txt").read_text().startswith("zb-h1 (planned)")
