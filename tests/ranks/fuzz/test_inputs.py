"""As tests/unit/fuzz/test_inputs.py, for the readers that import torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fuzz_checks import (
    check_flag_values,
    check_mutations,
    code_that_leaves,
)
from tests.support.fuzz_inputs import feed, torch_targets

TARGETS = torch_targets()


def test_flag_values() -> None:
    check_flag_values(TARGETS["request"], "")


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    check_mutations(TARGETS[name])


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for code in code_that_leaves(mark):
        for target in TARGETS.values():
            assert not feed(target, code.encode())
    assert not mark.exists()
