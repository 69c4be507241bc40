"""``show``: timelines in every form."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from .conftest import options


def test_show_text(run):
    status, out, _ = run("show", *options("1f1b", 2, 4))
    assert status == 0
    assert "rank 1 |...F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- ......|\n" in out


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


def test_several_schedules_on_one_axis(run, tmp_path):
    path = tmp_path / "both.svg"
    argv = ["show", "1f1b", "v-cap", "--pp", 4, "--microbatches", 8, "--memory-cap", "0.75"]
    status, out, _ = run(*argv, "--output", path)
    assert (status, out) == (0, f"{path}: 1f1b, pp 4, makespan 33; v-cap, pp 4, makespan 26.5\n")
    assert "19.7 % less time" in path.read_text()
    order = tmp_path / "order.json"
    assert run("schedule", *options("zb-h1", 4, 8), "--output", order)[0] == 0
    status, out, _ = run("show", order, "1f1b", "--pp", 4, "--microbatches", 8)
    assert status == 0 and out.index("zb-h1 (planned)") < out.index("1f1b (planned)")
    assert "v-half needs --pp and --microbatches too" in run("show", order, "v-half")[2]
    assert "unknown schedule 'v-hlaf'" in run("show", "v-hlaf", "--pp", 4, "--microbatches", 8)[2]
    status, _, err = run("show", "1f1b", "v-half", "--measured", tmp_path)
    assert status == 2 and err
