#!/usr/bin/env python3
"""Every schedule with every feature of stock Megatron, trained against stock on CPU ranks.

    python -m benchmarks.feature_matrix path/to/Megatron-LM [--features REGEX] [--schedules A,B]
        [--json FILE] [--keep DIR]
    python -m benchmarks.feature_matrix_page RESULTS.json ... > benchmarks/feature-matrix.md

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
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_ext.prove.server import ScriptServer
from tests.support.architectures import ARCHITECTURES
from tests.support.feature_runs import DEFECTS, SCHEDULES, Cell, run_feature
from tests.support.features import FEATURES


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
        for f in FEATURES + ARCHITECTURES
        if f.first <= version and re.search(options.features, f.name, re.IGNORECASE)
    ]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="feature-matrix-"))
    cells = _done(options.json)
    try:
        with ScriptServer(
            options.checkout / "pretrain_gpt.py", options.python, modules=["tests.support"]
        ) as server:
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
    return 1 if any(cell.result in DEFECTS for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
