"""Costs of MoE layers as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.moe.cost_file import FORMAT, LINES, dump, load, parse

GOOD: dict[str, Any] = {
    "format": FORMAT,
    **{name: [0.01 * i, 1e-6 * i, 0.5] for i, name in enumerate(LINES)},
    "kept_bytes": 768,
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.write_text(json.dumps(GOOD))
    found = load(str(target))
    assert found.kept_bytes == 768
    assert found.costs.fc1(1e6) == pytest.approx(0.01 + 1e-6 * 1e6)
    assert found.costs.fc1(0) == 0.5 and found.costs.fc2(1e9) == 0
    assert found.costs.dispatch == found.costs.combine
    assert json.loads(dump(found)) == GOOD
    assert parse(dump(found)) == found


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": "megatron-ext-moe-costs/2"}, "format"),
        ({"message": [1, 2]}, "'message' must be a list of three numbers"),
        ({"experts": [1, -2, 3]}, "'experts' must be"),
        ({"experts": [1, float("inf"), 3]}, "Infinity is no number of JSON"),
        ({"experts": [1, 1e300, 3]}, "'experts' must be"),
        ({"to_host": [True, 0, 0]}, "'to_host' must be"),
        ({"to_device": None}, "'to_device' must be"),
        ({"kept_bytes": "many"}, "'kept_bytes' must be a number"),
        ({"kept_bytes": float("nan")}, "NaN is no number of JSON"),
        ({"combine": [1, 2, 3]}, "'combine' is not known"),
    ],
)
def test_wrong_files_are_named(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(ValueError, match=says) as error:
        load(str(target))
    assert str(target) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"x"'])
def test_other_content(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_a_missing_file() -> None:
    with pytest.raises(ValueError, match="cannot read MoE costs nowhere.json"):
        load("nowhere.json")
