"""What auto found, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.moe.cost_file import FORMAT, Costs, load, parse
from megatron_ext.moe.plan import STOCK, LayerPlan

GOOD: dict[str, Any] = {
    "format": FORMAT,
    "layers": "MoE layers of hidden size 8",
    "times": [[4607, 1, "none", 2, 0.5], [4607, 4, "s1", 3, 0.25], [9215, 1, "none", 2, 0.5]],
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.write_text(json.dumps(GOOD))
    found = load(str(target))
    assert found.times[4607] == {STOCK: 0.5, LayerPlan.of(4, "s1", 3): 0.25}
    assert json.loads(found.dump()) == GOOD
    assert parse(found.dump()) == found


def test_trials_without_a_time_are_left_out() -> None:
    costs = Costs("x", times={1: {STOCK: float("inf"), LayerPlan(2): 1.0}})
    assert parse(costs.dump()).times == {1: {LayerPlan(2): 1.0}}


def test_trials_of_former_releases_count() -> None:
    """With what these measured beside them."""
    more = {"kept_bytes": 768.0, "to_host": 1e-6, "to_device": None, "experts": [[4607, 0.125]]}
    assert parse(json.dumps({**GOOD, **more})) == parse(json.dumps(GOOD))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "megatron-ext-moe-costs/3"}, "format"),
        ({"layers": None}, "'layers' must be a text"),
        ({"times": {}}, "'times' a list"),
        ({"times": [[1, 2]]}, "a time is "),
        ({"times": [[1, 2, "s9", 2, 1.0]]}, "s9"),
        ({"times": [[1, 0, "s1", 2, 1.0]]}, "chunks must be"),
        ({"times": [[1, 2, "s1", 2, 0]]}, "a time must be a number > 0"),
        ({"times": [[1, 2, "s1", 2, "long"]]}, "a time must be a number"),
        ({"times": [[1, 2, "s1", 2, float("nan")]]}, "NaN is no number of JSON"),
        ({"combine": [1, 2, 3]}, "'combine' is not known"),
    ],
)
def test_wrong_files_are_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(ValueError, match=message) as error:
        load(str(target))
    assert str(target) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"x"'])
def test_other_content(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_a_missing_file() -> None:
    with pytest.raises(ValueError, match=r"cannot read MoE costs nowhere.json"):
        load("nowhere.json")
