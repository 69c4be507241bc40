"""Schedule files, and what they are made of: actions, placements, costs."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedule import (
    NAMES,
    Action,
    Costs,
    Op,
    Placement,
    ScheduleError,
    check,
    generate,
    lower,
)
from megatron_ext.schedule.costs import with_stage_file
from megatron_ext.schedule.io import load, save


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    costs = Costs.of(1, "0.98", "0.74", "0.05")
    made = generate(name, 3, 5, costs=costs)
    for schedule in (made, lower(made)):
        save(schedule, path)
        assert load(path) == schedule
        assert load(path).fingerprint() == schedule.fingerprint()
        check(load(path))


def test_file_content(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    save(generate("v-half", 2, 1), path)
    assert json.loads(path.read_text()) == {
        "format": "megatron-ext-schedule/1",
        "name": "v-half",
        "pp": 2,
        "chunks": 2,
        "microbatches": 1,
        "placement": [[0, 3], [1, 2]],
        "cost": {"forward": 1, "backward_input": 1, "backward_weight": 1, "hop": 0},
        "ranks": [
            ["F0.0", "F3.0", "B3.0", "W3.0", "B0.0", "W0.0"],
            ["F1.0", "F2.0", "B2.0", "B1.0", "W2.0", "W1.0"],
        ],
    }


def good() -> dict[str, Any]:
    return generate("1f1b", 2, 2).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other/1"}, 'expected "format": "megatron-ext-schedule/1", found \'other/1\''),
        ({"pp": 3}, "placement is for pp=2, chunks=1 but the file says pp=3, chunks=1"),
        ({"microbatches": 0}, "microbatches must be a whole number from 1 to 1000000000, got 0"),
        ({"microbatches": "x"}, "must be a whole number from 1 to 1000000000, got 'x'"),
        ({"placement": [[0], [2]]}, "placement must hold every stage 0..1 once"),
        ({"placement": [[0, 1], [2]]}, "equally many chunks"),
        ({"ranks": [["F0.0"]]}, "1 action lists for pp=2; give one a rank"),
        ({"ranks": [["X0.0"], []]}, "unknown operation 'X' in 'X0.0'; known: F, B, W, BW"),
        ({"ranks": [["F0"], []]}, "not an action: 'F0'; expected e.g. 'F3.1'"),
        ({"ranks": [[3], []]}, "not an action: 3"),
        ({"cost": {"forward": 0}}, "cost F must be > 0, got 0"),
    ],
)
def test_bad_files(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({**good(), **change}))
    with pytest.raises(ScheduleError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"cannot read schedule file .*No such file"):
        load(tmp_path / "none.json")
    path = tmp_path / "text"
    path.write_text("not json")
    with pytest.raises(ScheduleError, match="is not JSON"):
        load(path)
    path.write_text("[]")
    with pytest.raises(ScheduleError, match="found 'list'"):
        load(path)
    path.write_text(json.dumps({"format": "megatron-ext-schedule/1", "pp": 2}))
    with pytest.raises(ScheduleError, match="lacks chunks, microbatches, placement, ranks"):
        load(path)


def test_fingerprint_is_of_the_plan_only() -> None:
    one = generate("1f1b", 2, 2)
    assert one.fingerprint() == generate("1f1b", 2, 2, costs=Costs.of(2, 2, 2)).fingerprint()
    assert one.fingerprint() != generate("1f1b", 2, 3).fingerprint()
    assert one.fingerprint() != lower(one).fingerprint()


def test_actions() -> None:
    for text in ("F3.1", "BW0.12", "RECV_B7.0", "OFFLOAD3.1"):
        assert str(Action.parse(text)) == text
    assert Action.parse(" F3.1 ") == (Op.F, 3, 1)
    assert {Action.parse("F3.1"): 1}[Action(Op.F, 3, 1)] == 1
    for text in ("", "F", "F3", "F3.-1", "f3.1", "F3.1x"):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(text)


def test_placements() -> None:
    loop, vee = Placement.loop(2, 2), Placement.vee(2)
    assert (loop.stages, vee.stages) == (((0, 2), (1, 3)), ((0, 3), (1, 2)))
    assert [vee.rank_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert [vee.chunk_of(s) for s in range(4)] == [0, 0, 1, 1]
    assert (loop.is_loop(), loop.is_vee(), vee.is_loop(), vee.is_vee()) == (
        True,
        False,
        False,
        True,
    )
    assert (vee.pp, vee.chunks, vee.num_stages) == (2, 2, 4)
    with pytest.raises(ValueError, match="stages of rank 0 must increase"):
        Placement([[3, 0], [1, 2]])


def test_costs_from_text() -> None:
    costs = Costs.parse("1, 0.98,0.74,0.05")
    assert costs == Costs.of(1, 0.98, 0.74, 0.05)
    assert costs.backward_input == Fraction(98, 100)
    assert Costs.parse("1,1,1").hop == 0
    assert Costs.parse("1,1,1,5", hop="0.5").hop == Fraction(1, 2)
    for text, message in (
        ("1,1", "costs must be F,B,W or F,B,W,HOP, got '1,1'"),
        ("1,1,1,1,1", "costs must be F,B,W"),
        ("1,x,1", "cost B must be a finite number, from 1e-100 to 1e100, got 'x'"),
        ("1,1,inf", "cost W must be a finite number"),
        ("0,1,1", "cost F must be > 0, got 0"),
        ("1,1,1,-1", "cost hop must be >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=r"^cost") as error:
            Costs.parse(text)
        assert message in str(error.value)


def test_costs_become_integers() -> None:
    durations = Costs.of(1, "0.5", "0.25", "0.1").durations(Placement.vee(2))
    assert durations.scale == 40
    assert durations.forward == (20,) * 4
    assert durations.backward_weight == (5,) * 4
    assert durations.hop == 4
    assert Costs.of(1, 2, 3).per_rank_work(Placement.vee(2)) == [6, 6]


def test_costs_per_stage(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"stages": [[1, 1, 1], [2, 2, 2.5]]}')
    costs = with_stage_file(Costs.of(hop="0.1"), path)
    assert costs.per_rank_work(Placement.loop(2)) == [3, Fraction(13, 2)]
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    with pytest.raises(ValueError, match="given for 2 stages but pp=2 x chunks=2 has 4"):
        costs.durations(Placement.vee(2))
    with pytest.raises(ValueError, match="stage 0 needs three costs F,B,W"):
        Costs.of(stages=[[1, 1]])
    for text in ("[]", "{}", '{"stages": 3}', "nonsense"):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected JSON"):
            with_stage_file(Costs(), path)


def test_a_missing_costs_file_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stage costs .*none.json: No such file or directory; "):
        with_stage_file(Costs(), tmp_path / "none.json")


def test_costs_per_stage_leave_the_rest(tmp_path: Path) -> None:
    """Times of vocabulary passes and the exchange stay, unless the file has one of its own."""
    path = tmp_path / "costs.json"
    path.write_text('{"stages": [[2, 2, 2]]}')
    before = Costs.of(hop=1, vocabulary=(1, 2, 3, 4)).with_exchange([(1, 2)])
    stages = Costs.of(stages=[(2, 2, 2)]).stages
    assert with_stage_file(before, path) == replace(before, stages=stages)
    path.write_text('{"stages": [[2, 2, 2]], "exchange": [[0, 1]]}')
    assert with_stage_file(before, path).exchange == ((0, 1),)
