"""Features that tests have run together; the log names what else a run combines."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from ..schedule import GENERATORS
from .feature import Run
from .features.schedule.choose import ScheduleRequest
from .support import Arguments

_OFF: tuple[Any, ...] = (None, False, 0, "", "off", "none", "equal", "each", [], ())


def _used(name: str) -> Callable[[Arguments], bool]:
    return lambda it: getattr(it, name) not in _OFF


def _ranks(name: str) -> Callable[[Arguments], bool]:
    return lambda it: int(getattr(it, name) or 1) > 1


# Ours, then Megatron's, as the line names them.
OURS: dict[str, Callable[[Arguments], bool]] = {
    "slices": lambda it: int(it.pp_slices or 1) > 1 or it.pp_slice_tokens is not None,
    "W of slices joined": _used("pp_slice_weights"),
    "orders by lengths": _used("pp_microbatch_costs"),
    "reordered microbatches": _used("pp_reorder_microbatches"),
    "sharded vocabulary": _used("pp_vocab_parallel"),
    "offload": _used("pp_offload"),
    "cheap recompute": _used("pp_cheap_recompute"),
    "MoE chunks": _used("moe_pipeline_chunks"),
}
MEGATRONS: dict[str, Callable[[Arguments], bool]] = {
    "joint passes": _used("overlap_moe_expert_parallel_comm"),
    "tensor parallelism": _ranks("tensor_model_parallel_size"),
    "context parallelism": _ranks("context_parallel_size"),
    "expert parallelism": _ranks("expert_model_parallel_size"),
    "experts": _used("num_experts"),
    "multi-token prediction": _used("mtp_num_layers"),
    "latent attention": _used("multi_latent_attention"),
    "hybrid layers": lambda it: bool(it.hybrid_layer_pattern or it.hybrid_override_pattern),
    "tied embeddings": lambda it: it.untie_embeddings_and_output_weights is False,
    "FP8": _used("fp8"),
    "FP4": _used("fp4"),
    "sliding windows": lambda it: bool(it.window_size or it.sliding_window_size),
    "packed documents": lambda it: bool(it.sft or it.dataloader_inter_document_masking),
    "--reset-attention-mask": _used("reset_attention_mask"),
    "full recompute": lambda it: it.recompute_granularity == "full",
    "selective recompute": lambda it: it.recompute_granularity == "selective",
    "distributed optimizer": _used("use_distributed_optimizer"),
    "optimizer on the CPU": _used("optimizer_cpu_offload"),
    "batch-size ramp-up": lambda it: bool(it.rampup_batch_size or it.step_batch_size_schedule),
    "CUDA graphs": lambda it: bool(it.graphs),
    "fine-grained offload": _used("fine_grained_activation_offloading"),
    "--moe-paged-stash": _used("moe_paged_stash"),
    "the flex dispatcher": lambda it: it.moe_token_dispatcher_type == "flex",
    "routing replay": _used("moe_enable_routing_replay"),
    "hyper-connections": lambda it: bool(it.enable_mhc_connections or it.enable_hyper_connections),
    "--experimental-attention-variant": _used("experimental_attention_variant"),
    "--use-megatron-fsdp": _used("use_megatron_fsdp"),
    "--use-torch-fsdp2": _used("use_torch_fsdp2"),
    "--perform-rl-step": _used("perform_rl_step"),
    "--inprocess-restart": _used("inprocess_restart"),
    "--multiple-validation-sets": _used("multiple_validation_sets"),
    "--logits-save-dir": _used("logits_save_dir"),
    "--overlap-param-gather-with-optimizer-step": _used("overlap_param_gather_with_optimizer_step"),
}

# By the first feature of a pair, in the order above: what tests of equality have run it with.
TESTED: dict[str, tuple[str, ...]] = {
    "MoE chunks": (*("expert parallelism", "experts"),),
    "V placement": (
        *("MoE chunks", "W of slices joined", "W passes", "batch-size ramp-up"),
        *("cheap recompute", "context parallelism", "distributed optimizer"),
        *("expert parallelism", "experts", "full recompute", "joint passes", "latent attention"),
        *("multi-token prediction", "offload", "orders by lengths", "packed documents"),
        *("reordered microbatches", "selective recompute", "sharded vocabulary", "slices"),
        *("sliding windows", "tensor parallelism", "tied embeddings"),
    ),
    "W of slices joined": (
        *("MoE chunks", "experts", "multi-token prediction", "offload", "packed documents"),
    ),
    "W passes": (
        *("--reset-attention-mask", "MoE chunks", "W of slices joined", "batch-size ramp-up"),
        *("cheap recompute", "context parallelism", "distributed optimizer"),
        *("expert parallelism", "experts", "full recompute", "hybrid layers", "joint passes"),
        *("latent attention", "multi-token prediction", "offload", "orders by lengths"),
        *("packed documents", "reordered microbatches", "selective recompute"),
        *("several chunks a rank", "sharded vocabulary", "slices", "sliding windows"),
        *("tensor parallelism", "tied embeddings"),
    ),
    "cheap recompute": (*("MoE chunks", "distributed optimizer", "expert parallelism", "experts"),),
    "offload": (
        *("MoE chunks", "cheap recompute", "distributed optimizer", "expert parallelism"),
        *("experts", "latent attention", "multi-token prediction", "packed documents"),
        *("selective recompute", "tensor parallelism", "tied embeddings"),
    ),
    "orders by lengths": (
        *("context parallelism", "experts", "packed documents", "reordered microbatches"),
        *("tensor parallelism",),
    ),
    "reordered microbatches": (
        *("context parallelism", "experts", "packed documents", "tensor parallelism"),
    ),
    "several chunks a rank": (
        *("MoE chunks", "W of slices joined", "batch-size ramp-up", "cheap recompute"),
        *("context parallelism", "distributed optimizer", "expert parallelism", "experts"),
        *("full recompute", "latent attention", "multi-token prediction", "offload"),
        *("orders by lengths", "packed documents", "selective recompute", "sharded vocabulary"),
        *("slices", "sliding windows", "tensor parallelism", "tied embeddings"),
    ),
    "sharded vocabulary": (
        *("context parallelism", "distributed optimizer", "expert parallelism", "experts"),
        *("full recompute", "multi-token prediction", "tensor parallelism", "tied embeddings"),
    ),
    "slices": (
        *("MoE chunks", "W of slices joined", "distributed optimizer", "expert parallelism"),
        *("experts", "full recompute", "latent attention", "multi-token prediction", "offload"),
        *("orders by lengths", "packed documents", "selective recompute", "sharded vocabulary"),
        *("sliding windows", "tensor parallelism"),
    ),
}


def combined(args: Any, request: ScheduleRequest | None) -> list[str]:
    """Features that a run uses, of those that the table knows.

    Args:
        args: Megatron's arguments.
        request: of ``--pp-schedule``; None: Megatron's own schedule runs.
    """
    asked = Arguments(args)
    found = [name for name, used in (OURS | MEGATRONS).items() if used(asked)]
    if request is None:
        return found
    file = request.file
    chunks = GENERATORS[request.name].default_chunks if file is None else file.chunks
    ours = {
        "V placement": request.vee,
        "W passes": request.splits_backward,
        "several chunks a rank": chunks > 1 and not request.vee,
    }
    return [*(name for name, used in ours.items() if used), *found]


def untested(run: Run) -> list[str]:
    """A line that names the pairs of features that no test has run together, if there are any.

    Pairs of Megatron's own features are Megatron's.
    """
    pairs = [
        f"{one} with {other}"
        for one, other in combinations(combined(run.args, run.request), 2)
        if one not in MEGATRONS and other not in TESTED.get(one, ())
    ]
    return [f"not tested together: {', '.join(pairs)}"] if pairs else []
