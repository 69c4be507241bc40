"""Options of Megatron that training refuses beside ours."""

from __future__ import annotations

from typing import Any

from .._conflict import Conflict

_ORDER = "it works out what comes next from the order of stock's schedules; drop it"
_FSDP = (
    "it frees parameters after each pass, but a weight gradient may come passes later; use "
    "--use-distributed-optimizer"
)
_COUNT = "a file has a fixed number of microbatches; use a schedule's name"
V_PLACEMENT = "V placement"
SEVERAL_CHUNKS = "several model chunks a rank"
FILE = "a schedule file"
_LAST_RANK = (
    "Megatron's scripts look for the output layer on the last rank; use a schedule without V "
    "placement, e.g. zb-h1"
)


class _LocalAttention(Conflict):
    """A conflict with Megatron's local attention only; Transformer Engine's ignores the flag."""

    def found(self, args: Any) -> str | None:
        return super().found(args) if getattr(args, "transformer_impl", "") == "local" else None


SCHEDULE: tuple[Conflict, ...] = (
    Conflict("--cpu-offloading", "Megatron allows it only without a pipeline; drop it"),
    Conflict("--fine-grained-activation-offloading", _ORDER),
    Conflict(
        "--defer-embedding-wgrad-compute",
        "the schedule itself decides when the output layer's weight gradient is computed; drop it",
    ),
    Conflict("--use-megatron-fsdp", _FSDP),
    Conflict("--use-torch-fsdp2", _FSDP),
    Conflict(
        "--num-microbatches-with-partial-activation-checkpoints",
        "which microbatches may keep their activations depends on the order of stock's "
        "schedules; drop it and use a schedule with less memory",
    ),
    Conflict(
        "--overlap-param-gather-with-optimizer-step",
        "it expects chunks to start in the order of stock's interleaved schedule; use "
        "--overlap-param-gather alone",
    ),
    Conflict(
        "--hybrid-context-parallel",
        "it reorders microbatches inside stock's schedules; drop it",
    ),
    Conflict("--moe-paged-stash", _ORDER),
    Conflict(
        "--perform-rl-step",
        "inference between training steps runs its own pipeline through the model; drop one "
        "of them",
    ),
    Conflict(
        "--inprocess-restart",
        "the hooks of the first start would meet the second; let torchrun restart the ranks "
        "(--max-restarts)",
    ),
    Conflict("--rampup-batch-size", _COUNT, only=FILE),
    Conflict("--step-batch-size-schedule", _COUNT, only=FILE),
    Conflict(
        "--use-legacy-models",
        "Megatron's legacy models number their layers in loop order; drop it, or use a "
        "schedule without V placement, e.g. zb-h1",
        only=V_PLACEMENT,
    ),
    Conflict(
        "--heterogeneous-layers-config-path",
        "Megatron's scripts build these layers for one chunk a rank; use a schedule with one, "
        "e.g. zb-h1",
        only=V_PLACEMENT,
    ),
    Conflict(
        "--multiple-validation-sets",
        "Megatron's scripts take the data of model chunks for validation sets; use a schedule with "
        "one chunk, e.g. zb-h1, on two ranks",
        only=SEVERAL_CHUNKS,
    ),
    Conflict("--logits-save-dir", _LAST_RANK, only=V_PLACEMENT),
    Conflict("--logits-load-dir", _LAST_RANK, only=V_PLACEMENT),
    _LocalAttention(
        "--reset-attention-mask",
        "with --transformer-impl local the stages between the first and the last would look "
        "across documents, since Megatron's scripts make this mask on these two alone; use a "
        "schedule without V placement, e.g. zb-h1, on two ranks",
        only=V_PLACEMENT,
    ),
)


LOCAL, TRANSFORMER_ENGINE, WHOLE = "local", "transformer_engine", "full_iteration"
NO_ITERATION = "messages between ranks and the schedule's own bookkeeping cannot be captured"
NO_SPLIT = (
    "a captured backward pass computes weight gradients with it, and this schedule computes them "
    "later, in W"
)
NO_FILE = "Megatron's graphs are safe in stock's orders only"
COLD = "they are captured in the order of the steps before"
WARM_UP = "give --cuda-graph-warmup-steps 1 or more"
_FIXED = "graphs are replayed in the order in which they were captured; drop it"
_POOL = "a captured layer saves its tensors in the graphs' memory; drop it"


def implementation(args: Any) -> tuple[str, str] | None:
    """Which CUDA graphs are asked for, and the flags that say so; None without any.

    Args:
        args: Megatron's, before or after its validation, or a model's configuration.
    """
    asked = getattr(args, "cuda_graph_impl", None) or "none"
    flag = f"--cuda-graph-impl {asked}"
    for name, kind in (("enable_cuda_graph", LOCAL), ("external_cuda_graph", TRANSFORMER_ENGINE)):
        if getattr(args, name, None):
            asked, flag = kind, f"--{name.replace('_', '-')}"
    if asked == "none":
        return None
    # Up to core_v0.17 a whole iteration is a scope of local graphs, and later ones migrate that.
    for name in ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"):
        given = getattr(args, name, None) or ()
        given = given.replace(",", " ").split() if isinstance(given, str) else given
        if any(str(getattr(one, "name", one)) == WHOLE for one in given):
            return WHOLE, f"--cuda-graph-scope {WHOLE}"
    return asked, flag


def are_cold(args: Any) -> bool:
    """True if Transformer Engine's graphs are captured before any step; ``args`` as above, or as
    the words of a command line."""
    steps = getattr(args, "cuda_graph_warmup_steps", None)
    return (implementation(args) or "")[:1] == (TRANSFORMER_ENGINE,) and str(steps) == "0"


GRAPHS = (
    Conflict("--pp-offload", _POOL),
    Conflict("--pp-offload-chunks", _POOL),
    Conflict("--pp-cheap-recompute", _POOL),
    Conflict("--pp-profile-steps", _FIXED),
    Conflict("--rampup-batch-size", "it changes the number of microbatches; drop it"),
    Conflict("--step-batch-size-schedule", "it changes the number of microbatches; drop it"),
)

_BETWEEN = "passes of the vocabulary run between captured layers, in an order of their own; drop it"
_LOGITS = "no rank has a token's logits; drop it"


class _Given(Conflict):
    """A conflict with a flag of ours, whose value may be 0."""

    def found(self, args: Any) -> str | None:
        value = getattr(args, self.attribute, None)
        return None if value is None else str(value)


class _Saved(Conflict):
    """A conflict with a format of checkpoints, where the run saves or loads any."""

    def found(self, args: Any) -> str | None:
        names = ("save", "load", "pretrained_checkpoint")
        return super().found(args) if any(getattr(args, name, None) for name in names) else None


VOCABULARY: tuple[Conflict, ...] = (
    Conflict("--use-mup", "it scales embeddings and logits of whole matrices; drop it"),
    Conflict(
        "--variable-seq-lengths",
        "the ranks exchange hidden states of one shape; pad sequences and drop it",
    ),
    Conflict(
        "--init-model-with-meta-device",
        "parts are cut from matrices that have their initial values; drop it",
    ),
    _Given(
        "--pp-profile-steps",
        "times of the vocabulary's passes are not measured; drop it and give --pp-cost",
    ),
    Conflict("--cuda-graph-impl", _BETWEEN),
    Conflict("--enable-cuda-graph", _BETWEEN),
    Conflict("--external-cuda-graph", _BETWEEN),
    Conflict("--fp8-output-proj", "the output layer's parts are multiplied unquantized; drop it"),
    Conflict("--output-logit-dtype", "logits have the type of the parameters, then fp32; drop it"),
    Conflict(
        "--tensor-parallel-num-weight-shards",
        "it shards the vocabulary in another way; drop it",
    ),
    Conflict("--logits-save-dir", _LOGITS),
    Conflict("--logits-load-dir", _LOGITS),
    Conflict("--export-kd-teacher-load", _LOGITS),
    _Saved(
        "--ckpt-format",
        "it names tensors by rank, and no rank has a whole matrix; use torch_dist",
        off=("torch_dist",),
    ),
)

_ONE = "drop one of them"
_FULL = f"it belongs to --recompute-granularity full, and this recomputes parts of layers; {_ONE}"
_OF_FULL = ("recompute-method", "recompute-num-layers", "distribute-saved-activations")


class _Whole(Conflict):
    def found(self, args: Any) -> str | None:
        # The short form of selective recompute wins in Megatron too.
        return None if getattr(args, "recompute_activations", None) else super().found(args)


CHEAP_RECOMPUTE = (
    _Whole("--recompute-granularity", f"it recomputes whole layers; {_ONE}", values=("full",)),
    *(Conflict(f"--{name}", _FULL) for name in _OF_FULL),
    Conflict(
        "--use-transformer-engine-op-fuser",
        "it fuses norm, linear layers and activation function into one, with nothing between "
        f"them to discard; {_ONE}",
    ),
    Conflict(
        "--fp8-recipe",
        "recomputing would count a tensor twice in its scaling history; use another recipe, "
        "e.g. blockwise",
        values=("delayed",),  # Megatron's default
        beside="--fp8-format",
    ),
)
