"""The comparison of flags, plan and packages over ranks: its sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.consistency import _require_equal
from megatron_ext.integration.utils import file_contents


def test_the_sentence() -> None:
    same = {"--pp-cost": "1,1,1", "torch": "2.9"}
    _require_equal(dict.fromkeys(range(4), same))
    with pytest.raises(ConfigError) as error:
        _require_equal({**dict.fromkeys(range(4), same), 2: {**same, "--pp-cost": "1,2,1"}})
    said = "rank 2 runs with --pp-cost 1,2,1, but 3 of 4 ranks with 1,1,1; start"
    assert str(error.value).startswith(said)
    with pytest.raises(ConfigError, match="ranks 1, 3 run with torch 2.8, but 3 of 5 ranks with"):
        _require_equal({rank: {**same, "torch": f"2.{9 - rank % 2}"} for rank in range(5)})


def test_files_count_by_their_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("x")
    other.write_text("x")
    assert file_contents(str(one)) == file_contents(str(other))
    assert "No such file" in file_contents(str(tmp_path / "none"))
