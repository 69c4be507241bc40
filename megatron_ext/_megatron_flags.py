"""Megatron's flags: what each is to a comparison, and which values a CPU run needs.

One table for the launcher, ``prove``, ``plan`` and ``doctor``. ``tests/checkout`` compares it with
the parsers of Megatron: a flag that a new version adds has to get a kind here.
"""

from __future__ import annotations

import functools

# Kinds.
LAYOUT = "layout"  # how work is divided and ordered, never what is computed
OURS = "ours"
MODEL = "model"  # what is computed, and sizes
OUTSIDE = "outside"  # files, logs, processes: no influence on the numbers of the first steps
GPU = "gpu"  # only a GPU runs it; without it the same in exact arithmetic
PRECISION = "precision"  # the comparison chooses its own
RANDOM = "by design"  # its result depends on the layout by design
OTHER = "other"  # of other tasks than pretraining a language model on tokens

# By kind: names, and beginnings with a * at their end. The longest that fits decides; --no-X and
# --disable-X are of X's kind unless they stand here themselves.
_KINDS = {
    LAYOUT: """
        --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --hierarchical-context-parallel-sizes --cp-comm-type --expert-model-parallel-size
        --expert-tensor-parallel-size --num-layers-per-virtual-pipeline-stage
        --num-virtual-stages-per-pipeline-rank --microbatch-group-size-per-virtual-pipeline-stage
        --pipeline-model-parallel-layout --decoder-first-pipeline-num-layers
        --decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --standalone-embedding-stage --sequence-parallel
        --use-distributed-optimizer --num-distributed-optimizer-instances --overlap-grad-reduce
        --overlap-param-gather --overlap-param-gather-with-optimizer-step --no-align-grad-reduce
        --no-align-param-gather --ddp-bucket-size --ddp-num-buckets --ddp-average-in-collective
        --ddp-pad-buckets-for-high-nccl-busbw --no-overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --overlap-moe-expert-parallel-comm
        --delay-wgrad-compute --no-async-tensor-model-parallel-allreduce --use-tp-pp-dp-mapping
        --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules
        --recompute-activations --distribute-saved-activations --mtp-use-repeated-layer
        --disable-align-grad-reduce --disable-async-tensor-model-parallel-allreduce --gtp-*
        --create-all-gather-group --overlap-dispatch-backward-with-experts-wgrad
        --ep-overlap-early-attn-memory-release --expert-tensor-parallel-num-weight-shards
        --tensor-parallel-num-weight-shards --outer-dp-sharding-strategy --fsdp-*
        --megatron-fsdp-* --torch-fsdp2-* --enable-full-sharding-in-hsdp
        --max-seqlen-per-dp-cp-rank --hybrid-context-parallel""",
    OURS: "--pp-* --moe-pipeline-* --moe-memory-* --offload-*",
    OUTSIDE: """
        --log-* --tensorboard* --wandb* --profile* --timing* --memory-snapshot* --record-memory*
        --save* --load* --no-save* --no-load* --finetune* --eval-* --exit-* --data-* --train-data*
        --valid-data* --test-data* --tokenizer-* --vocab-file* --merge-file* --tiktoken* --split*
        --mock-data* --num-workers* --dataloader* --distributed-timeout* --distributed-backend*
        --ckpt-* --async-save* --use-dist-ckpt* --dist-ckpt* --use-persistent-ckpt*
        --use-checkpoint* --auto-detect-ckpt* --non-persistent* --replication* --one-logger*
        --enable-one-logger* --no-one-logger* --app-tag* --local-rank* --nccl-*
        --high-priority-stream* --manual-gc* --empty-unused* --no-create-attention-mask* --no-mmap*
        --num-dataset* --cache-* --object-storage* --train-samples* --lr-* --min-lr*
        --rampup-batch-size* --start-weight-decay* --end-weight-decay* --weight-decay-incr*
        --check-for-* --no-check-for* --rerun* --error-injection* --result-* --straggler*
        --disable-straggler* --logging-level* --make-vocab-size-divisible-by* --per-split*
        --full-validation* --no-initialization* --override-opt* --use-checkpoint-opt* --retro-*
        --inference-* --barrier-with* --no-barrier* --num-experts-per-log* --deterministic-mode*
        --train-sync-interval* --adam-eps* --seed* --te-rng* --use-cpu-initialization*
        --perform-initialization* --fim-* --perform-rl* --step-batch-size* --decrease-batch*
        --legacy-tokenizer* --trust-* --muon-* --use-layer-wise-* --no-use-layer-wise-*
        --no-use-tokenizer-model* --disable-use-tokenizer-model* --adlr-* --async-ckpt-*
        --async-strategy --calc-ft-timeouts --chat-template --check-weight-hash* --config-logger-*
        --flight-recorder-* --enable-ft-package --ft-* --enable-msc --msc --stream-ckpt-dequant
        --strict-fsdp-dtensor-load --distrib-optim-* --dump-* --fault-injector-*
        --fake-process-group --gloo-process-groups --gpu-sniff-* --inprocess-* --mid-level-dataset*
        --multiple-validation-sets --validation-set-names --null-tokenizer-* --nvtx-ranges --otel-*
        --override-ckpt-iteration --per-dataset-* --persistent-save-interval
        --pretrained-checkpoint --pytorch-profiler-* --use-pytorch-profiler --record-shapes
        --run-workload-inspector-server --skip-train --start-eval-at-iter
        --use-mp-args-from-checkpoint-args --use-gigatoken --verify-integrity --onnx-safe
        --allow-ambiguous-pad-tokens --init-model-with-meta-device --test-mode""",
    GPU: """
        --transformer-impl* --use-flash-attn* --attention-backend* --use-mcore-models* --tp-comm-*
        --disable-tp-comm* --cuda-graph* --enable-cuda-graph* --external-cuda* --moe-grouped-gemm*
        --moe-use-legacy-grouped-gemm* --moe-permute-fusion* --moe-router-fusion*
        --moe-enable-deepep* --moe-flex-dispatcher* --moe-deepep* --moe-hybridep*
        --cross-entropy-loss-fusion* --cross-entropy-fusion-impl* --use-nccl-ub* --use-sharp*
        --use-fused* --apply-rope-fusion* --no-rope-fusion* --mla-down-proj-fusion*
        --fine-grained-activation-offloading* --offload-modules* --cpu-offloading*
        --optimizer-cpu-offload* --optimizer-offload* --no-pin-cpu* --use-torch-optimizer-for*
        --use-precision-aware* --moe-use-device-initiated* --moe-apply-probs-on-input-fusion*
        --batch-invariant* --use-transformer-engine-op* --gradient-accumulation-fusion*
        --no-gradient-accumulation-fusion* --use-te-* --moe-shared-expert-overlap* --fused-*
        --no-fused* --bias-* --flash-decode* --apply-layernorm-1p*
        --defer-embedding-wgrad-compute* --wgrad-deferral-limit* --min-offloaded*
        --activation-offload* --overlap-cpu-optimizer* --nvfp4* --symmetric-* --sharp-enabled-group
        --high-priority-a2a-comm-stream --use-ring-exchange-p2p --optimizer-cuda-graph
        --pipeline-model-parallel-comm-backend --delay-offload-until-cuda-graph
        --use-grouped-gemm-* --flash-attention-version --fallback-to-eager-attn --kitchen-*
        --use-kitchen-attention --fine-grained-offloading-* --delta-offload-bytes*""",
    PRECISION: """
        --bf16* --fp16* --fp8-* --fp4-* --first-last-layers-bf16* --num-layers-at-*
        --main-grads-dtype* --main-params-dtype* --exp-avg* --accumulate-allreduce-grads*
        --attention-softmax-in-fp32* --apply-query-key-layer-scaling* --loss-scale*
        --initial-loss-scale* --min-loss-scale* --hysteresis* --grad-reduce-in-bf16*
        --moe-router-dtype* --fp32-residual* --te-precision* --keep-fp8* --moe-router-padding*
        --params-dtype* --disable-bf16* --reuse-grad-buf* --output-logit-dtype
        --ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32*""",
    RANDOM: """
        --moe-expert-capacity-factor* --moe-pad-expert-input-to-capacity*
        --moe-token-drop-policy* --moe-input-jitter-eps* --attention-dropout* --hidden-dropout*""",
    MODEL: """
        --activation-func-clamp-value --adam-beta* --add-qkv-bias
        --apply-residual-connection-post-layernorm --apply-wd-to-qk-layernorm
        --attention-output-gate --batch-size --calculate-per-token-loss --clip-grad --decoder-*
        --decoupled-* --disable-bias-linear --disable-clone-scatter-output-in-embedding
        --no-clone-scatter-output-in-embedding --dsa-* --embedding-init-method-std
        --dataloader-inter-document-masking
        --encoder-num-layers --encoder-seq-length --eod-mask-loss --experimental-attention-variant
        --ffn-hidden-size --freeze-all-layers --gdp-* --global-batch-size --glu-linear-offset
        --group-query-attention --head-lr-mult --heterogeneous-layers-config-* --hidden-size
        --hybrid-* --init-method-* --is-hybrid-model --kv-channels --kv-lora-rank --linear-*
        --lion-beta* --lr --mamba-* --max-position-embeddings --enable-mhc-connections --mhc-*
        --micro-batch-size --mlp-chunks-for-training --moe-* --mrope-section --mscale*
        --mtp-* --multi-latent-attention --mup-* --use-mup --no-position-embedding --no-rope-freq
        --no-weight-decay-cond-type --norm-epsilon --normalization --num-attention-heads
        --num-experts --num-layers --num-query-groups --openai-gelu --optimizer
        --padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size --position-embedding-type
        --q-lora-rank --qk-* --quick-geglu --relative-attention-* --reset-attention-mask
        --reset-position-ids --rope-* --rotary-* --seq-length --sgd-momentum --sft
        --sft-tokenizer-prompt-format --softmax-type --spec --squared-relu --swiglu --train-iters
        --untie-embeddings-and-output-weights --use-rope-scaling --use-rotary-position-embeddings
        --v-head-dim --vocab-extra-ids --vocab-size --weight-decay --window-* --yarn-*
        --original-max-position-embeddings --num-channels --use-legacy-models --yaml-cfg
        --model-parallel-size --checkpoint-activations --warmup --lazy-mpu-init
        --use-megatron-fsdp --use-torch-fsdp2 --use-custom-fsdp --enable-experimental
        --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-* --disable-jit-fuser
        --no-gradient-reduce-div-fusion --no-data-sharding --no-scatter-gather-tensors-in-pipeline
        --phase-transition-iterations --iterations-to-skip""",
    OTHER: """
        --bert-* --biencoder-* --block-data-path --classes-fraction --decode-only-cuda-graphs
        --dino-* --chunked-prefill --enable-chunked-prefill --embedding-path --evidence-data-path
        --grpo-* --ict-* --img-* --indexer-* --iter-per-epoch --langrl-* --logits-* --mask-*
        --max-tokens-to-oom --mlp-chunks-for-prefill --num-classes --num-speculative-tokens
        --output-bert-embeddings --patch-dim --query-in-block-prob --refit-method --retriever-*
        --rl-* --sample-rate --short-seq-prob --suggested-communication-unit-size --swin-*
        --titles-data-path --use-legacy-static-engine --use-one-sent-docs
        --use-same-sampling-seed-across-dp-ranks --vision-*""",
}

# On CPU ranks: values that a run needs (another one is an error), those it gets where none is
# given, and switches.
CPU_NEEDS = {"--distributed-backend": "gloo", "--transformer-impl": "local"}
CPU_DEFAULTS = {"--num-workers": "0"}
CPU_SWITCHES = (
    "--use-cpu-initialization",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)
# In runs that are compared: data, a constant learning rate, no rounding that Adam makes large.
# What is not a number is compared, too, and named. The one evaluation is after the last step.
COMPARED = {
    **{"--lr": "1e-3", "--lr-decay-style": "constant", "--adam-eps": "1e-4"},
    **{"--attention-dropout": "0", "--hidden-dropout": "0", "--mock-data": None},
    **{"--tokenizer-type": "NullTokenizer", "--split": "95,5,0", "--eval-iters": "1"},
    **{"--eval-interval": "1000000", "--log-interval": "1", "--seed": "1234"},
    **{"--ckpt-format": "torch_dist", "--no-check-for-nan-in-loss-and-grad": None},
    "--rerun-mode": "disabled",
}
# What a command says of its model and batch; no comparison runs without these.
KEPT = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *("--seq-length", "--max-position-embeddings", "--micro-batch-size", "--global-batch-size"),
    *("--vocab-size", "--make-vocab-size-divisible-by", "--train-iters", *COMPARED),
)
# Values that mean "not in use".
NEUTRAL = {
    **dict.fromkeys(("--attention-dropout", "--hidden-dropout"), ("0", "0.0")),
    **{"--moe-input-jitter-eps": ("0", "0.0"), "--lr-decay-style": ("constant",)},
    **{"--rerun-mode": ("disabled",), "--cuda-graph-impl": ("none",), "--pp-offload": ("off",)},
    **{"--context-parallel-size": ("1",), "--num-distributed-optimizer-instances": ("1",)},
    **{"--mlp-chunks-for-training": ("1",), "--cpu-offloading-num-layers": ("0",)},
}
# Small runs: the most that a number may be, and what other sizes become (``prove.shrink``).
MOST = {
    **{"--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 4},
    **{"--context-parallel-size": 2, "--expert-model-parallel-size": 2},
    **{"--expert-tensor-parallel-size": 2, "--num-distributed-optimizer-instances": 2},
    **{"--micro-batch-size": 2, "--recompute-num-layers": 1, "--mtp-num-layers": 2},
    **{"--moe-router-topk": 2, "--moe-router-num-groups": 2, "--moe-router-group-topk": 1},
    "--pp-slices": 4,
}
SMALL = {
    **dict.fromkeys(("--kv-channels", "--qk-head-dim", "--qk-pos-emb-head-dim"), "head"),
    **dict.fromkeys(("--v-head-dim", "--mamba-head-dim", "--mamba-state-dim"), "head"),
    **dict.fromkeys(("--linear-key-head-dim", "--linear-value-head-dim"), "head"),
    **dict.fromkeys(("--q-lora-rank", "--kv-lora-rank", "--moe-latent-size"), "half"),
    **dict.fromkeys(("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"), "hidden"),
    **{"--mamba-num-groups": "tp", "--mamba-num-heads": "heads"},
    **dict.fromkeys(("--linear-num-key-heads", "--linear-num-value-heads"), "two a tp"),
}
# What they do not keep, by the beginning of its name, and why.
_SHORT = "the sequence is short"
_16_BIT = "Megatron has it for 16-bit models only"
NOT_KEPT = {
    "--hierarchical-context-parallel-sizes": "two CP ranks have none",
    "--cp-comm-type": "needs a GPU",
    "--overlap-param-gather-with-optimizer-step": "not with distributed checkpoints",
    **{"--original-max-position-embeddings": _SHORT, "--window-size": _SHORT},
    "--decoder-seq-length": _SHORT,
    "--pp-reorder-microbatches": "microbatches are compared by their place",
    **{"--overlap-moe-expert-parallel-comm": _16_BIT, "--delay-wgrad-compute": _16_BIT},
}
# Values that others replace, and why; an empty one: nothing does.
_MUON = "it orthogonalizes each rank's part of a weight by itself"
_BALANCE = "--moe-router-load-balancing-type"
_COUNTS = "it counts tokens of the ranks' batches before this one"
REPLACEMENTS = (
    ("--moe-token-dispatcher-type", "flex", "alltoall", "a dispatcher of GPUs"),
    (_BALANCE, "global_aux_loss", "aux_loss", _COUNTS),
    (_BALANCE, "sinkhorn", "none", "it balances each rank's own tokens"),
    ("--optimizer", "muon", "adam", _MUON),
    ("--optimizer", "dist_muon", "adam", _MUON),
    ("--recompute-modules", "moe_act", "", "needs grouped products of experts"),
)
# Fully sharded data parallelism, which no CPU rank runs.
SHARDED = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
# Flags that one value follows whatever it is: it is replaced, or dropped with its flag.
REPLACED = ("--lr", "--min-lr", "--train-iters", "--train-samples", "--seed", "--vocab-size")
# Of what is dropped, what the numbers of later steps depend on, by the beginning of its name.
_RATE = "the learning rate is constant; in the checkpoint's runs it rises, then falls"
LATER = {
    **{"--lr-": _RATE, "--min-lr": _RATE},
    **dict.fromkeys(("--rampup-batch-size", "--step-batch-size"), "the batch has one size"),
    "--decrease-batch": "the batch has one size",
    **dict.fromkeys(("--start-weight-decay", "--end-weight-decay"), "weight decay is constant"),
    "--weight-decay-incr": "weight decay is constant",
    "--data-parallel-random-init": "all ranks start from one checkpoint",
}
_DROPS = "which tokens an expert drops depends on the layout"
_NUMBERS = "random numbers depend on the layout"
RANDOM_BECAUSE = {
    **{"--moe-expert-capacity-factor": _DROPS, "--moe-token-drop-policy": _DROPS},
    "--moe-pad-expert-input-to-capacity": "it pads to a capacity that depends on the layout",
    "--moe-input-jitter-eps": _NUMBERS,
    **{"--attention-dropout": _NUMBERS, "--hidden-dropout": _NUMBERS},
}
# A flag that is of no use, or an error, without one of these.
NEEDS = {
    "--expert-model-parallel-size": ("--num-experts",),
    "--mtp-loss-scaling-factor": ("--mtp-num-layers",),
    "--num-query-groups": ("--group-query-attention",),
    "--sequence-parallel": ("--tensor-model-parallel-size",),
    "--num-layers-per-virtual-pipeline-stage": ("--pipeline-model-parallel-size",),
    "--num-virtual-stages-per-pipeline-rank": ("--pipeline-model-parallel-size",),
    "--microbatch-group-size-per-virtual-pipeline-stage": ("--pipeline-model-parallel-size",),
    "--overlap-param-gather": ("--use-distributed-optimizer",),
    "--recompute-method": ("--recompute-granularity",),
    "--recompute-num-layers": ("--recompute-granularity",),
    "--recompute-modules": ("--recompute-granularity",),
    "--expert-tensor-parallel-size": ("--expert-model-parallel-size",),
    "--cp-comm-type": ("--context-parallel-size",),
    "--delay-wgrad-compute": ("--overlap-moe-expert-parallel-comm",),
}


@functools.cache
def _tables() -> tuple[dict[str, str], dict[str, str]]:
    """Kinds by name and by beginning."""
    names: dict[str, str] = {}
    beginnings: dict[str, str] = {}
    for kind, words in _KINDS.items():
        for word in words.split():
            (beginnings if word.endswith("*") else names)[word.rstrip("*")] = kind
    return names, beginnings


@functools.cache
def kind_of(flag: str) -> str:
    """A flag's kind; empty: not known."""
    names, beginnings = _tables()
    if flag in names:
        return names[flag]
    for end in range(len(flag), 2, -1):
        if flag[:end] in beginnings:
            return beginnings[flag[:end]]
    for sign in ("--no-", "--disable-"):
        if flag.startswith(sign):
            return kind_of("--" + flag.removeprefix(sign))
    return ""


def names() -> list[str]:
    """All flags that the table has by name."""
    return [*_tables()[0]]
