"""The waits that were not planned are named: where, before what, for what, and how long."""

from __future__ import annotations

import json

import pytest

from megatron_ext.cli import main
from megatron_ext.schedule import Action, Costs, Op, generate, lower, simulate
from megatron_ext.schedule.generators.vocabulary import add_vocabulary
from megatron_ext.schedule.io import save
from megatron_ext.view import deviations, recorded, timeline

SCHEDULE = generate("1f1b", 3, 4)


def run_with(late):
    """A measured run in which every pass starts ``late[action]`` ms later than it could, 1 unit is
    1 ms, and what depends on it waits."""
    end, rows = {}, [[] for _ in SCHEDULE.ranks]
    todo = [list(row) for row in SCHEDULE.ranks]
    clock = [0.0] * SCHEDULE.pp
    while any(todo):
        for rank, row in enumerate(todo):
            while row:
                op, stage, microbatch = row[0]
                needs = Action(Op.F, stage - 1, microbatch) if op is Op.F else None
                if op is Op.BW and stage < 2:
                    needs = Action(Op.BW, stage + 1, microbatch)
                if needs is not None and needs.stage >= 0 and needs not in end:
                    break
                start = max(clock[rank], end.get(needs, 0.0)) + late.get(str(row[0]), 0.0)
                clock[rank] = end[row[0]] = start + (1 if op is Op.F else 2)
                rows[rank].append(
                    {"action": str(row[0]), "start_us": 1e3 * start, "end_us": 1e3 * clock[rank]}
                )
                row.pop(0)
    return rows


def found(late):
    planned = timeline.planned(simulate(SCHEDULE))
    return deviations.largest(planned, timeline.measured(SCHEDULE, run_with(late)))


def test_as_planned():
    assert found({}) == []


def test_a_late_message():
    """BW1.0's input is there 5 ms before it starts; rank 0 waits for it in turn."""
    first, *others = found({"BW1.0": 5.0})
    assert (first.rank, str(first.action), first.longer) == (1, "BW1.0", 5.0)
    assert (str(first.producer), first.of, first.ended) == ("BW2.0", 2, 5.0)
    assert first.text("ms") == (
        "rank 1: BW1.0 waits 5 ms longer than planned; BW2.0 of rank 2 had ended 5 ms before, so "
        "the message or the rank came late"
    )
    then = next(one for one in others if one.rank == 0)
    assert (str(then.action), str(then.producer), then.of) == ("BW0.0", "BW1.0", 1)
    assert then.text("ms") == (
        "rank 0: BW0.0 waits 5 ms longer than planned, for BW1.0 of rank 1, which ended 0 ms before"
    )


@pytest.mark.parametrize(("late", "producer"), [("S0.1", "F2.1"), ("T1.1", "BW2.1"), ("F0.3", "E")])
def test_a_vocabulary_pass_waits_for_what_its_collective_carries(late, producer):
    """Every pass that was planned for the start of ``late`` or behind it is 5 ms later."""
    costs = Costs.of(vocabulary=["0.25", "0.25", "0.1", "0.1", "0"])
    schedule = add_vocabulary(generate("1f1b", 3, 4, costs=costs))
    planned = timeline.planned(simulate(schedule))
    from_ = next(box.start for row in planned.boxes for box in row if str(box.action) == late)
    events = [
        [
            {
                "action": str(action),
                "start_us": 1e3 * (start + 5.0 * (start >= from_)),
                "end_us": 1e3 * (end + 5.0 * (start >= from_)),
            }
            for action, start, end in row
        ]
        for row in planned.boxes
    ]
    measured = timeline.measured(schedule, events)
    waits = {str(one.action): one for one in deviations.largest(planned, measured, 99)}
    assert str(waits[late].producer).startswith(producer)


def test_three_at_most_longest_first():
    late = {"F0.1": 1.0, "F0.2": 4.0, "F0.3": 2.0, "BW0.3": 3.0}
    three = found(late)
    assert len(three) == 3
    assert [one.longer for one in three] == sorted((one.longer for one in three), reverse=True)
    assert (str(three[0].action), three[0].producer) == ("F0.2", None)
    assert three[0].text("ms").endswith("for no other pass: its rank or its data came late")


@pytest.fixture
def folder(tmp_path):
    """What ``--pp-trace`` leaves of that run."""
    lowered = lower(SCHEDULE)
    save(SCHEDULE, tmp_path / recorded.plan_file(lowered.fingerprint()))
    for rank, events in enumerate(run_with({"BW1.0": 5.0})):
        line = {
            "schedule": "1f1b",
            "plan": lowered.fingerprint(),
            "pipeline_rank": rank,
            "iteration": 1,
            "microbatches": 4,
            "forward_only": False,
            "machine": "3 ranks on 2 CPU cores",
            "zero_unix_us": 1.7e15,
            "events": events,
        }
        (tmp_path / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def test_show_takes_the_plan_from_the_folder(folder, capsys):
    """Both runs in one picture on one axis, each with its memory curve, and the waits in words."""
    picture = folder / "both.svg"
    assert main(["show", "--measured", str(folder), "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "rank 1: BW1.0 waits 5 ms longer than planned" in said
    assert "planned 18 ms" in said and "measured 23 ms" in said
    text = picture.read_text()
    assert text.count("planned") >= 1 and text.count("measured") >= 1
    assert text.count("measured on 3 ranks on 2 CPU cores") == 1
    trace = folder / "both.json"
    assert main(["show", "--measured", str(folder), "--output", str(trace)]) == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"activation sets, planned", "activation sets, measured"} <= names


def test_show_without_the_plan(folder, capsys):
    next(folder.glob("plan-*.json")).unlink()
    assert main(["show", "--measured", str(folder)]) == 2
    assert "the plan of iteration 1; give the schedule too" in capsys.readouterr().err
    assert main(["show", "--measured", str(folder / "none")]) == 2
    assert "is no folder; train with --pp-trace" in capsys.readouterr().err
