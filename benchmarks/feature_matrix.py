#!/usr/bin/env python3
"""Every schedule with every feature of stock Megatron, trained against stock on CPU ranks.

    python -m benchmarks.feature_matrix path/to/Megatron-LM [--features REGEX] [--schedules A,B]
        [--json FILE] [--keep DIR]
    python -m benchmarks.feature_matrix --page-of RESULTS.json ...

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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import page as pages
from megatron_ext.prove.server import ScriptServer
from tests.support.architectures import ARCHITECTURES
from tests.support.feature_runs import DEFECTS, SCHEDULES, Cell, run_feature
from tests.support.features import FEATURES

HEAD = """# Feature matrix: every schedule with stock's features

Each cell trained the checkout's unmodified `pretrain_gpt.py` on CPU ranks (gloo) for five steps,
once with stock 1F1B and once with the schedule, from one checkpoint, and compared the exact losses
of every iteration and everything that Megatron logs, times aside.

- **equal**: every loss is bit for bit stock's, and what the log prints agrees (norms, which are
  sums over ranks, to 2 in 1,000: they are printed with three digits).
- **~x**: losses agree to a relative x, within what the row allows, for the reason given.
- **rejected**: refused before training with the sentence below.
- **no stock**: stock itself cannot do this here, for the reason below; nothing is claimed.
- **DIFFERENT**, **FAILED**, **HUNG**: defects.

Rows of `tests/support/features.py` and schedules that a table lacks have not been run on that
version.

Transformer Engine, Apex and NCCL need a GPU and are not in here. Context and sequence parallelism,
packed sequences and the head sizes of multi-latent attention ran on this project's CPU stand-ins
for what stock has only in Transformer Engine's layers. Muon ran with the package
emerging-optimizers.

Two rows are compared with stock's interleaved schedule, as it alone has their meaning: "decoder
sequence length" and "beside stock's interleaving". "packed sequences, PP 4" is compared with one
process, since stock's script finds no data on the stages between the first and the last.

Run it again: `python -m benchmarks.feature_matrix path/to/Megatron-LM --json FILE`, then
`python -m benchmarks.feature_matrix --page-of FILE ...`.
"""


def page(results: Iterable[dict[str, Any]]) -> str:
    """One section a results file."""
    parts: list[Any] = [HEAD.strip()]
    for result in results:
        marks = ("~x" if cell["result"][0] == "~" else cell["result"] for cell in result["cells"])
        counts = ", ".join(f"{n} {word}" for word, n in Counter(marks).most_common())
        parts.append(f"## {result['megatron']}")
        parts.append(
            f"{result['date']}, Python {result['python']}, torch {result['torch']}: {counts}."
        )
        parts += _matrix(result)
    return pages.text_of(*parts)


def _matrix(result: dict[str, Any]) -> tuple[list[str], list[str]]:
    """One version's matrix, and the notes behind its marks."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in result["cells"]:
        rows.setdefault(cell["feature"], {})[cell["schedule"]] = cell
    notes: dict[str, int] = {}

    def word(cell: dict[str, str]) -> str:
        number = notes.setdefault(cell["detail"], len(notes) + 1) if cell["detail"] else None
        return cell["result"] + (f" [{number}]" if number else "")

    missing, names = {"result": "not run", "detail": ""}, result["schedules"]
    cells = [
        (feature, *(word(row.get(name, missing)) for name in names))
        for feature, row in rows.items()
    ]
    listed = [f"{number}. {note}" for note, number in notes.items()]
    return pages.grid(("feature", *names), cells), listed


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
    path.write_text(pages.lines(result))


def main() -> int:
    """Run the matrix that the command line asks for; exit status 1 if a cell is a defect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="a Megatron-LM checkout")
    parser.add_argument("--page-of", type=Path, nargs="+", metavar="FILE", help="runs nothing")
    parser.add_argument("--output", type=Path, default=pages.HERE, metavar="DIR", help="the page's")
    parser.add_argument(
        "--features", default="", help="only features whose name holds one of these (a|b)"
    )
    parser.add_argument("--schedules", default=SCHEDULES)
    parser.add_argument("--json", type=Path, help="write all cells there, and go on from there")
    parser.add_argument("--keep", type=Path, help="keep logs and checkpoints in this folder")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs Megatron")
    options = parser.parse_args()
    if options.page_of:
        text = page(json.loads(path.read_text()) for path in options.page_of)
        (options.output / "feature-matrix.md").write_text(text)
        return 0
    if options.checkout is None:
        parser.error("give a checkout of Megatron-LM, or --page-of FILE ...")
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
