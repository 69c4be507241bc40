"""What of Megatron MoE layers in chunks do not support: one list for training and planning."""

from __future__ import annotations

from typing import Any

from .._conflict import Conflict

ACTIVATED = "s0"
RESTORED = "s1 to s4"
OFFLOADED = "s1, s2"
CHOSEN = "auto"
SPLIT = "split backward passes"

_ONE_CALL = "it works on a whole layer at once, which runs in chunks here; drop it"
_SCHEDULE = "its schedule calls the parts of an MoE layer itself and would pass the chunks by"
_THRICE = "the experts would be computed three times"
_ATTENTION = (
    "use --cuda-graph-impl transformer_engine and --cuda-graph-modules attn "
    "(before core_v0.18 --cuda-graph-scope attn)"
)
_WHOLE = f"such a graph has fixed sizes and holds whole layers, experts too; {_ATTENTION}"
_PADDED = (
    "rows are counted before chunks are cut, so a chunk's are no multiple of what kernels need; "
    "drop it, the experts pad each chunk themselves"
)
_COPIED = (
    "copies to the host would take Transformer Engine's quantized weights with them; use "
    "--moe-memory-reuse s3, s4 or none"
)
_SHARDED = "it gathers and frees parameters around whole layers; use --use-distributed-optimizer"

# What Transformer Engine's graphs may hold beside MoE layers in chunks.
_CAPTURED = ("attn", "mlp", "mamba")


class _FlexConflict(Conflict):
    """Of the flex dispatcher only; the others ignore the flag."""

    def found(self, args: Any) -> str | None:
        flex = getattr(args, "moe_token_dispatcher_type", None) == "flex"
        return super().found(args) if flex else None


class _MoreShards(Conflict):
    """More shards of the experts' weights than tensor-parallel ranks: they are gathered."""

    def found(self, args: Any) -> str | None:
        dense = getattr(args, "tensor_model_parallel_size", None) or 1
        ranks = getattr(args, "expert_tensor_parallel_size", None) or dense
        shards = getattr(args, self.attribute, None) or 1
        return str(shards) if shards > ranks else None


class _CapturedExperts(Conflict):
    """Transformer Engine's graphs, where they hold parts of an MoE layer."""

    def found(self, args: Any) -> str | None:
        external = getattr(args, "external_cuda_graph", None)
        if not external and getattr(args, "cuda_graph_impl", None) != "transformer_engine":
            return None
        names: list[str] = []
        # Its names before core_v0.18, for the old name since then, and since then.
        for name in ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"):
            given = getattr(args, name, None) or ()
            given = given.split(",") if isinstance(given, str) else given
            names += [str(getattr(one, "name", one)) for one in given]
        if not names:
            return "of whole layers"
        return " ".join(name for name in names if name not in _CAPTURED) or None


CONFLICTS = (
    Conflict(
        "--moe-token-dispatcher-type",
        "its kernels do not expose where rows went, so none can be restored; use "
        "--moe-memory-reuse none, or alltoall",
        values=("flex",),
        only=RESTORED,
    ),
    Conflict(
        "--moe-token-dispatcher-type",
        "its chunks are one autograd graph, in which nothing is computed again; use "
        "--recompute-modules moe_act, or alltoall",
        values=("flex",),
        only=ACTIVATED,
    ),
    Conflict(
        "--moe-token-dispatcher-type",
        "plans are chosen by the rows of each expert, which its kernels count for themselves; name "
        "--moe-pipeline-chunks and --moe-memory-reuse none, or use alltoall",
        values=("flex",),
        only=CHOSEN,
    ),
    Conflict(
        "--moe-token-dispatcher-type",
        "its chunks are one autograd graph, of which weight gradients cannot wait in parts; use "
        "--pp-schedule 1f1b or interleaved, or alltoall",
        values=("flex",),
        only=SPLIT,
    ),
    _FlexConflict(
        "--moe-flex-dispatcher-backend",
        "it wants as many tokens on all ranks, in multiples of 64, which chunks do not keep; use "
        "deepep",
        values=("hybridep",),
    ),
    _FlexConflict(
        "--moe-flex-dispatcher-backend",
        "its dispatch and combine have to alternate, and chunks are sent ahead; use deepep",
        values=("ncclep",),
    ),
    Conflict(
        "--moe-pad-expert-input-to-capacity",
        "the capacity is that of the whole batch; drop it (--moe-expert-capacity-factor works)",
    ),
    Conflict("--overlap-moe-expert-parallel-comm", f"{_SCHEDULE}; drop one of them"),
    Conflict("--delay-wgrad-compute", f"{_ONE_CALL}, or use --pp-schedule, which delays them too"),
    Conflict("--overlap-dispatch-backward-with-experts-wgrad", _ONE_CALL),
    Conflict("--moe-shared-expert-overlap", _ONE_CALL),
    Conflict(
        "--recompute-granularity",
        f"{_THRICE}; use --moe-memory-reuse none, or recompute selectively",
        values=("full",),
        only=RESTORED,
    ),
    Conflict(
        "--recompute-modules",
        f"{_THRICE}; drop moe there, or use --moe-memory-reuse none",
        values=("moe",),
        only=RESTORED,
    ),
    Conflict(
        "--moe-layer-recompute",
        f"{_THRICE}; drop it, or use --moe-memory-reuse none",
        only=RESTORED,
    ),
    Conflict(
        "--use-transformer-engine-op-fuser",
        "it fuses fc1, the activation function and fc2 into one; use --moe-memory-reuse s4",
        only=ACTIVATED,
    ),
    Conflict(
        "--offload-modules",
        "it expects each layer's tensors once a pass; drop them there, --moe-memory-reuse s1 "
        "offloads both",
        values=("expert_fc1", "moe_act", "fused_group_mlp"),
    ),
    Conflict("--moe-paged-stash", f"{_ONE_CALL}; --moe-memory-reuse s1 offloads too"),
    Conflict("--cpu-offloading-num-layers", _ONE_CALL + " and use --moe-memory-reuse s1"),
    Conflict("--mlp-chunks-for-training", "it cuts before routing; drop it"),
    Conflict("--enable-cuda-graph", _WHOLE),
    Conflict("--cuda-graph-impl", _WHOLE, values=("local", "full_iteration")),
    _CapturedExperts("--cuda-graph-modules", f"chunks have the sizes of the routing; {_ATTENTION}"),
    Conflict(
        "--fp8-recipe",
        "its scales come from earlier calls, and a chunk is a call of its own; use blockwise, "
        "mxfp8 or tensorwise",
        values=("delayed", "custom"),
        beside="--fp8-format",
    ),
    Conflict(
        "--fp4-recipe",
        "its scales may come from earlier calls, and a chunk is a call of its own; use nvfp4",
        values=("custom",),
        beside="--fp4-format",
    ),
    Conflict("--fp8-format", _COPIED, only=OFFLOADED),
    Conflict("--fp4-format", _COPIED, only=OFFLOADED),
    Conflict("--moe-router-padding-for-quantization", _PADDED),
    Conflict("--moe-router-padding-for-fp8", _PADDED),
    Conflict("--use-megatron-fsdp", _SHARDED),
    _MoreShards(
        "--expert-tensor-parallel-num-weight-shards",
        "all ranks gather the weights in every call of the experts, and have other numbers of "
        "chunks with rows; drop it",
    ),
    Conflict("--use-torch-fsdp2", _SHARDED),
)


def parts_of(strategy: str) -> tuple[str, ...]:
    """The parts that ``--moe-memory-reuse`` uses; ``auto`` may choose any strategy."""
    if strategy in ("none", ACTIVATED):
        return (ACTIVATED,) * (strategy == ACTIVATED)
    copies = (OFFLOADED,) if strategy in ("s1", "s2", "auto") else ()
    return (RESTORED, *copies)
