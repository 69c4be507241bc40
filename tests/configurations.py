"""What is trained, and how equal it has to be to stock: the list of tested sets is this table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.support import ORDER_FILE

LOOPED = ("interleaved", "interleaved-zb", "gis", "gis-h", "po")  # two chunks a rank in a loop
SCHEDULES = ("v-half", "zb-h1", "v-zb", "interleaved-zb", "v-min", "1f1b", "v-cap", "zb-h2", "gis",
             "po", "auto", "interleaved", "gis-h", "dualpipev")  # fmt: skip
BASE = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--split 90,5,5 --eval-interval 1000 --log-interval 1 --attention-dropout 0 --hidden-dropout 0"""
STEPS, NO_EVALUATION, NO_CLIPPING = "--train-iters 3 ", "--eval-iters 0 ", "--clip-grad 0 "
TRAINED = f"""{BASE} {STEPS} {NO_EVALUATION} {NO_CLIPPING} --ckpt-format torch_dist
--untie-embeddings-and-output-weights"""
UNTIED = "--untie-embeddings-and-output-weights "
MOE = """--num-experts 4 --disable-bias-linear --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
--moe-router-load-balancing-type aux_loss --moe-z-loss-coeff 1e-3
--moe-token-dispatcher-type alltoall """
OVERLAPS = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
ROPE = "--position-embedding-type rope "
LLAMA = (
    ROPE
    + """--swiglu --group-query-attention --num-query-groups 2 --normalization RMSNorm
--disable-bias-linear """
)
MLA = (
    ROPE
    + """--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 8 --v-head-dim 8 --normalization RMSNorm """
)
MTP = ROPE + "--mtp-num-layers 1 "
DEEPSEEK = f"""{MLA} --swiglu --disable-bias-linear --qk-layernorm --num-experts 8
--moe-layer-freq ([0]*2+[1]*6) --ffn-hidden-size 48 --moe-ffn-hidden-size 16
--moe-shared-expert-intermediate-size 16 --moe-router-topk 2 --moe-router-num-groups 4
--moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-pre-softmax
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
--moe-token-dispatcher-type alltoall --mtp-num-layers 1 """
GPT_OSS = f"""{ROPE} --quick-geglu --normalization RMSNorm --disable-bias-linear
--group-query-attention --num-query-groups 2 --kv-channels 16 --window-size 4,0
--window-attn-skip-freq 2 --softmax-type learnable --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --num-experts 4 --moe-router-topk 2
--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall """
# Mock documents have 1 to 4096 tokens.
PACKED = """--dataloader-inter-document-masking --seq-length 256
--max-position-embeddings 256 """
TP, CP, EP = (f"--{x}-parallel-size 2 " for x in ("tensor-model", "context", "expert-model"))
SMALL = "--num-layers 4 "  # for rows whose collectives take long on CPU ranks
HYBRID = ROPE + "--spec tests.support.hybrid_spec SPEC --hybrid-layer-pattern M*-M|M*-M "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
EVALUATION = "--eval-iters 2 --eval-interval 2 "


@dataclass(frozen=True)
class Configuration:
    """A row of the table.

    Attributes:
        flags: Megatron's, in stock's run and in ours.
        pp: pipeline ranks of ours.
        world: ranks of ours.
        ours: flags of ours in addition to ``--pp-schedule``.
        alone: stock runs without a pipeline, which has the same bits; else with its own schedule.
        tolerance: difference relative to a tensor's largest element; 0 is bit for bit.
        why: reason of a tolerance.
        schedules: those that can run it.
        script: of the checkout.
    """

    flags: str
    pp: int = 2
    world: int = 2
    ours: str = ""
    alone: bool = True
    tolerance: float = 0.0
    why: str = ""
    schedules: tuple[str, ...] = SCHEDULES[:-1]  # dualpipev needs m >= 2p and is the pairs' own
    script: str = "pretrain_gpt.py"


C = Configuration
SUMMED = "summands of a gradient are added in another order"
SHARDS = "sums over the vocabulary are sums over its shards"
SLICED = "a gradient is the sum of its slices' parts"
ENDS_FREE = tuple(name for name in SCHEDULES if name not in LOOPED)
CONFIGURATIONS = {
    "dense": C(UNTIED, pp=4, world=4),
    "tied": C("", alone=False),
    "bf16": C(UNTIED + "--bf16", pp=4, world=4),
    "fp16, loss scale": C(UNTIED + "--fp16 --initial-loss-scale 65536"),
    "gradient clipping": C(
        UNTIED + "--clip-grad 1.0", tolerance=1e-5, why="the norm is summed rank by rank"
    ),
    "GQA, rope, swiglu": C(UNTIED + LLAMA),
    "MLA": C(UNTIED + MLA),
    "TP 2, sequence parallel": C(
        UNTIED + SMALL + TP + "--sequence-parallel", world=4, tolerance=1e-5, why=SUMMED
    ),
    "CP 2": C(UNTIED + SMALL + CP, world=4),
    "DP 2, distributed optimizer, overlaps": C(UNTIED + OVERLAPS, world=4),
    "DP 2, tied, distributed optimizer, overlaps": C(OVERLAPS, world=4, alone=False),
    "MoE, EP 2": C(UNTIED + MOE + EP, world=4),
    "MoE, EP 2, TP 2": C(
        UNTIED + SMALL + MOE + EP + TP + "--expert-tensor-parallel-size 1 --sequence-parallel",
        world=4, tolerance=1e-5, why=SUMMED,
    ),
    "MTP": C(UNTIED + MTP, tolerance=1e-5, why=SUMMED),
    "DeepSeek-V3's layers, EP 2": C(UNTIED + DEEPSEEK + EP, world=4, tolerance=1e-5, why=SUMMED),
    "GPT-OSS's layers": C(UNTIED + GPT_OSS),
    "packed documents": C(UNTIED + PACKED),
    "recompute full": C(UNTIED + FULL),
    "recompute selective": C(UNTIED + "--recompute-granularity selective"),
    "uneven layers": C(
        UNTIED + "--num-layers 10 --decoder-first-pipeline-num-layers 4",
        alone=False, schedules=ENDS_FREE,
    ),
    "one communicator a pipeline": C(UNTIED, pp=4, world=4, ours="--pp-p2p pipeline"),
    "a schedule file": C(UNTIED, pp=4, world=4, schedules=("file",)),
    "layers by a layout": C(
        UNTIED, ours="--pipeline-model-parallel-layout LAYOUT",
        schedules=("v-half", "interleaved-zb"),
    ),
    "evaluation, per-token loss": C(UNTIED + EVALUATION + "--calculate-per-token-loss"),
    "batch-size ramp-up": C(UNTIED + "--train-samples 28 --rampup-batch-size 4 2 24"),
    "fused cross entropy": C(
        UNTIED + "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
    ),
    "offload full": C(UNTIED, pp=4, world=4, ours="--pp-offload full"),
    "offload half, MoE, EP 2": C(UNTIED + MOE + EP + OVERLAPS, world=4, ours="--pp-offload half"),
    "offload auto, evaluation": C(UNTIED + EVALUATION, ours="--pp-offload auto"),
    "cheap recompute, swiglu": C(
        UNTIED + LLAMA, ours="--pp-cheap-recompute",
        tolerance=1e-5, why="the product of swiglu is not fused, so it is rounded once more",
    ),
    "cheap recompute, offload": C(UNTIED, ours="--pp-cheap-recompute --pp-offload full"),
    "cheap recompute, MoE, EP 2, overlaps": C(
        UNTIED + MOE + "--swiglu " + EP + OVERLAPS, world=4, ours="--pp-cheap-recompute",
        tolerance=1e-2, why="the product of swiglu is not fused, so it is rounded once more",
    ),
    "offload half, tied, MLA, TP 2": C(
        MLA + SMALL + TP + "--sequence-parallel", world=4, ours="--pp-offload half", alone=False,
        tolerance=1e-5, why=SUMMED,
    ),
    "hybrid layers": C(
        UNTIED + HYBRID, alone=False, script="pretrain_hybrid.py",
        schedules=("1f1b", "zb-h1", "zb-h2"),
    ),
    "document masks": C(
        UNTIED + "--reset-position-ids --reset-attention-mask --eod-mask-loss --seq-length 256 "
        "--max-position-embeddings 256", schedules=("1f1b", "zb-h1", "zb-h2"),
    ),
    "vocabulary": C(UNTIED, ours="--pp-vocab-parallel", tolerance=1e-5, why=SHARDS),
    "vocabulary, tied, evaluation": C(
        EVALUATION, ours="--pp-vocab-parallel", alone=False, tolerance=1e-5, why=SHARDS
    ),
    "vocabulary, TP 2, sequence parallel": C(
        UNTIED + SMALL + TP + "--sequence-parallel", world=4, ours="--pp-vocab-parallel",
        tolerance=1e-5, why=SHARDS,
    ),
    "vocabulary, MTP": C(
        UNTIED + MTP, ours="--pp-vocab-parallel", tolerance=1e-5, why=SHARDS
    ),
    "vocabulary, CP 2, per-token loss": C(
        UNTIED + SMALL + CP + "--calculate-per-token-loss", world=4, ours="--pp-vocab-parallel",
        tolerance=1e-5, why=SHARDS,
    ),
    "vocabulary, MoE, EP 2, overlaps": C(
        UNTIED + MOE + EP + OVERLAPS.replace("--bf16 ", ""), world=4, ours="--pp-vocab-parallel",
        tolerance=1e-5, why=SHARDS,
    ),
    "two slices": C(UNTIED + LLAMA, ours="--pp-slices 2", tolerance=1e-5, why=SLICED),
    "four slices, weights joined": C(
        UNTIED, pp=4, world=4, ours="--pp-slices 4 --pp-slice-weights joined",
        tolerance=1e-5, why=SLICED,
    ),
    "MoE in 2 chunks, EP 2": C(
        UNTIED + MOE + EP, world=4, ours="--moe-pipeline-chunks 2", tolerance=1e-5, why=SUMMED
    ),
    "MoE in 4 chunks, input again, EP 2": C(
        UNTIED + MOE + EP, world=4, ours="--moe-pipeline-chunks 4 --moe-memory-reuse s4",
        tolerance=1e-5, why=SUMMED,
    ),
    # Chunks hide the experts' sizes from Megatron's recomputation of norms and activations.
    "MoE in 2 chunks, cheap recompute": C(
        UNTIED + MOE, ours="--moe-pipeline-chunks 2 --moe-memory-reuse s2 --pp-cheap-recompute",
        tolerance=1e-5, why=SUMMED,
    ),
    "MoE in 4 chunks on one rank": C(
        UNTIED + MOE, ours="--moe-pipeline-chunks 4 --moe-memory-reuse s1",
        tolerance=1e-5, why=SUMMED,
    ),
    "joint passes, EP 2": C(
        UNTIED + MOE + EP + "--bf16", world=4, ours="--overlap-moe-expert-parallel-comm",
        schedules=("dualpipev", "v-half", "zb-h1", "1f1b"),
    ),
}  # fmt: skip


def of_stock(row: Configuration) -> tuple[list[str], int]:
    """Arguments and ranks of stock's run."""
    pp = 1 if row.alone else row.pp
    return _arguments(row, row.flags, pp), row.world // row.pp * pp


def of_ours(row: Configuration, schedule: str) -> tuple[list[str], int]:
    """Arguments and ranks of our run."""
    layout = "Et*2|t*2|t*3|tL" if schedule.startswith("v-") else "Et|t*3|t*2|t*2L"
    argv = _arguments(row, f"{row.flags} {row.ours.replace('LAYOUT', layout)}", row.pp)
    argv += ["--pp-schedule", ORDER_FILE if schedule == "file" else schedule]
    if schedule in ("v-cap", "auto"):
        argv += ["--pp-memory-cap", "0.9" if row.pp > 2 else "1"]
    if schedule in LOOPED and "--pipeline-model-parallel-layout" not in argv:
        argv += ["--num-virtual-stages-per-pipeline-rank", "2"]
    return argv, row.world


def _arguments(row: Configuration, flags: str, pp: int) -> list[str]:
    length = "" if "--train-samples" in flags else STEPS
    # Adam divides by a gradient's size: without a large epsilon a difference in the last bit of a
    # gradient near zero becomes one of a whole step.
    optimizer = "--adam-eps 1" if row.tolerance else ""
    base = BASE.replace("--num-layers 8 ", "") if "hybrid" in row.script else BASE
    common = f"{base} {length} {NO_EVALUATION} {NO_CLIPPING} {optimizer}"
    return f"{common} {flags} --pipeline-model-parallel-size {pp}".split()


def pairs(everything: bool = False) -> list[tuple[str, str]]:
    """(configuration, schedule): every configuration under a V and under a loop, and every schedule
    at least once; with ``everything`` all that there are."""
    used, chosen = Counter[str](), []
    for name, row in CONFIGURATIONS.items():
        kinds = [
            [s for s in row.schedules if s.startswith(("v-", "dual")) is vee]
            for vee in (True, False)
        ]
        some = row.schedules if everything else [min(k, key=used.__getitem__) for k in kinds if k]
        chosen += [(name, schedule) for schedule in some]
        for schedule in some:
            used[schedule] += 1
    return chosen
