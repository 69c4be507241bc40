"""Rows of the feature matrix for current architectures: DeepSeek-V3, Qwen3, GPT-OSS and others.

Muon needs the package emerging-optimizers.
"""

from __future__ import annotations

from tests.support import ROOT
from tests.support.features import MOE, OVERLAP, Feature

_SUM = "two summands of a gradient are added in another order"
_LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
_GQA = "--group-query-attention --num-query-groups 2"
_EP2 = "--expert-model-parallel-size 2"
_DENSE_FIRST = "--moe-layer-freq ([0]*2+[1]*6)"
# The sizes of queries, keys and values all differ, and none is hidden size over heads.
MLA = f"""{_LLAMA} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8
--qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm"""
DEEPSEEK = f"""{MLA} --num-experts 8 {_DENSE_FIRST} --ffn-hidden-size 48 --moe-ffn-hidden-size 16
--moe-shared-expert-intermediate-size 16 --moe-router-topk 2 --moe-router-num-groups 4
--moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-pre-softmax
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --bf16"""
_QWEN = f"""{_LLAMA} {_GQA} --kv-channels 16 --qk-layernorm --rotary-base 1000000
--vocab-size 151935 {MOE} --bf16"""
_GPT_OSS = f"""{_LLAMA.replace("--swiglu", "--quick-geglu")} {_GQA} --kv-channels 16
--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --num-experts 4 --moe-router-topk 2
--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"""
# Mock documents have 1 to 4096 tokens.
_LONG = "--seq-length 256 --max-position-embeddings 256"
PACKED = f"--dataloader-inter-document-masking {_LONG}"
MASKED = f"--reset-position-ids --reset-attention-mask --eod-mask-loss {_LONG}"
_HETEROGENEOUS = f"""{_LLAMA} {_GQA} --use-rotary-position-embeddings --use-rope-scaling
--rope-scaling-factor 8.0 --rotary-base 500000 --heterogeneous-layers-config-path
{ROOT / "tests" / "support" / "heterogeneous_layers.json"}"""

ARCHITECTURES = (
    Feature("MLA", model=MLA, pp=2, world=2),
    Feature(
        "MLA, TP 2, sequence parallel",
        model=MLA,
        run="--tensor-model-parallel-size 2 --sequence-parallel",
        pp=2,
        tolerance=1e-5,
        why=_SUM,
    ),
    Feature("dense first layers, MoE", model=f"{MOE} {_DENSE_FIRST}"),
    Feature(
        "MoE, allgather dispatcher, EP 2",
        model=MOE.replace("alltoall", "allgather"),
        run=_EP2,
        pp=2,
    ),
    Feature(
        "DeepSeek-V3: MLA, dense first layers, MoE, MTP; EP 2, both overlaps",
        model=DEEPSEEK,
        run=f"{_EP2} {OVERLAP}",
        pp=2,
        tolerance=1e-2,
        why=_SUM,
    ),
    Feature(
        "DeepSeek-V3, recompute of MLA's up projection and shared experts",
        model=DEEPSEEK,
        run="""--recompute-granularity selective --recompute-modules mla_up_proj
        shared_experts""",
        tolerance=1e-2,
        why=_SUM,
    ),
    Feature(
        "DeepSeek-V3, pairs",
        model=DEEPSEEK,
        run=_EP2,
        ours="--overlap-moe-expert-parallel-comm",
        pp=2,
        tolerance=1e-2,
        why=_SUM,
    ),
    Feature(
        "DeepSeek-V3, offload, full",
        model=DEEPSEEK,
        ours="--pp-offload full --pp-offload-time 0.25",
        pp=2,
        world=2,
        tolerance=1e-2,
        why=_SUM,
    ),
    Feature(
        "MTP on a stage of its own",
        model="--mtp-num-layers 1 --position-embedding-type rope",
        run="--pipeline-model-parallel-layout STANDALONE",
        tolerance=1e-5,
        why=_SUM,
    ),
    Feature("Qwen3: QK norm, GQA, MoE, vocabulary of 152k", model=_QWEN, run=OVERLAP, pp=2),
    Feature("GPT-OSS: sliding window, sinks, clamped GLU, MoE", model=_GPT_OSS, pp=2, world=2),
    Feature("heterogeneous layers", model=_HETEROGENEOUS, pp=2, world=2),
    Feature("packed sequences", model=PACKED, pp=2, world=2, first=(0, 19)),
    Feature("packed sequences, PP 4", model=PACKED, first=(0, 19), alone=True),
    Feature("packed sequences, MLA", model=f"{PACKED} {MLA}", pp=2, world=2, first=(0, 19)),
    Feature(
        "packed sequences, TP 2",
        model=PACKED,
        run="--tensor-model-parallel-size 2",
        pp=2,
        tolerance=1e-5,
        why=_SUM,
        first=(0, 19),
    ),
    Feature(
        "packed sequences, CP 2",
        model=PACKED,
        run="--context-parallel-size 2",
        pp=2,
        first=(0, 19),
    ),
    Feature("attention mask of each document", model=MASKED, pp=2, world=2),
    Feature(  # Stages between the first and the last have no mask, in stock either.
        "attention mask of each document, beside stock's interleaving",
        model=MASKED,
        run="--num-virtual-stages-per-pipeline-rank 2",
        pp=2,
        world=2,
    ),
    Feature(
        "optimizer on the CPU",
        model="--bf16",
        run=f"{OVERLAP} --use-precision-aware-optimizer --optimizer-cpu-offload",
        pp=2,
    ),
    Feature(
        "Muon",
        model="--bf16",
        run="--optimizer muon",
        pp=2,
        first=(0, 19),
    ),
    Feature(
        "Muon, distributed optimizer, both overlaps",
        model="--bf16",
        run=f"--optimizer muon {OVERLAP}",
        pp=2,
        first=(0, 19),
    ),
    Feature(
        "decoder sequence length",
        run="--decoder-seq-length 8 --num-virtual-stages-per-pipeline-rank 2",
        pp=2,
        world=2,
    ),
)
