"""(g) F, B and W of one layer of models that people train, to judge the planner's times with.

Each with torch's operations one by one, and with Megatron's fused activations and dropout, which
torch compiles where it has a GPU. Everything is launched before a pass begins.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

# The suite runs without the compiler; here it belongs to what is measured.
os.environ.pop("TORCH_COMPILE_DISABLE", None)

from benchmarks.gpu.model import CUDA, HEAD, Sdpa, Size, config, layer_of, release, start
from benchmarks.gpu.slices import measured


class Shape(NamedTuple):
    """One layer: ``heads`` queries of 128 each over ``groups`` keys and values; ``gated`` is SwiGLU
    with RMSNorm, as Llama has it, else GELU with LayerNorm."""

    name: str
    hidden: int
    ffn: int
    groups: int
    gated: bool
    seq: int
    batch: int = 1


SHAPES = (
    Shape("Llama 8B", 4096, 14336, 8, True, 8192),
    Shape("Llama 70B", 8192, 28672, 8, True, 8192),
    Shape("Llama 8B", 4096, 14336, 8, True, 2048),
    Shape("Llama 70B", 8192, 28672, 8, True, 4096),
    Shape("GPT 1.3B", 2048, 8192, 16, False, 2048, 4),
    Shape("Qwen3 32B", 5120, 25600, 8, True, 4096),
    Shape("GPT 175B", 12288, 49152, 96, False, 2048),
    Shape("Llama 8B", 4096, 14336, 8, True, 32768),
)
TINY = (Shape("tiny", 256, 128, 1, True, 32, 2),)
ROUNDS = 4


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rows by shape, without fusion and with it; what one cannot do is a row that says so."""
    start()
    rows: list[dict[str, Any]] = []
    for shape in TINY if args.tiny else SHAPES:
        for fused in (False, True) if CUDA else (False,):
            what = f"{shape.name}, s {shape.seq}, b {shape.batch}{', fused' if fused else ''}"
            row: dict[str, Any] = {"what": what, "fused": fused, "flags": flags(shape)}
            try:
                row["passes"] = passes(shape, fused, 1 if args.tiny else ROUNDS)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                error.__traceback__ = None
                del error
            release()
            rows.append(row)
            print(row, flush=True)
            args.keep({"rows": rows, "unfinished": "more layers"})
    return {"rows": rows}


def passes(shape: Shape, fused: bool, rounds: int) -> dict[str, float]:
    """Milliseconds of F, B and W."""
    import torch

    size = Size(shape.hidden, shape.seq, 1, 1, 1, shape.batch)
    others: dict[str, Any] = {
        "ffn_hidden_size": shape.ffn,
        "num_query_groups": shape.groups,
        "add_bias_linear": not shape.gated,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
    }
    if shape.gated:
        others |= {"gated_linear_unit": True, "normalization": "RMSNorm",
                   "activation_func": torch.nn.functional.silu}  # fmt: skip
    layer = layer_of(config(size, **others), 0)
    layer.self_attention.core_attention = Sdpa()
    row, _ = measured(layer, size, [shape.seq], rounds)
    return {op: round(sum(times), 4) for op, times in row["ms"].items()}


def flags(shape: Shape) -> str:
    """Of such a layer, for the planner."""
    text = (
        f"--num-layers 1 --hidden-size {shape.hidden} --ffn-hidden-size {shape.ffn} "
        f"--num-attention-heads {max(1, shape.hidden // HEAD)} --group-query-attention "
        f"--num-query-groups {shape.groups} --seq-length {shape.seq} "
        f"--micro-batch-size {shape.batch} --bf16 --transformer-impl local "
        "--attention-backend flash --hidden-dropout 0 --no-gradient-accumulation-fusion"
    )
    gated = " --swiglu --normalization RMSNorm --disable-bias-linear"
    return text + (gated if shape.gated else "")
