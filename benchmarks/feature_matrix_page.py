#!/usr/bin/env python3
"""The feature matrix as a page: python -m benchmarks.feature_matrix_page RESULTS.json ..."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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
`python -m benchmarks.feature_matrix_page FILE ... > benchmarks/feature-matrix.md`.
"""


def table(result: dict[str, Any]) -> str:
    """One version's matrix as Markdown, and below it what stands behind its marks."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in result["cells"]:
        rows.setdefault(cell["feature"], {})[cell["schedule"]] = cell
    names = result["schedules"]
    lines = ["| feature | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    notes: dict[str, int] = {}
    for feature, row in rows.items():
        words = []
        for name in names:
            cell = row.get(name, {"result": "not run", "detail": ""})
            number = notes.setdefault(cell["detail"], len(notes) + 1) if cell["detail"] else None
            words.append(cell["result"] + (f" [{number}]" if number else ""))
        lines.append(f"| {feature} | " + " | ".join(words) + " |")
    lines += [""] + [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the page for the result files on the command line."""
    print(HEAD)
    for path in sys.argv[1:]:
        result = json.loads(Path(path).read_text())
        marks = ("~x" if cell["result"][0] == "~" else cell["result"] for cell in result["cells"])
        counts = Counter(marks)
        said = ", ".join(f"{n} {word}" for word, n in counts.most_common())
        print(f"## {result['megatron']}\n")
        print(f"{result['date']}, Python {result['python']}, torch {result['torch']}: {said}.\n")
        print(table(result) + "\n")


if __name__ == "__main__":
    main()
