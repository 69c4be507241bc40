"""Fit a device's own numbers to half of the passes that it was timed at.

    python -m benchmarks.gpu.fit NAME [--write FOLDER]

Every second shape of ``published/NAME.json`` is fitted to, in the order of the file and with all
of its figures; the others are held out, and show what the numbers are worth. ``efficiency``,
``ramp``, ``stream`` and ``attention`` are fitted: one GPU says nothing about collectives. ``--write
megatron_ext/plan/gpus`` puts numbers and marks into the device's two files.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.row import figures_text, table_text
from megatron_ext.plan.calibration import compare, published, summary
from megatron_ext.plan.gpu import GPUS, Gpu, gpu_of

NAMES = ("efficiency", "ramp", "stream", "attention")
MOST = 1.0  # of a share; a ramp has none
START, END = 0.2, 0.001  # changes of a number, as shares
SOURCE = (
    "fitted to passes measured on {0}, the figures marked so by "
    "`megatron-ext plan --calibration --gpu {0}`"
)


def mark(figures: list[dict[str, Any]]) -> None:
    """Every second shape is fitted to; figures with the same flags are of one."""
    shapes = list(dict.fromkeys(each["flags"] for each in figures))
    for each in figures:
        each["fitted"] = shapes.index(each["flags"]) % 2 == 0


def fit(gpu: Gpu, figures: list[dict[str, Any]]) -> Gpu:
    """The device with the numbers of the smallest error, found one number after the other."""
    chosen = [each for each in figures if each["fitted"]]
    # Always from the same numbers, none of them 0: a product would not move it.
    gpu = replace(gpu, **{name: getattr(GPUS["A100"], name) for name in NAMES})
    best, step = summary(compare(gpu, chosen)).rms, START
    while step > END:
        found = best
        for name in NAMES:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(gpu, name) * factor
                other = replace(gpu, **{name: value if name == "ramp" else min(MOST, value)})
                error = summary(compare(other, chosen)).rms
                if error < best:
                    gpu, best = other, error
        if best == found:
            step /= 2
    return gpu


def main() -> None:
    """Print the numbers and both errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("name")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    gpu = gpu_of(args.name)
    known = published(gpu.name)
    figures = known["figures"]
    mark(figures)
    found = fit(gpu, figures)
    values = {name: round(getattr(found, name), None if name == "ramp" else 3) for name in NAMES}
    rows = compare(replace(gpu, **values), figures)
    print(json.dumps(values))
    print("fitted", summary([each for each in rows if each.fitted]))
    print("held out", summary([each for each in rows if not each.fitted]))
    if args.write is not None:
        source = {"sure": "fitted", "source": SOURCE.format(gpu.name)}
        table = args.write / f"{gpu.name}.json"
        row = json.loads(table.read_text())
        row["numbers"].update({name: {"value": value} | source for name, value in values.items()})
        table.write_text(table_text(row))
        (args.write / "published" / f"{gpu.name}.json").write_text(figures_text(known))


if __name__ == "__main__":
    main()
