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

LATENT = (
    "--multi-latent-attention --qk-layernorm --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 24 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 32 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --ffn-hidden-size 320 --untie-embeddings-and-output-weights"
)

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
    "l2 norms": LLAMA + " --qk-l2-norm --bf16",
    "squared relu": "--squared-relu --disable-bias-linear --add-qkv-bias",
    "wide heads": "--kv-channels 64",
    "experts": EXPERTS + " --ffn-hidden-size 256",
    "experts, small": EXPERTS + " --ffn-hidden-size 256 --moe-ffn-hidden-size 96",
    "shared expert": EXPERTS
    + " --ffn-hidden-size 256 --moe-shared-expert-intermediate-size 192 --moe-layer-freq ([0]+[1])",
    "qwen2": LLAMA
    + " --add-qkv-bias --normalization RMSNorm --untie-embeddings-and-output-weights",
    "qwen experts": LLAMA + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 "
    "--kv-channels 48 --normalization RMSNorm",
    "selective recompute": "--recompute-activations",
    "full recompute": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "block recompute": "--recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
    "cheap recompute": "--pp-cheap-recompute",
    "cheap llama": LLAMA + " --pp-cheap-recompute",
    "latent attention": LATENT,
    "latent attention bf16": LATENT + " --bf16",
    "latent keys only": LATENT.replace("--q-lora-rank 48 ", "").replace("--qk-layernorm ", ""),
    "latent attention, recomputed": LATENT
    + " --recompute-granularity selective --recompute-modules mla_up_proj",
    "prediction": LLAMA + " --untie-embeddings-and-output-weights --mtp-num-layers 1",
    "two predictions": LLAMA + " --untie-embeddings-and-output-weights --mtp-num-layers 2 --bf16",
    "deepseek": LATENT + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 "
    "--moe-shared-expert-intermediate-size 192 --moe-layer-freq ([0]+[1]) --mtp-num-layers 1",
}

# ``moe_act`` needs Transformer Engine's grouped layers. With biases Megatron's recompute of ``mlp``
# never ends where its layers are local: the bias is a result, and so becomes part of the graph.
_SELECTIVE = " --recompute-granularity selective --recompute-modules "
_SHARED = SHAPES["shared expert"]
SHAPES |= {
    "recomputed norms of experts": _SHARED + _SELECTIVE + "layernorm",
    "recomputed MLP": LLAMA + " --bf16" + _SELECTIVE + "mlp",
    "recomputed norms and MLP": LLAMA + _SELECTIVE + "layernorm mlp",
    "recomputed shared layer": _SHARED + _SELECTIVE + "moe",
    "recomputed shared expert": _SHARED + _SELECTIVE + "shared_experts",
    "recomputed deepseek": SHAPES["deepseek"] + _SELECTIVE + "mla_up_proj mlp",
    "recomputed deepseek experts": SHAPES["deepseek"] + _SELECTIVE + "mla_up_proj moe layernorm",
    "recomputed latent scores": LATENT + _SELECTIVE + "core_attn",
}

# Read by both, and some that plan writes.
LAYOUTS = (
    *("Et|t|tL", "E|t|tt|L", "Ettt|t|ttL", "Et*3|(t|)*2tt,L", "E|(t*2|)*2L"),
    *("E|(t|)*3L", "Et*2|t*2|t*2L"),
)


def tokens(shape: str) -> list[str]:
    """One shape's command line; a later flag wins."""
    return f"{BASE} {(SHAPES | FLAGS_ALONE)[shape]}".split()


# Flags that no CPU model shows: training's parsed arguments have to describe the same job.
FLAGS_ALONE = {
    "fp8": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
    "muon": "--bf16 --optimizer muon",
    "window": "--window-size 8,0",
    "offloaded optimizer": "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
    "--use-precision-aware-optimizer",
    "fused loss": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
}

# Models on several ranks; --chunks is the tests' own: model chunks a rank, which plan searches.
_UNTIED = f"{LLAMA} --untie-embeddings-and-output-weights"
DIVIDED = {
    "a key for two ranks": f"{_UNTIED} --tensor-model-parallel-size 4 --chunks 1",
    "uneven ends": f"{_UNTIED} --num-layers 8 --pipeline-model-parallel-size 4 "
    "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 --chunks 1",
    "uneven ends in chunks": f"{_UNTIED} --num-layers 16 --pipeline-model-parallel-size 4 "
    "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2 --chunks 2",
}
EIGHT_BITS = ("delayed", "tensorwise", "blockwise", "mxfp8")
