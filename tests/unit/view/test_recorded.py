"""Traces of ``--pp-trace`` become a measured timeline; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli import main
from megatron_ext.schedule import Schedule, generate, simulate
from megatron_ext.view import recorded


def write(folder: Path, schedule: Schedule, iterations: int = 2, **changed: Any) -> None:
    """Traces of a run exactly as simulated (1 unit = 1 ms), each rank on a clock of its own."""
    run = simulate(schedule)
    for rank, row in enumerate(run.schedule.ranks):
        zero = 5000.0 * rank
        events = [
            {
                "action": str(action),
                "start_us": 1000 * start / run.scale - zero,
                "end_us": 1000 * end / run.scale - zero,
            }
            for action, start, end in zip(row, run.start[rank], run.end[rank])
        ]
        line = {
            "schedule": schedule.name,
            "pipeline_rank": rank,
            "microbatches": schedule.microbatches,
            "forward_only": False,
            "zero_unix_us": 1.7e15 + zero,
            "events": events,
            **changed,
        }
        evaluation = {**line, "iteration": 1, "forward_only": True, "events": []}
        lines = [{**line, "iteration": n + 1} for n in range(iterations)] + [evaluation]
        text = "".join(json.dumps(x) + "\n" for x in lines)
        # Global ranks 0, 2, ...: another data-parallel replica lies between.
        (folder / f"rank{2 * rank}.jsonl").write_text(text)
        (folder / f"rank{2 * rank + 1}.jsonl").write_text(text)


def test_clocks_are_aligned(tmp_path: Path) -> None:
    schedule = generate("v-half", 4, 6)
    write(tmp_path, schedule)
    run = recorded.load(tmp_path, schedule)
    assert run.makespan == pytest.approx(float(simulate(schedule).makespan), abs=1e-3)
    assert run.peak_activation == [float(x) for x in simulate(schedule).peak_activation]


def test_show_draws_planned_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = generate("v-half", 4, 6)
    write(tmp_path, schedule)
    options = ["show", "--schedule", "v-half", "--pp", "4", "--microbatches", "6"]
    picture = tmp_path / "both.svg"
    assert main([*options, "--measured", str(tmp_path), "--output", str(picture)]) == 0
    assert "measured" in picture.read_text()
    assert main([*options, "--measured", str(tmp_path), "--iteration", "1"]) == 0
    assert "v-half (measured)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "iteration", "error"),
    [
        (generate("v-half", 2, 6), None, "pipeline ranks [0, 1, 2, 3]"),
        (generate("v-half", 4, 7), None, "with 6 microbatches, not v-half with 7"),
        (generate("v-half", 4, 6), 3, "no iteration 3 of all ranks (has 1 to 2)"),
    ],
)
def test_other_runs_are_refused(
    tmp_path: Path, schedule: Schedule, iteration: int | None, error: str
) -> None:
    write(tmp_path, generate("v-half", 4, 6))
    with pytest.raises(ValueError) as found:
        recorded.load(tmp_path, schedule, iteration)
    assert error in str(found.value)


def test_damaged_and_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = generate("1f1b", 2, 2)
    options = ["show", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2"]
    assert main([*options, "--measured", str(tmp_path)]) == 2
    assert "traces of pipeline ranks []" in capsys.readouterr().err
    write(tmp_path, schedule)
    (tmp_path / "rank0.jsonl").write_text("{}\n")
    assert main([*options, "--measured", str(tmp_path)]) == 2
    assert "rank0.jsonl, line 1: no forward_only" in capsys.readouterr().err
