"""The flags that train with a schedule of the page."""

from __future__ import annotations

import argparse

from ...schedule import GENERATORS
from ..common import offloads


def training_flags(args: argparse.Namespace, name: str) -> str:
    """Flags for Megatron's script: pipeline size, schedule, and what shapes it; empty where
    training does not run it: slices of the shortest span or in numbers that differ,
    and costs of single microbatches.

    Without the batch: ``--microbatches`` is what global batch, micro batch and data parallel size
    make.

    Args:
        args: options of ``compare``.
        name: a generated schedule.
    """
    slices = args.slices or "1"
    span = args.objective == "span"
    if not slices.isdecimal() or args.microbatch_cost is not None:
        return ""
    if slices != "1" and span:
        return ""
    made = GENERATORS[name]
    words = ["--pipeline-model-parallel-size", str(args.pp), "--pp-schedule", name]
    chunks = args.chunks or made.default_chunks
    if made.any_chunks and chunks > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    if args.cost is not None or args.hop is not None:
        costs = (args.cost or "1,1,1").split(",")[:3]
        hop = args.hop or ((args.cost or "").split(",") + ["0"] * 4)[3]
        words += ["--pp-cost", ",".join([*costs, hop])]
    if made.takes_memory_cap and args.memory_cap is not None:
        words += ["--pp-memory-cap", args.memory_cap]
    if made.takes_group_size and args.group_size is not None:
        words += ["--pp-group-size", str(args.group_size)]
    if slices != "1":
        words += ["--pp-slices", slices]
        words += ["--pp-slice-cut", args.slice_cut] if args.slice_cut is not None else []
        words += ["--pp-slice-weights", "joined"] if args.slice_weights == "joined" else []
    if offloads(args):
        if args.memory_cap is not None and not made.takes_memory_cap:
            words += ["--pp-memory-cap", args.memory_cap]
        known = args.offload in ("half", "full", "auto")
        words += [f"--pp-offload{'' if known else '-chunks'}", args.offload]
        words += ["--pp-offload-time", args.offload_time]
        if args.offload_transfer is not None:
            words += ["--pp-offload-transfer", args.offload_transfer]
    if args.vocabulary is not None:
        words.append("--pp-vocab-parallel")
    if args.overlap:
        words.append("--overlap-moe-expert-parallel-comm")
    if span:
        words.append("--pp-post-validation")
    return " ".join(words)
