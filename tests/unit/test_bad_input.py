"""A file that a user gives us is used, or refused with one sentence, whatever is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.schedule import Costs, ScheduleError, check, generate
from megatron_ext.schedule.costs import with_stage_file
from megatron_ext.schedule.io import load, save

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value inside a JSON document."""
    if not isinstance(value, (dict, list)):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(p for key, inner in items for p in places(inner, (*path, key)))]


def read_schedule(path: Path) -> None:
    check(load(path))


def read_stages(path: Path) -> None:
    with_stage_file(Costs(), str(path))


STAGES = {"stages": [[1, 1, 1], [2, 2, 1]]}


@pytest.mark.parametrize(("name", "read"), [("schedule", read_schedule), ("stages", read_stages)])
@EXAMPLES
@given(data=st.data())
def test_a_changed_document_is_used_or_refused(
    name: str, read: Callable[[Path], None], data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / "input.json"
    if name == "schedule":
        save(generate("zb-h1", 2, 2), path)
        document = json.loads(path.read_text())
    else:
        document = json.loads(json.dumps(STAGES))
    *where, last = data.draw(st.sampled_from([p for p in places(document) if p]))
    inner = document
    for key in where:
        inner = inner[key]
    inner[last] = data.draw(VALUES)
    path.write_text(json.dumps(document))
    try:
        read(path)
    except ValueError as error:
        assert isinstance(error, ScheduleError) or re.search("input.json|stage", str(error))


@pytest.mark.parametrize("read", [read_schedule, read_stages])
@EXAMPLES
@given(content=st.binary(max_size=60))
def test_bytes_that_are_no_document_are_refused(
    read: Callable[[Path], None], content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "input.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="input.json"):
        read(path)
