"""``show``: blocks and timelines in every form."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from .conftest import options


def test_show_block(run, tmp_path):
    """One stamped block, its repetition, and squeezed, as in building-blocks.md."""
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


def test_a_block_has_its_numbers(run):
    out = run("show", "--block", "v-half", "--pp", 4)[1]
    assert "0      0 + 7     28 + 8               3.5          3\n" in out
    assert "peak 3 microbatches, 75.0 % of 1F1B's; bubble with 16 microbatches 11.1 %" in out
    assert "efficient: stages of rank 0 live 28 + 8, of rank 3 18 + 15; every rank holds" in out
    out = run("show", "--block", "interleaved", "--pp", 2)[1]
    assert "2 microbatches every 12, which holds 2.5 at most (1F1B 2)" in out
    assert "rank 1 |.........F0 ...............f0 bw0-- ............BW0-- .........|" in out
    assert "rank 0 holds 2.5 microbatches, the mean rank 2\n" in out
    out = run("show", "--block", "1f1b", "--pp", 2, "--microbatches", 3, "--squeeze")[1]
    assert "makespan 12, bubble 25 %" in out


def test_all_blocks_side_by_side(run):
    status, out, _ = run("show", "--blocks", "--pp", 8, "--microbatches", 32)
    assert status == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()[3:17]}
    assert rows["1f1b"] == "1 3 3 to 24 8 8 100.0 % 17.9 % 17.9 % unbalanced"
    assert rows["v-half"] == "2 6 8 to 52 5.5 5 62.5 % 11.9 % 8.1 % balanced"
    found = json.loads(run("show", "--blocks", "--pp", 8, "--json", "--chunks", 4)[1])["blocks"]
    assert [each["block"] for each in found] == list(rows)
    chunks = {each["block"]: each["chunks"] for each in found}
    assert (chunks["1f1b"], chunks["interleaved"], chunks["v-min"]) == (1, 4, 2)


def test_a_block_file_goes_all_the_way(run, tmp_path):
    """Written from a name, changed, drawn, and made a schedule that can be checked and run."""
    block, order = tmp_path / "mine.json", tmp_path / "order.json"
    data = json.loads(run("show", "--block", "v-half", "--pp", 4, "--json")[1])
    assert data["report"]["peak_activation"] == [3, 3, 3, 3]
    assert data["report"]["lifespan"][:2] == [28, 24] and data["report"]["balance"] == "balanced"
    data["offsets"]["W"][0] += 6  # a microbatch later
    block.write_text(json.dumps(data))
    status, out, _ = run("show", "--block", block)
    assert status == 0 and "0      0 + 7     34 + 8" in out
    assert run("show", "--block", block, "--pp", 5)[0] == 2
    argv = ["schedule", "--block", block, "--microbatches", 16, "--cost", "1,0.98,0.74"]
    assert run(*argv, "--output", order)[1] == f"{order}: block of mine, pp 4, 384 actions\n"
    assert run("simulate", "--schedule", order)[0] == 0
    found = json.loads(run("simulate", "--schedule", order, "--json")[1])
    assert max(found["peak_activation"]) <= 3.5 and found["bubble"] < 0.1
    data["offsets"]["W"][0] += 1
    block.write_text(json.dumps(data))
    status, _, err = run("show", "--block", block)
    assert status == 2 and "fall on the same time modulo the interval, 6; move one" in err
    block.write_text("[1")
    assert f"block file {block}: not JSON: Expecting" in run("show", "--block", block)[2]


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
