"""Options of Megatron beside which training refuses what ``plan`` might propose: one list for both.

Features of training take their conflicts from here, as from ``lengths``, ``overlap``, ``slices``
and ``moe_conflicts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from .._conflict import Conflict, first_conflict
from .._input import attribute, flag_of
from ..schedule import GENERATORS
from .launches import GRAPHS as FLAGS_OF_GRAPHS
from .launches import ITERATION, modules_of

STOCK = ("1f1b", "interleaved")  # Megatron's own schedules

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


LOCAL, TRANSFORMER_ENGINE, WHOLE = "local", "transformer_engine", ITERATION
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
    names = map(attribute, FLAGS_OF_GRAPHS)
    if WHOLE in modules_of({name: getattr(args, name, None) for name in names}):
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
        "--pp-profile",
        "measured times of the last stage have the whole output layer in them; drop it and "
        "give --pp-cost",
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


def of_schedules(args: Any) -> str | None:
    """Why training takes none of our schedules beside ``args``; None: it takes some.

    Args:
        args: Megatron's arguments, as attributes.
    """
    found, graphs = first_conflict(SCHEDULE, args), implementation(args)
    if found is not None or graphs is None:
        return None if found is None else f"--pp-schedule does not support {found[1]}"
    kind, flag = graphs
    if kind == WHOLE:
        return f"--pp-schedule does not support {flag}: {NO_ITERATION}"
    if are_cold(args):
        return f"--pp-schedule does not support {flag}: {COLD}; {WARM_UP}"
    return _beside_graphs(args, args, ("--rampup-batch-size", "--step-batch-size-schedule"))


def of_file(args: Any) -> str | None:
    """Why training takes no schedule file beside ``args``; None: it takes one."""
    whole, graphs = of_schedules(args), implementation(args)
    if whole is not None:
        return whole
    if graphs is not None:
        return f"{FILE} cannot be combined with {graphs[1]}: {NO_FILE}"
    found = first_conflict(SCHEDULE, args, (FILE,))
    return None if found is None else f"{FILE} cannot be combined with {found[1]}"


def of_names(names: Iterable[str], args: Any) -> str | None:
    """Why training refuses some of these schedules beside ``args``; None: it takes all."""
    whole, graphs = of_schedules(args), implementation(args)
    for name in names:
        vee, several = GENERATORS[name].placement == "vee", GENERATORS[name].default_chunks > 1
        parts = (V_PLACEMENT,) * vee + (SEVERAL_CHUNKS,) * several
        found = first_conflict(SCHEDULE, args, parts)
        if whole is not None and name not in STOCK:
            return whole
        if graphs is not None and GENERATORS[name].split_backward:
            return f"--pp-schedule {name} does not support {graphs[1]}: {NO_SPLIT}"
        if found is not None:
            return f"--pp-schedule {name} does not support {found[1]}"
    return None


def of_options(args: Any, **options: Any) -> str | None:
    """Why training refuses ``options``, of ours and by argument name, beside ``args``; None: it
    does not."""
    given = SimpleNamespace(**{**vars(args), **options})
    if any(options.values()) and (whole := of_schedules(args)) is not None:
        return whole
    for name, table in (("vocab_parallel", VOCABULARY), ("cheap_recompute", CHEAP_RECOMPUTE)):
        found = first_conflict(table, given) if options.get(f"pp_{name}") else None
        if found is not None:
            return f"{flag_of(f'pp_{name}')} does not support {found[1]}"
    return _beside_graphs(args, SimpleNamespace(**options))


def _beside_graphs(args: Any, options: Any, flags: Sequence[str] = ()) -> str | None:
    graphs = implementation(args)
    if graphs is None:
        return None
    found = first_conflict([rule for rule in GRAPHS if not flags or rule.flag in flags], options)
    return None if found is None else f"{graphs[1]} does not support {found[1]}"
