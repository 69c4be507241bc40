"""From the GPU suite's results to the planner: a device's copy rates, and passes it was timed at.

    python -m benchmarks.gpu.row RESULTS.json [--write FOLDER]

Prints what ``megatron_ext/plan/gpus/NAME.json`` and ``published/NAME.json`` would get, and the
planner's passes beside the measured ones; ``--write megatron_ext/plan/gpus`` puts it there. Other
numbers of the device are not touched: they are fitted (docs/concepts/pass-times.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.plan.calibration import compare
from megatron_ext.plan.gpu import Gpu, gpu_called

# Layers as benchmarks/gpu/model.py makes them.
FLAGS = (
    "--num-layers 1 --hidden-size {hidden} --num-attention-heads {heads} --seq-length {seq} "
    "--micro-batch-size 1 --bf16 --transformer-impl local --attention-backend flash "
    "--hidden-dropout 0"
)
HEAD = 128
# A row with whole backward passes and one with halves: of each a layer's passes.
SCHEDULES = ("1f1b", "v-half")


def numbers(data: dict[str, Any]) -> dict[str, Any]:
    """Copy rates, one direction alone, as ``gpus/NAME.json`` has them; empty if not measured."""
    rates = data["rows"].get("rates", {}).get("gb_per_s", {})
    return {
        name: {
            "value": float(f"{1e9 * rates[name]:.3g}"),
            "sure": "measured",
            "source": source(data),
        }
        for name in ("to_host", "to_device")
        if name in rates
    }


def source(data: dict[str, Any]) -> str:
    """Where a number is from."""
    return f"benchmarks.gpu, {data['date']}: {data['gpu']}, torch {data['torch']}"


def figures(parts: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Passes of one layer in milliseconds, as ``published/NAME.json`` has them."""
    rows = [row for name in ("replay", "wide") for row in parts.get(name, {}).get("rows", ())]
    layers = [
        {"source": where, "what": row["what"], "flags": row["flags"], "published": row["passes"],
         "fitted": False}
        for row in parts.get("layers", {}).get("rows", ())
        if "failed" not in row
    ]  # fmt: skip
    return layers + [
        {"source": where, "what": f"h {row['size']['hidden']}, s {row['size']['seq']}, "
         f"{row['schedule']}", "flags": _flags(row["size"]), "published": dict(_layer(row)),
         "fitted": False}
        for row in rows
        if row["schedule"] in SCHEDULES and "failed" not in row
    ]  # fmt: skip


def _flags(size: dict[str, int]) -> str:
    return FLAGS.format(
        hidden=size["hidden"], seq=size["seq"], heads=max(1, size["hidden"] // HEAD)
    )


def _layer(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Means over all layers of the rank."""
    for op, quantity in (("F", "F"), ("B", "B"), ("W", "W"), ("BW", "B+W")):
        times = [ms for name, ms in row["passes_ms"].items() if name.rstrip("0123456789") == op]
        if times:
            yield quantity, round(sum(times) / row["size"]["layers"], 4)


def beside(gpu: Gpu, found: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """(layer, pass, measured, predicted) in milliseconds."""
    return [(each.what, each.quantity, each.published, each.ours) for each in compare(gpu, found)]


def write(folder: Path, gpu: Gpu, data: dict[str, Any]) -> None:
    """Put numbers and figures into the files of the device; its figures of this suite of other
    dates stay."""
    table = folder / f"{gpu.name}.json"
    row = json.loads(table.read_text())
    row["numbers"].update(numbers(data))
    table.write_text(json.dumps(row, indent=2) + "\n")
    passes = folder / "published" / f"{gpu.name}.json"
    if passes.exists():
        known = json.loads(passes.read_text())
    else:
        known = {"format": "megatron_ext/published@1", "gpu": gpu.name, "notes": [], "figures": []}
    kept = [each for each in known["figures"] if each["source"] != source(data)]
    kept += figures(data["rows"], source(data))
    lines = ",\n".join(f"    {json.dumps(each)}" for each in kept)
    text = json.dumps(known | {"figures": []}, indent=2)
    passes.write_text(text.replace('"figures": []', f'"figures": [\n{lines}\n  ]') + "\n")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    data = json.loads(args.results.read_text())
    gpu = gpu_called(data["gpu"] or "")
    if gpu is None or data["tiny"]:
        what = "from --tiny" if data["tiny"] else f"of {data['gpu']}, which is not in the table"
        print(f"{args.results} is {what}; give a run on a GPU of megatron_ext/plan/gpus",
              file=sys.stderr)  # fmt: skip
        return 2
    found = figures(data["rows"], source(data))
    print(json.dumps({"gpu": gpu.name, "numbers": numbers(data), "figures": found}, indent=1))
    for what, quantity, measured, ours in beside(gpu, found):
        print(f"{what}, {quantity}: {measured:.3f} ms a layer, predicted {ours:.3f}")
    if args.write is not None:
        write(args.write, gpu, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
