"""The ASCII timeline."""

from __future__ import annotations

from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.generators import generate
from megatron_ext.schedule.simulate import simulate
from megatron_ext.view.text import render
from megatron_ext.view.timeline import planned

GOLDEN = """\
1f1b (planned): pp 2, chunks 1, microbatches 4, makespan 15, bubble 20 %
peak activation per rank, in microbatches (1F1B: 2): 2 1
F0 = forward of microbatch 0; dots = idle

rank 0 |F0 F1 ......BW0-- F2 BW1-- F3 BW2-- ...BW3-- |
rank 1 |...F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- ......|
"""


def _run(name, pp, m, **kwargs):
    return planned(simulate(generate(name, pp, m, **kwargs)))


def test_golden():
    assert render(_run("1f1b", 2, 4)) == GOLDEN
    assert render(_run("1f1b", 2, 4), 80) == GOLDEN


def test_second_chunk_is_in_lower_case():
    text = render(_run("interleaved", 2, 2))
    assert "F0 F1 f0 f1" in text
    assert "lower case = odd chunks" in text


def test_wraps_to_the_width_and_loses_nothing():
    run = _run("zb-h1", 4, 12)
    whole, wrapped = render(run).splitlines(), render(run, 80).splitlines()
    rows = [line for line in wrapped if line.startswith("rank 2 ")]
    assert len(rows) == 3
    assert all(len(line) <= 80 for line in wrapped if line.startswith("rank"))
    joined = "".join(row.split("|")[1] for row in rows)
    assert joined == next(line for line in whole if line.startswith("rank 2 ")).split("|")[1]
    assert "time 0 to 17.75" in wrapped


def test_long_runs_become_letters_then_are_cut_with_a_note():
    letters = render(_run("zb-h1", 8, 32), 100)
    assert "one letter a pass" in letters
    assert "rank 0 |FFFFFFFF.......BWFBWF" in letters
    assert "not shown" not in letters
    cut = render(_run("zb-h1", 4, 256), 80)
    assert "time 284 to 771 is not shown: 487 of 771 columns" in cut
    assert len(cut.splitlines()) < 30


def test_rows_stay_aligned_under_awkward_costs():
    costs = Costs.of(1, "1.07", "0.93", "0.05")
    rows = [r for r in render(_run("zb-h1", 4, 7, costs=costs)).splitlines() if r[:4] == "rank"]
    assert len({len(row) for row in rows}) == 1
    assert all(f"W{i}" in row for row in rows for i in range(7))


def test_one_tiny_stage_does_not_make_the_rows_endless():
    stages = [["1e-9", 1, 1], [1, 1, 1]]
    assert len(render(_run("1f1b", 2, 4, costs=Costs.of(stages=stages)))) < 1_000_000


def test_is_ascii():
    render(_run("interleaved", 4, 8), 60).encode("ascii")
