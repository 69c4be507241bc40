"""From the GPU suite's results to the planner: a device's copy rates, and passes it was timed at.

    python -m benchmarks.gpu.row RESULTS.json [--write FOLDER]

Prints what ``megatron_ext/plan/gpus/NAME.json`` and ``published/NAME.json`` would get, and the
planner's passes beside the measured ones; ``--write megatron_ext/plan/gpus`` puts it there. Other
numbers of the device are not touched: ``benchmarks.gpu.fit`` fits them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from megatron_ext.plan.calibration import compare
from megatron_ext.plan.gpu import Gpu, gpu_called

# Layers as benchmarks/gpu/model.py makes them. Slices add weight gradients to a float32 buffer;
# a rank's list has none, so that autograd adds 16 bits to 16 bits.
FLAGS = (
    "--num-layers 1 --hidden-size {hidden} --num-attention-heads {heads} --seq-length {seq} "
    "--micro-batch-size 1 --bf16 --transformer-impl local --attention-backend flash "
    "--hidden-dropout 0 --no-gradient-accumulation-fusion"
)
NARROW = " --grad-reduce-in-bf16"
# Slices have rows of the whole microbatch; this one with the kernel that layers have, too.
WHOLE = "torch's kernel"
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
    layers = [
        _figure(where, row["what"], row["flags"], row["passes"])
        for row in parts.get("layers", {}).get("rows", ())
        if "failed" not in row
    ]
    slices = [
        _figure(
            where,
            f"h {row['hidden']}, s {row['tokens']}, one slice",
            _flags(row["hidden"], row["tokens"]),
            {op: times[0] for op, times in row["ms"].items()},
        )
        for row in parts.get("slices", {}).get("rows", ())
        if row["cut"] == WHOLE
    ]
    ranks = [
        _figure(
            where,
            f"h {row['size']['hidden']}, s {row['size']['seq']}, {row['schedule']}",
            _flags(row["size"]["hidden"], row["size"]["seq"]) + NARROW,
            dict(_layer(row)),
        )
        for name in ("replay", "wide")
        for row in parts.get(name, {}).get("rows", ())
        if row["schedule"] in SCHEDULES and "failed" not in row
    ]
    return layers + slices + ranks


def _figure(where: str, what: str, flags: str, passes: dict[str, float]) -> dict[str, Any]:
    return {"source": where, "what": what, "flags": flags, "published": passes, "fitted": False}


def _flags(hidden: int, seq: int) -> str:
    return FLAGS.format(hidden=hidden, seq=seq, heads=max(1, hidden // HEAD))


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
    """Put numbers and figures into the files of the device. Its figures of this suite of other
    dates stay, and what was fitted to a figure that is there already remains so."""
    table = folder / f"{gpu.name}.json"
    row = json.loads(table.read_text())
    row["numbers"].update(numbers(data))
    table.write_text(table_text(row))
    passes = folder / "published" / f"{gpu.name}.json"
    if passes.exists():
        known = json.loads(passes.read_text())
    else:
        known = {"format": "megatron_ext/published@1", "gpu": gpu.name, "notes": [], "figures": []}
    fitted = {(each["source"], each["what"]) for each in known["figures"] if each["fitted"]}
    new = figures(data["rows"], source(data))
    for each in new:
        each["fitted"] = (each["source"], each["what"]) in fitted
    known["figures"] = [each for each in known["figures"] if each["source"] != source(data)] + new
    passes.write_text(figures_text(known))


def table_text(row: dict[str, Any]) -> str:
    """A device's file, with large rates as 9.89e14."""

    def short(found: re.Match[str]) -> str:
        return str(Decimal(found[0]).normalize()).replace("E+", "e")

    return re.sub(r"(?<=\"value\": )\d{7,}\.0(?=,?$)", short, _text(row), flags=re.MULTILINE)


def figures_text(known: dict[str, Any]) -> str:
    """A device's file of passes, a figure a line."""
    lines = ",\n".join(f"    {json.dumps(each)}" for each in known["figures"])
    return _text(known | {"figures": []}).replace('"figures": []', f'"figures": [\n{lines}\n  ]')


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


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
