#!/usr/bin/env python3
"""Every schedule with every feature of stock Megatron, trained against stock on CPU ranks.

    python benchmarks/feature_matrix.py path/to/Megatron-LM [--features REGEX] [--schedules A,B]
        [--json FILE] [--keep DIR]
    python benchmarks/feature_matrix_page.py RESULTS.json ... > benchmarks/feature-matrix.md

Each cell trains the checkout's ``pretrain_gpt.py`` for five steps from one checkpoint, with stock
1F1B and with the schedule, and compares every iteration's exact losses and all that Megatron logs
(times aside). A cell is one of

    equal       every loss bit for bit stock's; what the log prints is equal, or, where it is a sum
                over ranks (norms), within 1e-4
    ~ x         within the tolerance that the feature states, x the largest relative difference
    rejected    megatron_ext refused the run before training; the sentence is listed below
    no stock    stock itself cannot run this here; the reason is listed below
    DIFFERENT, FAILED, HUNG     defects

and the exit status is 1 if there is a defect.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from features import BASE, FEATURES, Feature
from script_server import Outcome, ScriptServer

SCHEDULES = "1f1b,interleaved,zb-h1,zb-h2,interleaved-zb,v-min,v-half,v-zb,v-cap,gis,gis-h,po,auto"
_LOOPED = ("interleaved", "interleaved-zb", "gis", "gis-h", "po")
_DEFECTS = ("DIFFERENT", "FAILED", "HUNG")
# Megatron prints norms with three or more digits; they are sums over ranks.
_PRINTED = 2e-3


@dataclass(frozen=True)
class Cell:
    """What one run gave."""

    feature: str
    schedule: str
    result: str
    detail: str = ""
    seconds: float = 0.0


# Activations of these small models may be offloaded, however small they are.
os.environ.setdefault("MEGATRON_EXT_OFFLOAD_MIN_BYTES", "1")


def schedule_flags(name: str, pp: int) -> list[str]:
    """Flags of ours that run the schedule ``name`` on ``pp`` ranks; ``stock`` has none."""
    if name == "stock":
        return []
    flags = ["--pp-schedule", name]
    if name in ("v-cap", "auto"):
        # Two ranks leave no choice between V-Min's memory and 1F1B's.
        flags += ["--pp-memory-cap", "0.9" if pp > 2 else "1"]
    if name == "gis":
        flags += ["--pp-group-size", str(pp // 2 + 1)]
    if name in _LOOPED:
        flags += ["--num-virtual-stages-per-pipeline-rank", "2"]
    return flags


def command(feature: Feature, name: str, checkpoint: Path | None) -> list[str]:
    """Arguments of ``pretrain_gpt.py`` for one run."""
    words, dropped = [], feature.drop.split()
    skip = False
    for word in BASE.split():
        if word.startswith("--"):
            skip = word in dropped
        if not skip:
            words.append(word)
    words += feature.model.split()
    if checkpoint is None:
        return words
    words += feature.run.split()
    words += ["--pipeline-model-parallel-size", str(feature.pp)]
    words += ["--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]
    ours = schedule_flags(name, feature.pp)
    more = feature.ours.split() if ours else []
    if "LAYOUT" in words and "--num-virtual-stages-per-pipeline-rank" in ours:
        ours = ours[:-2]  # the layout says how many
    words += ours + more
    board = str(checkpoint.parent / "board")
    words = [board if word == "TENSORBOARD" else word for word in words]
    return [_layout(name, feature.pp) if word == "LAYOUT" else word for word in words]


def _layout(name: str, pp: int) -> str:
    """Eight layers over the stages, unevenly."""
    looped = name in _LOOPED or name.startswith("v-")
    counts = [0, 1, 1, 1, 2, 1, 1, 1] if looped else [1, 3, 2, 2]
    assert len(counts) == pp * (2 if looped else 1), "written for four ranks"
    stages = ["t" * n for n in counts]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


_NOT_STOCKS = ("time", "throughput", "pipeline bubble", "peak activation sets")


def logged(outcome: Outcome, world: int) -> list[dict[str, str]]:
    """What Megatron logged, by iteration: every ``name: value`` that is no time and not ours."""
    text = outcome.log(world - 1)
    found = []
    for line in text.splitlines():
        if re.search(r"iteration +\d+/", line) or "validation loss" in line:
            pairs = re.findall(r"\| ([^|:]+?)(?: value)?: +(\S+)", line)
            found.append({k: v for k, v in pairs if not any(word in k for word in _NOT_STOCKS)})
    return found


def compare(feature: Feature, stock: Outcome, ours: Outcome) -> tuple[str, str]:
    """(result, detail) of a run that ended well."""
    worst = 0.0
    mine, theirs = ours.losses(), stock.losses()
    if len(mine) != len(theirs):
        return "DIFFERENT", f"{len(mine)} iterations logged, stock {len(theirs)}"
    for a, b in zip(mine, theirs, strict=True):
        if a["losses"].keys() != b["losses"].keys():
            return "DIFFERENT", f"losses named {list(a['losses'])}, stock {list(b['losses'])}"
        for name, value in a["losses"].items():
            worst = max(worst, _relative(float.fromhex(value), float.fromhex(b["losses"][name])))
    if worst > feature.tolerance:
        return "DIFFERENT", f"losses differ by {worst:.2e}"
    lines, wanted = logged(ours, feature.world), logged(stock, feature.world)
    if len(lines) != len(wanted) or not wanted:
        return "DIFFERENT", f"{len(lines)} lines logged, stock {len(wanted)}"
    for a, b in zip(lines, wanted, strict=True):
        for name in a.keys() | b.keys():
            if (
                name not in a
                or name not in b
                or not _same(a[name], b[name], max(_PRINTED, feature.tolerance))
            ):
                return "DIFFERENT", f"log: {name} {a.get(name)}, stock {b.get(name)}"
    return ("equal", "") if worst == 0.0 else (f"~{worst:.0e}", feature.why)


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _same(a: str, b: str, within: float) -> bool:
    try:
        return _relative(float(a), float(b)) <= within
    except ValueError:
        return a == b


def reason(outcome: Outcome, world: int) -> str:
    """Why a run failed: our sentence, or the last error of the first rank that has one."""
    for rank in range(world):
        ours = re.findall(r"^megatron_ext: (?!--device)(.*)", outcome.log(rank), re.M)
        if ours and "--pp-schedule" in ours[-1]:
            return "rejected: " + ours[-1]
    errors = [
        f"rank {rank}: {error}"
        for rank in range(world)
        for error in re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception).*)", outcome.log(rank), re.M)
    ]
    # A rank whose neighbour died says only that.
    own = [error for error in errors if "Connection " not in error]
    if errors:
        return (own or errors)[0]
    return f"rank 0: {outcome.log(0).strip().splitlines()[-1:]}"


def run_cell(
    server: ScriptServer, feature: Feature, name: str, stock: Outcome, folder: Path, start: Path
) -> Cell:
    """Train one schedule with one feature and compare it."""
    outcome = server.run(command(feature, name, start), feature.world, folder)
    if feature.repeat and outcome.status == "ok":
        stock, again = outcome, folder.with_name(f"{name}-again")
        outcome = server.run(command(feature, name, start), feature.world, again)
    if outcome.status == "hung":
        return Cell(feature.name, name, "HUNG", str(folder), outcome.seconds)
    why = reason(outcome, feature.world) if outcome.status == "failed" else ""
    if why.startswith("rejected: "):
        return Cell(feature.name, name, "rejected", why[10:], outcome.seconds)
    if outcome.status == "failed" or stock.status != "ok":
        if stock.status != "ok":
            return Cell(feature.name, name, "no stock", reason(stock, feature.world))
        return Cell(feature.name, name, "FAILED", why, outcome.seconds)
    return Cell(feature.name, name, *compare(feature, stock, outcome), outcome.seconds)


def run_feature(
    server: ScriptServer, feature: Feature, schedules: Sequence[str], folder: Path
) -> list[Cell]:
    """One row: a checkpoint by stock on one rank, a stock run, and every schedule."""
    start = folder / "weights"
    made = server.run(
        [
            *command(feature, "stock", None),
            *f"--train-iters 1 --save {start} --save-interval 1".split(),
        ],
        1,
        folder / "start",
    )
    if made.status != "ok":
        why = "no checkpoint: " + reason(made, 1)
        print(f"{feature.name:36} {why[:200]}", flush=True)
        return [Cell(feature.name, name, "no stock", why) for name in schedules]
    stock = server.run(command(feature, "stock", start), feature.world, folder / "stock")
    cells = []
    for name in schedules:
        cells.append(run_cell(server, feature, name, stock, folder / name, start))
        cell = cells[-1]
        print(f"{feature.name:36} {name:15} {cell.result:10} {cell.detail[:200]}", flush=True)
    return cells


def version_of(checkout: Path) -> tuple[int, int]:
    """(major, minor) of a Megatron-LM checkout."""
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    numbers = [re.search(rf"^{name} *= *(\d+)", text, re.M) for name in ("MAJOR", "MINOR")]
    return tuple(int(n[1]) if n else 0 for n in numbers)  # type: ignore[return-value]


def _done(path: Path | None) -> list[Cell]:
    """Cells of an earlier run that ended before its time."""
    if path is None or not path.is_file():
        return []
    return [Cell(**cell) for cell in json.loads(path.read_text())["cells"]]


def _write(path: Path, megatron: str, schedules: Sequence[str], cells: Sequence[Cell]) -> None:
    result = {
        "megatron": megatron,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "schedules": schedules,
        "cells": [asdict(cell) for cell in cells],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    """Run the matrix that the command line asks for; exit status 1 if a cell is a defect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout")
    parser.add_argument(
        "--features", default="", help="only features whose name holds one of these (a|b)"
    )
    parser.add_argument("--schedules", default=SCHEDULES)
    parser.add_argument("--json", type=Path, help="write all cells there, and go on from there")
    parser.add_argument("--keep", type=Path, help="keep logs and checkpoints in this folder")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs Megatron")
    options = parser.parse_args()
    schedules = options.schedules.split(",")
    version = version_of(options.checkout)
    chosen = [
        f
        for f in FEATURES
        if f.first <= version and re.search(options.features, f.name, re.IGNORECASE)
    ]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="feature-matrix-"))
    cells = _done(options.json)
    try:
        with ScriptServer(options.checkout / "pretrain_gpt.py", options.python) as server:
            for number, feature in enumerate(chosen):
                have = {cell.schedule for cell in cells if cell.feature == feature.name}
                left = [name for name in schedules if name not in have]
                if left:
                    cells += run_feature(server, feature, left, folder / str(number))
                    if options.json:
                        _write(options.json, options.checkout.name, schedules, cells)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(cell.result in _DEFECTS for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
