"""sweep_schedules: CPU ranks train under several schedules, and the table at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, existing
from tests.support.waiting import PATIENCE

from .agent import ranks_for


@pytest.mark.version(MAIN_TAG)
def test_one_command_ends_in_a_table(tmp_path: Path) -> None:
    with ranks_for(tmp_path) as agent:
        environment = {
            "DEVICE": "cpu",
            "PYTHON": str(agent),
            "MEGATRON_LM": str(existing(MAIN_TAG)),
            "SWEEP_DIR": str(tmp_path / "sweep"),
            "STEPS": "4",
            "GPUS_PER_NODE": "2",  # four by default, which takes twice as long
            "CHUNKS": "1 2 3",
            "SCHEDULES": "v-half v-triple",
        }
        done = subprocess.run(
            [str(ROOT / "scripts" / "sweep_schedules.sh")],
            env={**os.environ, **environment},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert "left out: v=3, since 4 layers are no multiple of 2*3" in done.stderr
    assert "v-triple failed" in done.stderr
    result = json.loads((tmp_path / "sweep" / "table.json").read_text())
    rows = {row["schedule"]: row for row in result["rows"]}
    assert list(rows) == ["stock-1f1b", "stock-interleaved-v2", "v-half", "v-triple"]
    assert not rows.pop("v-triple")["complete"]
    assert done.returncode == 1  # because of that one
    for name, row in rows.items():
        assert row["complete"] and row["loss_difference"] == 0, name
        assert re.search(rf"^{name} .* equal$", done.stdout, re.M), done.stdout
    # Counted by the runtime: floor((p + 2)/2) microbatches.
    assert rows["v-half"]["peak_microbatches"] == 2
    assert result["best_stock"] in ("stock-1f1b", "stock-interleaved-v2")


LINE = " [2026] iteration {step:8d}/ 4 | elapsed time per iteration (ms): {time} |"


def _write_run(
    folder: Path, name: str, times: list[float], losses: list[float], memory: float = 0.0
) -> None:
    log = [LINE.format(step=i + 1, time=t) for i, t in enumerate(times)]
    log.insert(
        1, f"[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {memory}"
    )
    (folder / f"{name}.log").write_text("\n".join(log))
    lines = [
        {"iteration": i + 1, "losses": {"lm loss": x.hex()}, "grad_norm": None}
        for i, x in enumerate(losses)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    with (folder / "runs.txt").open("a") as file:
        file.write(f"{name}\n")


def _report(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.sweep_report", str(folder)]
    command += ["--pp", "4", "--microbatches", "8", "--steps", "4", "--device", "cuda"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)


def test_table_of_known_times(tmp_path: Path) -> None:
    """Medians without the first quarter, against the faster stock run; unequal losses count."""
    _write_run(tmp_path, "stock-1f1b", [900, 30, 20, 40], [4.0, 3.0, 2.0, 1.0], 4096)
    _write_run(tmp_path, "stock-interleaved-v2", [900, 24, 24, 24], [4.0, 3.0, 2.0, 1.0])
    _write_run(tmp_path, "v-half", [900, 20, 20, 90], [4.0, 3.0, 2.0, 1.0])
    done = _report(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 6}
    assert rows["stock-1f1b"][:5] == ["30.0", "20..40", "0.800", "4", "4.00"]
    assert rows["stock-interleaved-v2"][:3] == ["24.0", "24..24", "1.000"]
    assert rows["v-half"][:5] == ["20.0", "20..90", "1.200", "3", "-"]
    assert "against stock's best, stock-interleaved-v2" in done.stdout

    _write_run(tmp_path, "zb-h1", [9, 9, 9, 9], [4.0, 3.0, 2.0, 1.5])
    done = _report(tmp_path)
    assert done.returncode == 1
    assert re.search(r"^zb-h1 .* differ by 5.0e-01$", done.stdout, re.M)


def test_a_run_that_ended_early_is_no_row_of_numbers(tmp_path: Path) -> None:
    _write_run(tmp_path, "stock-1f1b", [30] * 4, [4.0, 3.0, 2.0, 1.0])
    _write_run(tmp_path, "v-half", [30] * 3, [4.0, 3.0, 2.0])
    done = _report(tmp_path)
    assert done.returncode == 1
    assert re.search(r"^v-half +failed ", done.stdout, re.M)


def test_without_stock_there_is_nothing_to_compare(tmp_path: Path) -> None:
    _write_run(tmp_path, "v-half", [30] * 4, [4.0, 3.0, 2.0, 1.0])
    done = _report(tmp_path)
    assert done.returncode == 1 and "no stock run was completed" in done.stderr
