"""Measured passes of single layers beside the planner's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import Gpu
from megatron_ext.plan.layout import Split
from megatron_ext.plan.times import stage_times

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


def figures(parts: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Passes of one layer in milliseconds."""
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
    return {"source": where, "what": what, "flags": flags, "published": passes}


def _flags(hidden: int, seq: int) -> str:
    return FLAGS.format(hidden=hidden, seq=seq, heads=max(1, hidden // HEAD))


def _layer(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Means over all layers of the rank."""
    for op, quantity in (("F", "F"), ("B", "B"), ("W", "W"), ("BW", "B+W")):
        times = [ms for name, ms in row["passes_ms"].items() if name.rstrip("0123456789") == op]
        if times:
            yield quantity, round(sum(times) / row["size"]["layers"], 4)


_LAYER = Split((0, 1, 0))


def beside(gpu: Gpu, found: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """(layer, pass, measured, predicted) in milliseconds."""
    rows = []
    for each in found:
        f, b, w = (
            1e3 * s for s in stage_times(job_of(read(each["flags"].split())[0]), _LAYER, gpu)[1]
        )
        ours = {"F": f, "B": b, "W": w, "B+W": b + w}
        rows += [(each["what"], name, ms, ours[name]) for name, ms in each["published"].items()]
    return rows
