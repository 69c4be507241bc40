"""``plan --show-k``: transfer by compute time of a stage, which bounds what can be offloaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..plan.flags import job_of, read
from ..plan.gpu import GPUS, Gpu
from ..plan.layout import split_of
from ..plan.model import Job
from ..plan.transfer import Transfer, layer_transfer, transfers
from ..view.table import columns
from . import plan_device, plan_input
from .common import user_input
from .parser import Parser
from .plan_calibration import show_calibration


def declare(parser: Parser) -> None:
    """Options that print a table of the time model in place of a plan."""
    group = parser.add_argument_group("tables in place of a plan")
    for flag, show, text in (
        ("--show-k", _show_k, _HELP),
        ("--calibration", show_calibration, _CALIBRATION),
    ):
        group.add_argument(flag, dest="run", action="store_const", const=show, help=text)


_HELP = (
    "k, the time of a stage's activations to the host and back by that of its F, B and W, for the "
    "model of the flags by implementation and recompute, or for common models on all devices"
)
_CALIBRATION = (
    "the numbers of --gpu with their sources, and published times of single passes beside those "
    "that they give"
)


class Way(NamedTuple):
    """An implementation of layers with a recompute setting: its name, and changes of the job."""

    name: str
    changes: dict[str, Any]


_TE = {"transformer_engine": True, "flash_attention": True}
_LOCAL = {"transformer_engine": False, "flash_attention": True}
WAYS = (
    Way("TE", {**_TE, "cheap_recompute": False}),
    Way("TE, cheap recompute", {**_TE, "cheap_recompute": True}),
    # Without recompute local layers keep as much as TE's. PipeOffload measured these.
    Way("local, flash, cheap recompute", {**_LOCAL, "cheap_recompute": True}),
)

# Common shapes, at 4 layers: a stage's k does not depend on their number.
_LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
_GROUPS = "--group-query-attention --num-query-groups 8"
_PAPER = "--position-embedding-type rope"
MODELS = {
    "Llama 3 8B": f"--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 {_GROUPS} "
    f"{_LLAMA}",
    "Qwen3 32B": "--hidden-size 5120 --num-attention-heads 64 --kv-channels 128 --qk-layernorm "
    f"--ffn-hidden-size 25600 {_GROUPS} {_LLAMA}",
    "Llama 3 70B": "--hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
    f"{_GROUPS} {_LLAMA}",
    "Llama 3 405B": "--hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 "
    f"{_GROUPS} {_LLAMA}",
    "GPT, h 4096": f"--hidden-size 4096 --num-attention-heads 32 {_PAPER}",
    "GPT, h 8192": f"--hidden-size 8192 --num-attention-heads 64 {_PAPER}",
    "GPT-3 175B": f"--hidden-size 12288 --num-attention-heads 96 {_PAPER}",
}
_BARE = "--num-layers 4 --bf16 --hidden-dropout 0 --attention-dropout 0"
SEQUENCES = (4096, 8192, 16384, 32768)


def common_job(model: str, seq_length: int) -> Job:
    """One of ``MODELS``."""
    line = f"{_BARE} --seq-length {seq_length} {MODELS[model]}"
    return job_of(read(line.split())[0])


def ways(job: Job) -> list[tuple[str, Job]]:
    """The job with every implementation and recompute setting, and the setting's name."""
    keep = {"recompute_granularity": None, "recompute_modules": (), "offload_modules": ()}
    return [(way.name, job.with_(**keep, **way.changes)) for way in WAYS]


def _show_k(args: argparse.Namespace) -> None:
    with user_input():
        given, *_ = plan_input.given(args)
        device = plan_device.gpu(args)
        lengths: tuple[int, ...] = SEQUENCES
        if given.keys() - {"seq_length", "pipeline_model_parallel_size"}:
            job = job_of(given)
            data = one_model(job, device, args.pp or job.pipeline_model_parallel_size)
        else:
            if "seq_length" in given:
                lengths = (given["seq_length"],)
            data = common_models(device, lengths)
    text = _one_text if "ways" in data else _common_text
    print(json.dumps(data) if args.json else text(data))


def one_model(job: Job, gpu: Gpu, pp: int) -> dict[str, Any]:
    """k of one model by implementation and recompute; of its first and last stage too."""
    rows = []
    for name, way in (("as given", job), *ways(job)):
        row = {"name": name, "inner": _entry(layer_transfer(way, gpu))}
        split = split_of(way, pp) if pp > 1 else None
        if split is not None:
            each = transfers(way, split, gpu)
            row |= {"first": _entry(each[0]), "last": _entry(each[-1])}
        rows.append(row)
    return {"gpu": gpu.name, "to_host": gpu.to_host, "to_device": gpu.to_device, "ways": rows}


def _entry(found: Transfer) -> dict[str, Any]:
    return {
        "k": found.k,
        "share": found.share,
        "bytes": found.bytes,
        "transfer_ms": 1e3 * found.transfer_s,
        "compute_ms": 1e3 * found.compute_s,
    }


def common_models(gpu: Gpu, lengths: Sequence[int]) -> dict[str, Any]:
    """k of a layer of common models on all devices, and on ``gpu`` if it is none of the table."""
    devices = {**GPUS, gpu.name: gpu}
    if gpu.name in GPUS and gpu != GPUS[gpu.name]:
        devices = {**GPUS, f"{gpu.name}, as given": gpu}
    rows = [
        {"model": model, "seq_length": s, "gpu": name, "to_host": device.to_host}
        | {"k": {way: layer_transfer(job, device).k for way, job in ways(common_job(model, s))}}
        for s in lengths
        for model in MODELS
        for name, device in devices.items()
    ]
    return {"rows": rows}


_MEANING = (
    "k: the time of an activation set's way to the host and back, one after the other, by that of\n"
    "the stage's F, B and W. Up to 1 all sets can be offloaded beside the passes, up to 2 half."
)


def _one_text(data: dict[str, Any]) -> str:
    ends = [end for end in ("inner", "first", "last") if end in data["ways"][0]]
    heads = ["layers", *(f"k {end}" for end in ends), "offloadable", "MiB", "F+B+W ms"]
    cells = [heads]
    for row in data["ways"]:
        inner = row["inner"]
        cells.append(
            [
                row["name"],
                *(f"{row[end]['k']:.2f}" for end in ends),
                f"{inner['share']:.0%}",
                f"{inner['bytes'] / 2**20:.0f}",
                f"{inner['compute_ms']:.1f}",
            ]
        )
    there, back = data["to_host"] / 1e9, data["to_device"] / 1e9
    lines = [
        f"{data['gpu']}, {there:g} GB/s to the host and {back:g} back; at other rates k changes",
        "as their inverse.",
        _MEANING,
        "Inner: of layers alone, here all in one stage. First, last: with embedding, with loss.",
        "",
        *columns(cells),
    ]
    return "\n".join(lines)


_SHOWN = ("A100", "H100", "H200", "B200", "GB200", "MI300X")  # the others are like one of these


def _common_text(data: dict[str, Any]) -> str:
    rows = data["rows"]
    lengths = {row["seq_length"] for row in rows}
    length = 8192 if 8192 in lengths else max(lengths)
    found = {(r["model"], r["gpu"]): r for r in rows if r["seq_length"] == length}
    names = [n for n in dict.fromkeys(gpu for _, gpu in found) if n in _SHOWN or n not in GPUS]
    lines = [_MEANING, f"Sequences of {length}; --json has others, --seq-length N gives another."]
    first = next(iter(MODELS))
    heads = [f"{name}, {found[first, name]['to_host'] / 1e9:g} GB/s" for name in names]
    for way, _ in WAYS:
        cells = [[way, *heads]]
        for model in MODELS:
            cells.append([model, *(f"{found[model, name]['k'][way]:.2f}" for name in names)])
        lines += ["", *columns(cells)]
    return "\n".join(lines)
