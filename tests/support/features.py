"""The features that the matrix runs every schedule with: flags of the stock ``pretrain_gpt.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

BASE = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--split 90,5,5 --eval-iters 0 --eval-interval 1000 --log-interval 1 --attention-dropout 0
--hidden-dropout 0 --untie-embeddings-and-output-weights --clip-grad 0 --ckpt-format torch_dist"""

MOE = """--num-experts 4 --disable-bias-linear --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
--moe-router-load-balancing-type aux_loss --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type
alltoall --moe-per-layer-logging"""

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Feature:
    """One row of the matrix.

    Attributes:
        name: as the table shows it.
        model: flags that the starting checkpoint is made with too.
        run: flags of the compared runs only.
        ours: flags of ours beside ``--pp-schedule``; stock does not know them.
        drop: flags of ``BASE`` that the feature is without.
        pp: pipeline ranks; the world is always ``pp`` times what the other flags need.
        world: ranks in all.
        tolerance: largest relative difference of a loss that is still right, and why it is not 0.
        why: where ``tolerance`` comes from.
        repeat: compare with a second run of the same schedule, not with stock: what is random then
            has to be reproducible, and cannot be stock's.
        first: the oldest version that knows these flags.
        alone: stock cannot run it in a pipeline; it runs it without one.
        script: of the checkout.
    """

    name: str
    model: str = ""
    run: str = ""
    ours: str = ""
    drop: str = ""
    pp: int = 4
    world: int = 4
    tolerance: float = 0.0
    why: str = ""
    repeat: bool = False
    first: tuple[int, int] = (0, 16)
    script: str = "pretrain_gpt.py"
    alone: bool = False

    @property
    def stock(self) -> Feature:
        """What stock runs to compare with."""
        return replace(self, pp=1, world=self.world // self.pp) if self.alone else self


_CHEAP = "--pp-cheap-recompute"
_VOCABULARY = "--pp-vocab-parallel"
_LLAMA = """--position-embedding-type rope --swiglu --group-query-attention --num-query-groups 2
--normalization RMSNorm --disable-bias-linear"""
_HYBRID = "--spec tests.support.hybrid_spec SPEC --position-embedding-type rope "
_SUM = "two summands of a gradient are added in another order"
_CLIP = "the norm that clipping divides by is summed per rank, so in another order"

_PAIRS = "--overlap-moe-expert-parallel-comm"
_IN_PAIRS = (
    Feature(
        "pairs, EP 2",
        model=MOE + " --bf16",
        run="--expert-model-parallel-size 2",
        ours=_PAIRS,
        pp=2,
    ),
    # What stock runs here is its own combined 1F1B.
    Feature(
        "pairs, EP 2, both overlaps, beside stock's",
        model=MOE + " --bf16",
        run="--expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        f"{_PAIRS} {OVERLAP}",
        pp=2,
    ),
    Feature(
        "pairs, PP 4, EP 2, delayed weight gradients, cheap recompute",
        model=MOE + " --swiglu --bf16 --moe-shared-expert-intermediate-size 32",
        run="--expert-model-parallel-size 2 " + OVERLAP,
        ours=f"{_PAIRS} --delay-wgrad-compute {_CHEAP}",
        world=8,
    ),
    Feature(
        "pairs, TP 2, sequence parallel, EP 2, evaluation, fp16",
        model=MOE + " --fp16 --initial-loss-scale 65536",
        run="--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--eval-iters 2 --eval-interval 2 --clip-grad 1.0",
        ours=_PAIRS,
        pp=2,
        world=8,
        tolerance=1e-3,
        why=_SUM,
    ),
    Feature(
        "pairs, EP 2, CP 2, ramp-up, per-token loss, recompute selective",
        model=MOE + " --bf16",
        run="--expert-model-parallel-size 2 --context-parallel-size 2 --calculate-per-token-loss "
        "--train-iters 5 --rampup-batch-size 4 4 16 --recompute-granularity selective "
        "--recompute-modules core_attn",
        ours=_PAIRS,
        pp=2,
    ),
)

_SHARDS = "sums over the vocabulary are sums over its shards"
_TIED = "--untie-embeddings-and-output-weights"
_sharded = partial(Feature, ours=_VOCABULARY, tolerance=1e-5, why=_SHARDS)

_DEPTHS = """--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3
--position-embedding-type rope"""

_WITH_SHARDS = (
    _sharded("vocabulary"),
    _sharded(
        "vocabulary, tied, clipping, evaluation",
        run="--clip-grad 1.0 --eval-iters 2 --eval-interval 2",
        drop=_TIED,
    ),
    _sharded(
        "vocabulary, TP 2, DP 2, sequence parallel, bf16, both overlaps",
        model="--bf16",
        run="--tensor-model-parallel-size 2 --sequence-parallel " + OVERLAP,
        pp=2,
        world=8,
        tolerance=2e-2,
    ),
    _sharded(
        "vocabulary, TP 2, sequence parallel",
        run="--tensor-model-parallel-size 2 --sequence-parallel",
        pp=2,
    ),
    _sharded(
        "vocabulary, TP 2, tied",
        run="--tensor-model-parallel-size 2",
        drop=_TIED,
        pp=2,
    ),
    _sharded(
        "vocabulary, tied, DP 2, bf16, both overlaps",
        model="--bf16",
        run=OVERLAP,
        drop=_TIED,
        pp=2,
        tolerance=1e-2,
    ),
    _sharded(
        "vocabulary, CP 2, per-token loss",
        run="--context-parallel-size 2 --calculate-per-token-loss",
        pp=2,
    ),
    _sharded(
        "vocabulary, MoE, EP 2, bf16, both overlaps",
        model=MOE + " --bf16",
        run="--expert-model-parallel-size 2 " + OVERLAP,
        pp=2,
        tolerance=1e-2,
    ),
    _sharded(
        "vocabulary, offload, trace",
        ours=_VOCABULARY + " --pp-offload full --pp-offload-time 0.25 --pp-trace TRACE",
    ),
    _sharded(
        "vocabulary, PP 8",
        model="--num-layers 16",
        pp=8,
        world=8,
    ),
    _sharded(
        "vocabulary, fp16, loss scaling, recompute full, ramp-up",
        model="--fp16 --initial-loss-scale 65536",
        run="""--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --train-samples 36 --rampup-batch-size 4 2 24""",
        drop="--train-iters",
        tolerance=1e-2,
    ),
    _sharded(  # It has no effect. Stock is without it: with it, gradients of logits are in bf16.
        "vocabulary, fused cross entropy",
        ours=f"{_VOCABULARY} --cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
        tolerance=1e-6,
    ),
    _sharded("vocabulary, MTP", model=_DEPTHS, tolerance=1e-6),
    _sharded(  # Stock cannot load it into a pipeline: it looks for an output layer there.
        "vocabulary, MTP, tied, evaluation",
        model=_DEPTHS,
        run="--eval-iters 2 --eval-interval 2",
        drop=_TIED,
        pp=2,
        tolerance=1e-6,
        alone=True,
    ),
    _sharded(
        "vocabulary, MTP, TP 2, sequence parallel, detached heads",
        model=_DEPTHS + " --mtp-detach-heads",
        run="--tensor-model-parallel-size 2 --sequence-parallel",
        pp=2,
        tolerance=1e-6,
        first=(0, 19),
    ),
    _sharded(
        "vocabulary, MTP, CP 2, per-token loss",
        model=_DEPTHS,
        run="--context-parallel-size 2 --calculate-per-token-loss",
        pp=2,
        tolerance=1e-6,
    ),
    _sharded(
        "vocabulary, MTP, tied, bf16, both overlaps",
        model=_DEPTHS + " --bf16",
        run=OVERLAP,
        drop=_TIED,
        pp=2,
        tolerance=1e-2,
        alone=True,
    ),
)

FEATURES = (
    Feature("fp32"),
    Feature("bf16", model="--bf16"),
    Feature("fp16, loss scaling", model="--fp16 --initial-loss-scale 65536"),
    Feature("gradient clipping", run="--clip-grad 1.0", tolerance=1e-5, why=_CLIP),
    Feature("DP 2", pp=2),
    Feature("DP 2, overlap-grad-reduce, bf16", model="--bf16", run="--overlap-grad-reduce", pp=2),
    Feature("distributed optimizer, DP 2", model="--bf16", run="--use-distributed-optimizer", pp=2),
    Feature("... and both overlaps", model="--bf16", run=OVERLAP, pp=2),
    Feature("TP 2", run="--tensor-model-parallel-size 2", pp=2, tolerance=1e-5, why=_SUM),
    Feature(
        "TP 2, sequence parallel",
        run="--tensor-model-parallel-size 2 --sequence-parallel",
        pp=2,
        tolerance=1e-5,
        why=_SUM,
    ),
    Feature("CP 2", run="--context-parallel-size 2", pp=2),
    Feature("MoE", model=MOE),
    Feature("MoE, EP 2", model=MOE, run="--expert-model-parallel-size 2", pp=2),
    Feature(
        "MoE, EP 2, bf16, both overlaps",
        model=MOE + " --bf16",
        run="--expert-model-parallel-size 2 " + OVERLAP,
        pp=2,
    ),
    Feature("tied embeddings", drop=_TIED),
    Feature(
        "tied, bf16, both overlaps",
        model="--bf16",
        run=OVERLAP,
        drop=_TIED,
        pp=2,
    ),
    Feature(
        "rope, swiglu, GQA, RMSNorm",
        model=_LLAMA,
    ),
    Feature(
        "recompute full, uniform",
        run="""--recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1""",
    ),
    Feature(
        "recompute full, block",
        run="""--recompute-granularity full --recompute-method block
        --recompute-num-layers 1""",
    ),
    Feature("recompute selective", run="--recompute-granularity selective"),
    Feature("cheap recompute", ours=_CHEAP),
    Feature(
        "cheap recompute, core attention too, rope, swiglu, GQA, RMSNorm, bf16",
        model=_LLAMA + " --bf16",
        run="--recompute-activations",
        ours=_CHEAP,
    ),
    Feature(
        "cheap recompute, TP 2, sequence parallel",
        run="--tensor-model-parallel-size 2 --sequence-parallel",
        ours=_CHEAP,
        pp=2,
        tolerance=1e-5,
        why=_SUM,
    ),
    Feature(
        "cheap recompute, MoE, EP 2, bf16, both overlaps",
        model=MOE + " --swiglu --bf16",
        run="--expert-model-parallel-size 2 " + OVERLAP,
        ours=_CHEAP,
        pp=2,
    ),
    Feature(
        "evaluation",
        run="--eval-iters 2 --eval-interval 2",
    ),
    Feature(
        "evaluation, other batch",
        run="""--eval-iters 1 --eval-interval 2 --eval-global-batch-size 12
        --eval-micro-batch-size 2""",
        first=(0, 19),
    ),
    Feature(
        "batch-size ramp-up",
        run="--train-samples 36 --rampup-batch-size 4 2 24",
        drop="--train-iters",
    ),
    Feature(
        "fewer first and last layers",
        model="--num-layers 16",
        run="--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
    ),
    Feature(
        "embedding and loss count as layers",
        model="--num-layers 14",
        run="--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    Feature("layer layout", run="--pipeline-model-parallel-layout LAYOUT"),
    Feature(
        "MTP", model="--mtp-num-layers 1 --position-embedding-type rope", tolerance=1e-5, why=_SUM
    ),
    Feature(
        "MTP, bf16, both overlaps",
        model="--mtp-num-layers 1 --position-embedding-type rope --bf16",
        run=OVERLAP,
        pp=2,
        tolerance=1e-2,
        why=_SUM,
    ),
    Feature("per-token loss", run="--calculate-per-token-loss"),
    Feature("rerun off", run="--rerun-mode disabled"),
    Feature(
        "timers, log details",
        run="""--timing-log-level 2 --log-throughput --log-params-norm
        --log-num-zeros-in-grad""",
    ),
    Feature("skip-train", run="--skip-train --eval-iters 2"),
    Feature(
        "fused cross entropy",
        run="""--cross-entropy-loss-fusion
        --cross-entropy-fusion-impl native""",
    ),
    Feature("no overlap of p2p", run="--no-overlap-p2p-communication"),
    Feature(
        "TP 2, DP 2, sequence parallel, bf16, both overlaps",
        model="--bf16",
        run="--tensor-model-parallel-size 2 --sequence-parallel " + OVERLAP,
        pp=2,
        world=8,
        tolerance=1e-2,
        why=_SUM,
    ),
    Feature(
        "MoE, EP 2, TP 2",
        model=MOE,
        run="""--expert-model-parallel-size 2 --tensor-model-parallel-size 2
        --expert-tensor-parallel-size 1 --sequence-parallel""",
        pp=2,
        tolerance=1e-5,
        why=_SUM,
    ),
    Feature(
        "dropout (the same run twice)",
        run="--attention-dropout 0.1 --hidden-dropout 0.1",
        repeat=True,
    ),
    Feature(
        "dropout and recompute (the same run twice)",
        run="""--attention-dropout 0.1 --hidden-dropout 0.1 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1""",
        repeat=True,
    ),
    Feature(
        "profiler",
        run="""--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3
        --profile-ranks 0 --tensorboard-dir TENSORBOARD""",
    ),
    Feature("straggler log", run="--log-straggler --disable-straggler-on-startup"),
    Feature("offload, full", ours="--pp-offload full --pp-offload-time 0.25"),
    Feature(
        "offload, half, MoE, EP 2, bf16, both overlaps",
        model=MOE + " --bf16",
        run="--expert-model-parallel-size 2 " + OVERLAP,
        ours="--pp-offload half --pp-offload-time 0.2,0.3",
        pp=2,
    ),
    Feature(
        "offload, auto, measured, evaluation",
        run="--eval-iters 2 --eval-interval 2 --train-iters 5",  # costs are measured meanwhile
        ours="--pp-offload auto",
    ),
    Feature(
        "offload, full, TP 2, sequence parallel",
        run="--tensor-model-parallel-size 2 --sequence-parallel",
        ours="--pp-offload full --pp-offload-time 0.25",
        pp=2,
        tolerance=1e-5,
        why=_SUM,
    ),
    Feature(
        "offload, full, recompute selective, ramp-up",
        run="""--recompute-granularity selective --train-samples 36
        --rampup-batch-size 4 2 24""",
        ours="--pp-offload full --pp-offload-time 0.25",
        drop="--train-iters",
    ),
    Feature(
        "offload, full, cheap recompute",
        ours="--pp-cheap-recompute --pp-offload full --pp-offload-time 0.25",
    ),
    Feature(
        "hybrid",
        model=_HYBRID + "--hybrid-layer-pattern M*-MM*-M",
        drop="--num-layers",
        pp=2,
        world=2,
        first=(0, 18),
        script="pretrain_hybrid.py",
    ),
    Feature(
        "hybrid, tied, DP 2, bf16, both overlaps, offload",
        model=_HYBRID + "--hybrid-layer-pattern M*-MM*-M --bf16",
        run=OVERLAP,
        ours="--pp-offload half --pp-offload-time 0.2",
        drop="--num-layers --untie-embeddings-and-output-weights",
        pp=2,
        first=(0, 18),
        script="pretrain_hybrid.py",
    ),
    # Both ranks have experts under every placement: Megatron's log needs that until 0.19.
    Feature(
        "hybrid, MoE, EP 2, MTP",
        model=_HYBRID + "--hybrid-layer-pattern M*-EM*-E/M* " + MOE,
        run="--expert-model-parallel-size 2",
        drop="--num-layers",
        pp=2,
        tolerance=1e-5,
        why=_SUM,
        first=(0, 18),
        script="pretrain_hybrid.py",
    ),
    *_WITH_SHARDS,
    *_IN_PAIRS,
)
