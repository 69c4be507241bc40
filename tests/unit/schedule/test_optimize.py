"""``schedule --optimize``: never slower, never more memory, and optimal where that is known."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.schedule import (
    Costs,
    Link,
    OffloadSpec,
    Op,
    Placement,
    ScheduleSpec,
    check,
    forward_only,
    generate,
    load,
    lower,
    select,
    simulate,
)
from megatron_ext.schedule import optimize as optimize_module
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.named import time_taken
from megatron_ext.schedule.optimize import optimize

EXACT = json.loads((Path(__file__).parent / "exact_optima.json").read_text())["rows"]
MEASURED = Costs.of(1, "0.98", "0.74")


@pytest.fixture
def solver():
    """OR-tools, which only an optimization needs."""
    pytest.importorskip("ortools")


@pytest.fixture
def by_work(monkeypatch):
    """Work ends every optimization long before its clock does, also on a busy machine."""
    monkeypatch.setattr(optimize_module, "_WORK_RATE", 0.005)


def test_without_ortools(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    path = tmp_path / "x.json"
    argv = f"schedule --schedule zb-h1 --pp 2 --microbatches 2 --optimize 1 --output {path}"
    assert cli.main(argv.split()) == 2
    assert "pip install 'megatron-ext[optimize]'" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_are_checked(seconds, capsys, tmp_path):
    argv = f"schedule --schedule zb-h1 --pp 2 --microbatches 2 --output {tmp_path}/x.json"
    with pytest.raises(SystemExit) as stop:
        cli.main([*argv.split(), f"--optimize={seconds}"])
    assert stop.value.code == 2
    assert "must be more than 0 and at most 3600 seconds" in capsys.readouterr().err


def test_refusals(solver):
    with pytest.raises(ValueError, match="dualpipev has joint forward and backward passes"):
        optimize(generate("dualpipev", 2, 4), 1)
    with pytest.raises(ValueError, match="no backward passes"):
        optimize(forward_only(Placement.loop(2), 4), 1)
    with pytest.raises(ValueError, match="1f1b keeps 2 activation sets on a rank, more than 1"):
        optimize(generate("1f1b", 2, 4), 1, cap=1)
    costs = Costs.of(vocabulary=(1, 1, 1, 1))
    sharded = select(ScheduleSpec("zb-h1", 2, 2, costs=costs, barriers=1)).schedule
    with pytest.raises(ValueError, match="zb-h1 has passes of a sharded vocabulary"):
        optimize(sharded, 1)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "chunks", "gains"),
    [
        ("1f1b", 3, 5, None, False),
        ("interleaved", 2, 4, 2, False),
        ("zb-h1", 4, 6, None, False),
        ("interleaved-zb", 3, 6, 2, True),
        ("v-min", 4, 8, None, False),
    ],
)
def test_any_schedule(solver, by_work, objective, name, pp, microbatches, chunks, gains):
    costs = Costs.of(1, "0.9", "0.6", "0.05")
    start = generate(name, pp, microbatches, chunks, costs, objective=objective)
    made = optimize(start, 60, objective=objective)
    assert made.before == time_taken(simulate(start), objective)
    assert made.bound <= made.after == time_taken(simulate(made.schedule), objective)
    assert made.after < made.before if gains else made.after <= made.before
    assert made.cap == max(peak_sets(start.ranks)) >= max(peak_sets(made.schedule.ranks))
    assert made.schedule.placement == start.placement
    assert made.schedule.splits_backward is start.splits_backward
    check(made.schedule)
    check(lower(made.schedule))


def test_two_runs_agree(solver, by_work):
    start = replace(generate("v-half", 4, 8), costs=MEASURED)
    first, second = (optimize(start, 60) for _ in range(2))
    assert first.complete and second.complete
    assert first.schedule.fingerprint() == second.schedule.fingerprint()
    assert first.after < first.before


def test_whole_and_split_backward_passes_in_one_order(solver, by_work):
    """A chunk's B's and BW's come in microbatch order, so they cannot pass each other."""
    split = generate("zb-h1", 2, 4, costs=MEASURED)
    rows = []
    for row in split.ranks:
        whole = [a._replace(op=Op.BW) if a.op is Op.B and a.microbatch < 2 else a for a in row]
        rows.append([a for a in whole if a.op is not Op.W or a.microbatch >= 2])
    mixed = split.with_ranks(rows)
    check(mixed)
    made = optimize(mixed, 60)
    check(made.schedule)
    assert made.after <= made.before


def _start(row):
    costs = Costs.of(*map(str, row["cost"]), str(row["hop"]))
    return generate("v-cap", row["p"], row["m"], costs=costs, memory_cap=row["cap_sets"])


@pytest.mark.parametrize(
    "size", [(3, 3, 5, [1, 0.98, 0.74], 0), (3, 4, 4, [1, 0.98, 0.74], 0.05)], ids=str
)
def test_small_cases_are_solved(solver, size):
    keys = "p", "m", "cap_sets", "cost", "hop"
    row = next(row for row in EXACT if tuple(row[key] for key in keys) == size)
    made = optimize(_start(row), 60, row["cap_sets"])
    assert made.gap == 0
    assert made.after == Fraction(str(row["makespan"]))


@pytest.mark.matrix
def test_the_exact_bounds_hold_for_the_named_schedules():
    problems = {}
    for row in EXACT:
        assert row["bound"] <= row["makespan"]
        assert (row["bound"] == row["makespan"]) is row["proven"]
        costs = Costs.of(*map(str, row["cost"]), str(row["hop"]))
        problems.setdefault((row["p"], row["m"], costs), {})[row["cap_sets"]] = row["bound"]
    for (pp, m, costs), bounds in problems.items():
        for name in ("v-min", "v-half", "v-zb"):
            made = generate(name, pp, m, costs=costs)
            cap = max(min(bounds), *peak_sets(made.ranks))
            assert bounds[cap] <= float(simulate(made).makespan), (name, pp, m, costs)


def test_the_command(solver, capsys, tmp_path):
    path = tmp_path / "x.json"
    argv = "schedule --schedule v-cap --memory-cap 0.75 --pp 3 --microbatches 3 --optimize 20"
    argv += f" --cost 1,0.98,0.74 --output {path}"
    assert cli.main([*argv.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    made = data["optimized"]
    assert made["lower_bound"] == made["after"] == data["makespan"] <= made["before"]
    assert (made["above_bound"], made["cap_sets"], made["objective"]) == (0, 4, "makespan")
    assert float(simulate(load(path)).makespan) == made["after"]
    assert cli.main(["check", str(path)]) == 0
    capsys.readouterr()
    # A file can be optimized too, within its own peak.
    again = f"schedule --schedule {path} --optimize 20 --output {tmp_path / 'y.json'}"
    assert cli.main(again.split()) == 0
    assert "no order of this placement and memory is faster" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "chunks"), [("po", "full"), ("v-half", "auto")])
def test_orders_with_offload(solver, by_work, name, chunks):
    """Faster in the same memory on the device, each with copies of its own."""
    away = OffloadSpec(chunks, Link.of(3, "0.2"))
    costs = Costs.of(1, "1.3", "0.7")
    start = select(ScheduleSpec(name, 3, 5, costs=costs, offload=away)).schedule
    made = optimize(start, 60, away=away)
    run = simulate(made.schedule)
    assert made.bound <= made.after == run.makespan < made.before == simulate(start).makespan
    assert max(run.peak_sets) <= made.cap == max(peak_sets(start.ranks))
    assert made.schedule.has_offload and made.complete
    check(made.schedule)
    check(lower(made.schedule))
    with pytest.raises(ValueError, match="offloads activation sets; give --offload"):
        optimize(start, 1)


def test_the_command_with_offload(solver, by_work, capsys, tmp_path):
    path = tmp_path / "x.json"
    argv = "schedule --schedule po --pp 3 --microbatches 5 --cost 1,1.3,.7 --offload full"
    argv += f" --offload-time 0.2 --lowered --optimize 60 --output {path}"
    assert cli.main([*argv.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    made = data["optimized"]
    assert made["after"] == data["makespan"] < made["before"] and data["offloaded_sets"] > 0
    assert cli.main(["check", str(path)]) == 0
