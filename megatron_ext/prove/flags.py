"""The flags of a training command: in order, with what each of them is to a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# How the work is divided and ordered, never what is computed: one process runs without them.
LAYOUT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--hierarchical-context-parallel-sizes",
    "--cp-comm-type",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--standalone-embedding-stage",
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--num-distributed-optimizer-instances",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--overlap-param-gather-with-optimizer-step",
    "--no-align-grad-reduce",
    "--no-align-param-gather",
    "--ddp-bucket-size",
    "--ddp-num-buckets",
    "--ddp-average-in-collective",
    "--ddp-pad-buckets-for-high-nccl-busbw",
    "--no-overlap-p2p-communication",
    "--overlap-p2p-communication-warmup-flush",
    "--overlap-moe-expert-parallel-comm",
    "--delay-wgrad-compute",
    "--no-async-tensor-model-parallel-allreduce",
    "--use-tp-pp-dp-mapping",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--recompute-activations",
    "--distribute-saved-activations",
    "--mtp-use-repeated-layer",
)
# Flags of ours start with these.
OURS = ("--pp-", "--moe-pipeline-", "--moe-memory-", "--offload-")
# A layout flag that is of no use, or an error, without one of these.
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
# What every run needs.
KEPT = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--mock-data"),
    *("--max-position-embeddings", "--micro-batch-size", "--global-batch-size", "--vocab-size"),
    *("--make-vocab-size-divisible-by", "--train-iters", "--lr", "--lr-decay-style", "--adam-eps"),
    *("--attention-dropout", "--hidden-dropout", "--tokenizer-type", "--split", "--eval-iters"),
    *("--eval-interval", "--log-interval", "--seed", "--ckpt-format"),
    *("--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "--ffn-hidden-size"),
)
# Without influence on the numbers of the first steps, or about files that are not here.
DROPPED = (
    *("--log-", "--tensorboard", "--wandb", "--profile", "--timing", "--memory-snapshot"),
    *("--record-memory", "--save", "--load", "--no-save", "--no-load", "--finetune"),
    *("--eval-", "--exit-", "--data-", "--train-data", "--valid-data", "--test-data"),
    *("--tokenizer-", "--vocab-file", "--merge-file", "--tiktoken", "--split", "--mock-data"),
    *("--num-workers", "--dataloader", "--distributed-timeout", "--distributed-backend"),
    *("--ckpt-", "--async-save", "--use-dist-ckpt", "--dist-ckpt", "--use-persistent-ckpt"),
    *("--use-checkpoint", "--ckpt", "--auto-detect-ckpt", "--non-persistent", "--replication"),
    *("--enable-one-logger", "--one-logger", "--no-one-logger", "--one-logger-", "--app-tag"),
    *("--local-rank", "--nccl-", "--high-priority-stream", "--manual-gc", "--empty-unused"),
    *("--no-create-attention-mask", "--no-mmap", "--num-dataset", "--cache-", "--object-storage"),
    *("--train-samples", "--lr-", "--min-lr", "--rampup-batch-size", "--start-weight-decay"),
    *("--end-weight-decay", "--weight-decay-incr", "--check-for-", "--no-check-for", "--rerun"),
    *("--error-injection", "--result-", "--straggler", "--disable-straggler", "--logging-level"),
    *("--make-vocab-size-divisible-by", "--per-split", "--full-validation", "--no-initialization"),
    *("--override-opt", "--use-checkpoint-opt", "--retro-", "--inference-", "--barrier-with"),
    *("--no-barrier", "--num-experts-per-log", "--deterministic-mode", "--train-sync-interval"),
    *("--adam-eps", "--seed", "--te-rng", "--use-cpu-initialization", "--perform-initialization"),
    *("--fim-", "--perform-rl", "--step-batch-size", "--decrease-batch", "--legacy-tokenizer"),
    *("--trust-", "--muon-", "--use-layer-wise-", "--no-use-layer-wise-"),
)
# Of what is dropped, what the numbers of later steps depend on, by the beginning of its name.
_RATE = "the learning rate is constant; in the checkpoint's runs it rises, then falls"
SCHEDULED = {
    "--lr-": _RATE,
    "--min-lr": _RATE,
    **dict.fromkeys(("--rampup-batch-size", "--step-batch-size"), "the batch has one size"),
    "--decrease-batch": "the batch has one size",
    **dict.fromkeys(("--start-weight-decay", "--end-weight-decay"), "weight decay is constant"),
    "--weight-decay-incr": "weight decay is constant",
    "--data-parallel-random-init": "all ranks start from one checkpoint",
}
# Only a GPU runs these; the computation without them is the same in exact arithmetic.
GPU_ONLY = (
    *("--transformer-impl", "--use-flash-attn", "--attention-backend", "--use-mcore-models"),
    *("--tp-comm-", "--disable-tp-comm", "--cuda-graph", "--enable-cuda-graph", "--external-cuda"),
    *("--moe-grouped-gemm", "--moe-use-legacy-grouped-gemm", "--moe-permute-fusion"),
    *("--moe-router-fusion", "--moe-enable-deepep", "--moe-flex-dispatcher", "--moe-deepep"),
    *("--moe-hybridep", "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"),
    *("--use-nccl-ub", "--use-sharp", "--use-fused", "--apply-rope-fusion", "--no-rope-fusion"),
    *("--mla-down-proj-fusion", "--fine-grained-activation-offloading", "--offload-modules"),
    *("--cpu-offloading", "--optimizer-cpu-offload", "--optimizer-offload", "--no-pin-cpu"),
    *("--use-torch-optimizer-for", "--use-precision-aware", "--moe-use-device-initiated"),
    *("--moe-apply-probs-on-input-fusion", "--batch-invariant", "--use-transformer-engine-op"),
    *("--gradient-accumulation-fusion", "--no-gradient-accumulation-fusion", "--use-te-"),
    *("--moe-shared-expert-overlap", "--fused-", "--no-fused", "--bias-", "--flash-decode"),
    *("--apply-layernorm-1p", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit"),
    *("--min-offloaded", "--activation-offload", "--overlap-cpu-optimizer", "--nvfp4"),
)
# Precisions; the comparison chooses its own.
PRECISION = (
    *("--bf16", "--fp16", "--fp8-", "--fp4-", "--first-last-layers-bf16", "--num-layers-at-"),
    *("--main-grads-dtype", "--main-params-dtype", "--exp-avg", "--accumulate-allreduce-grads"),
    *("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling", "--loss-scale"),
    *("--initial-loss-scale", "--min-loss-scale", "--hysteresis", "--grad-reduce-in-bf16"),
    *("--moe-router-dtype", "--fp32-residual", "--te-precision", "--keep-fp8"),
    *("--moe-router-padding", "--params-dtype", "--disable-bf16", "--reuse-grad-buf"),
)
# What a layout changes by design: which tokens an expert drops, random numbers, sums over ranks'
# batches. Each is replaced, and the report says so.
BY_DESIGN = {
    "--moe-expert-capacity-factor": "which tokens an expert drops depends on the layout",
    "--moe-pad-expert-input-to-capacity": "it pads to a capacity that depends on the layout",
    "--moe-token-drop-policy": "which tokens an expert drops depends on the layout",
    "--moe-input-jitter-eps": "random numbers depend on the layout",
    "--attention-dropout": "random numbers depend on the layout",
    "--hidden-dropout": "random numbers depend on the layout",
}


class Flags:
    """Flags with their values, in the order of the command; the last of equal ones counts.

    Args:
        words: ``--name value ...``, ``--name=value``, ``--switch``.

    Raises:
        ValueError: a word stands before the first flag.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._values: dict[str, list[str]] = {}
        values: list[str] | None = None
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word.partition("=")
                values = [value] if equals else []
                self._values.pop(name, None)
                self._values[name] = values
            elif values is None:
                raise ValueError(f"{word!r} stands where a flag (--name) was expected")
            else:
                values.append(word)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        """All of them."""
        return list(self._values)

    @property
    def words(self) -> list[str]:
        """As a command has them."""
        return [w for name, values in self._values.items() for w in (name, *values)]

    def copy(self) -> Flags:
        """Another one with the same flags."""
        return Flags(self.words)

    def text(self, name: str) -> str:
        """``--name values`` as the command has it."""
        return " ".join((name, *self._values[name]))

    def values(self, name: str) -> list[str]:
        """What follows a flag; nothing where it is absent."""
        return self._values.get(name, [])

    def number(self, name: str, default: int) -> int:
        """A flag's one whole number.

        Raises:
            ValueError: it has another value.
        """
        values = self.values(name)
        if not values:
            return default
        try:
            return int(values[0])
        except ValueError:
            raise ValueError(f"{self.text(name)}: not a whole number") from None

    @property
    def slices(self) -> tuple[int, bool] | None:
        """Into how many slices sequences are cut, and whether of equal lengths; None: into none."""
        count = self.number("--pp-slices", 1)
        return (count, self.values("--pp-slice-cut") == ["even"]) if count > 1 else None

    def set(self, name: str, *values: object) -> None:
        """Give a flag these values, where it stands or at the end."""
        self._values[name] = [str(value) for value in values]

    def drop(self, *names: str) -> None:
        """Remove flags, where they are."""
        for name in names:
            self._values.pop(name, None)

    def matching(self, prefixes: Sequence[str]) -> list[str]:
        """The names that start with one of ``prefixes``."""
        return [name for name in self._values if name.startswith(tuple(prefixes))]


def is_layout(name: str) -> bool:
    """True for a flag that divides or orders the work, stock's or ours."""
    return name in LAYOUT or name.startswith(OURS)
