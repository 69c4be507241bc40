"""Megatron's log, exact losses and traces, as scripts and tests read them."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from scripts import demo_report, run_log

LINE = (
    " [2026] iteration {0:8d}/ 12 | consumed samples: 8 | elapsed time per iteration (ms): 3{0}.5 "
    "| learning rate: 1.0E-03 | lm loss: 4.{0}00000E+00 | number of nan iterations: 0 |"
)


def test_steps_of_a_log_that_ranks_share() -> None:
    """Other ranks' lines before, between and inside of a step's line."""
    first, second = LINE.format(1), LINE.format(2)
    head, tail = second[:100], second[100:]
    other = "(after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0"
    found = list(run_log.steps(f"setting up\n{first}\n{other}\n{head}\n{other}\n{tail}\n"))
    assert [(step.iteration, step.of) for step in found] == [(1, 12), (2, 12)]
    assert [step.values["elapsed time per iteration (ms)"] for step in found] == ["31.5", "32.5"]
    assert [float(step.values["lm loss"]) for step in found] == [4.1, 4.2]
    line = " validation loss at iteration 2 | lm loss value: 4.5E+00 | lm loss PPL: 9.0E+01 |"
    assert run_log.values(line) == {"lm loss": "4.5E+00", "lm loss PPL": "9.0E+01"}


def test_exact_losses_and_peaks(tmp_path: Path) -> None:
    assert run_log.lm_losses(tmp_path / "none.jsonl") == {}
    path = tmp_path / "losses.jsonl"
    entries = [{"iteration": i, "losses": {"lm loss": (0.1 * i).hex()}} for i in (1, 2)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert run_log.lm_losses(path) == {1: 0.1, 2: 0.2}
    for rank in range(11):  # by number, not by name
        counts = [(rank, False), (99, True), (rank + 1, False)]
        lines = [json.dumps({"peak_sets": n, "forward_only": only}) for n, only in counts]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines))
    assert run_log.peak_sets(tmp_path) == list(range(1, 12))


def test_progress_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first, every tenth and the last step, and our own lines; all of it goes to the log."""
    text = "[megatron_ext] schedule v-half\n" + "".join(f"{LINE.format(i)}\n" for i in range(1, 13))
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    options: Any = Namespace(name="ours", log=str(tmp_path / "log"))
    assert demo_report.progress(options) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:5] for line in shown[1:]] == [
        ["ours", "step", f"{i}/12", "loss", f"4.{i}000"[:6]] for i in (1, 10, 12)
    ]
    assert shown[0] == ["ours", "schedule", "v-half"]
    assert (tmp_path / "log").read_text() == text
    monkeypatch.setattr("sys.stdin", io.StringIO("Traceback\n"))
    assert demo_report.progress(options) == 1
