"""Some of the faults that tests/campaigns/faults.py injects; all take minutes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support import ROOT, warm
from tests.support.waiting import PATIENCE

CASES = (
    *(r"kill SEND_F", r"stop RECV_B", r"raise PREPARE", r"memory B\d", r"exit W", r"hang F"),
    *(r"lost SEND_B", r"delayed SEND_F", r"bad copy RELOAD", r"stuck copy RELOAD"),
    r"kill BW",
)


def test_every_rank_ends_and_reports(tmp_path: Path) -> None:
    result = tmp_path / "faults.json"
    done = subprocess.run(
        [warm.python(""), "-m", "tests.campaigns.faults", "--json", str(result), "--jobs", "5",
         "--only", f"^({'|'.join(CASES)})"],
        capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads(result.read_text())["cases"]
    # A message that is late comes in time, and too late; two are injected into slices as well.
    assert len(entries) == len(CASES) + 1 + 2
    assert {entry["kind"] for entry in entries} == {case.rsplit(" ", 1)[0] for case in CASES}


def test_what_goes_wrong_is_seen(tmp_path: Path) -> None:
    """The judge itself: a rank that ends well, says nothing, or blames nobody is a fault."""
    from tests.campaigns import faults

    class World(faults.World):
        def __init__(self, statuses: list[int], logs: list[str]) -> None:
            self.case = faults.Case("kill", "v-half", 3, 1, "F1.0")
            self.folder, self.late = tmp_path, []
            self.statuses = dict(enumerate(statuses))
            for rank, text in enumerate(logs):
                (tmp_path / f"rank{rank}.log").write_text(text)
            (tmp_path / "when").write_text("1.0")

        def orphans(self) -> bool:
            return False

    def report(rank: int, peer: int, action: str = "in B0.0 (action 1 of 9), ") -> str:
        return (
            f"[megatron_ext] pipeline rank {rank} (global rank {rank}) failed: x\n"
            f"  it was {action}waiting for a message from pipeline rank {peer}\n"
        )

    good = [report(0, 1), "", report(2, 1)]
    assert faults.judge(World([1, -9, 75], good), {}) == []
    for statuses, logs, words in (
        ([0, -9, 1], good, "the other ranks ended with"),
        ([1, 1, 1], good, "rank 1 ended with 1, not -9"),
        ([1, -9, 1], [good[0], "", ""], "rank 2 has 0 reports"),
        ([1, -9, 1], [report(0, 2), "", report(2, 0)], "nobody names rank 1"),
        ([1, -9, 1], [report(0, 1, ""), "", good[2]], "rank 0 names no action"),
    ):
        (wrong,) = faults.judge(World(statuses, logs), {})
        assert words in wrong
