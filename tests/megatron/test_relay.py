"""Losses reach the last pipeline rank, however late it is and however soon the other is done."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.checkouts import run_cases


def test_nothing_is_lost_when_the_sender_is_done_first(tmp_path: Path) -> None:
    """The sender waits for the last rank, at once or, having gone ahead, before it leaves."""
    run_cases("megatron.cases.relay_cases", str(tmp_path))
    sender, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for way in ("waiting", "ahead"):
        assert last[way]["losses"] == [0, 1, 2, 3, 4] and last[way]["tokens"] == 7
        assert sender[way]["finished behind"]
    assert sender["waiting"]["had to wait"]
    assert not sender["ahead"]["had to wait"]
