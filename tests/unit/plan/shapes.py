"""The model shapes that memory formulas are compared on: Megatron's flags, one rank, unfused.

Read by the tests and by ``ranks/memory_cases.py``, which builds these models.
"""

from __future__ import annotations

BASE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
    "--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl local --micro-batch-size 2"
)
LLAMA = (
    "--swiglu --disable-bias-linear --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 320"
)
EXPERTS = "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2"

SHAPES = {
    "dense tied": "",
    "dense untied": "--untie-embeddings-and-output-weights",
    "dense bf16": "--bf16 --untie-embeddings-and-output-weights",
    "softmax in fp32": "--bf16 --attention-softmax-in-fp32",
    "dropout": "--hidden-dropout 0.1",
    "llama": LLAMA + " --untie-embeddings-and-output-weights",
    "llama bf16": LLAMA + " --bf16",
    "rms norm": LLAMA + " --normalization RMSNorm",
    "query norms": LLAMA + " --qk-layernorm",
    "squared relu": "--squared-relu --disable-bias-linear --add-qkv-bias",
    "wide heads": "--kv-channels 64",
    "experts": EXPERTS + " --ffn-hidden-size 256",
    "experts, small": EXPERTS + " --ffn-hidden-size 256 --moe-ffn-hidden-size 96",
    "shared expert": EXPERTS
    + " --ffn-hidden-size 256 --moe-shared-expert-intermediate-size 192 --moe-layer-freq ([0]+[1])",
    "selective recompute": "--recompute-activations",
    "full recompute": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "block recompute": "--recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
    "cheap recompute": "--pp-cheap-recompute",
    "cheap llama": LLAMA + " --pp-cheap-recompute",
}

# Read by both, and some that plan writes.
LAYOUTS = (
    *("Et|t|tL", "E|t|tt|L", "Ettt|t|ttL", "Et*3|(t|)*2tt,L", "E|(t*2|)*2L"),
    *("E|(t|)*3L", "Et*2|t*2|t*2L"),
)


def tokens(shape: str) -> list[str]:
    """One shape's command line; a later flag wins."""
    return f"{BASE} {SHAPES[shape]}".split()
