"""Megatron's parsed arguments, as far as we read or set them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class MegatronArgs(Protocol):
    """The namespace that Megatron parses and ``get_args()`` returns.

    Every attribute here exists in all supported versions. What only some of them have, or what is
    looked up by the name of a flag, is read by ``getattr`` with a default. The types are those
    after ``validate_args``, except where None before it makes a difference to us.
    """

    # Parallel sizes and the place of this process. ``data_parallel_size`` and
    # ``virtual_pipeline_model_parallel_size`` are set by validate_args.
    rank: int
    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    data_parallel_size: int
    distributed_timeout_minutes: float

    # Layers of a stage. validate_args replaces the layout string by an object.
    num_layers: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    pipeline_model_parallel_layout: Any
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    mtp_num_layers: int | None
    overlap_p2p_comm: bool
    overlap_moe_expert_parallel_comm: bool
    delay_wgrad_compute: bool

    # Model.
    hidden_size: int
    seq_length: int
    make_vocab_size_divisible_by: int
    params_dtype: torch.dtype
    add_bias_linear: bool
    gradient_accumulation_fusion: bool
    num_experts: int | None
    moe_grouped_gemm: bool
    moe_latent_size: int | None
    moe_layer_freq: int | list[int]
    moe_router_topk: int
    transformer_impl: str
    fp8: str | None
    fp8_recipe: str | None

    # Batch and training loop.
    micro_batch_size: int
    global_batch_size: int | None
    step_batch_size_schedule: str | None
    log_interval: int
    iterations_to_skip: list[int]

    # Recomputation.
    recompute_activations: bool  # deleted by validate_args
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_modules: list[str] | None

    # Checkpoints.
    save: str | None
    load: str | None
    ckpt_format: str
    ckpt_convert_format: str | None
    auto_detect_ckpt_format: bool
    dist_ckpt_optim_fully_reshardable: bool
    non_persistent_ckpt_type: str | None
    use_distributed_optimizer: bool
    no_save_optim: bool | None

    # Our flags; see the features.
    pp_schedule: str | None
    pp_memory_cap: str | None
    pp_cost: str | None
    pp_slices: int | None
    pp_slice_tokens: int | None
    pp_slice_weights: str | None
    pp_microbatch_costs: str | None
    pp_reorder_microbatches: bool | None
    pp_profile_steps: int | None
    pp_p2p: str | None
    pp_trace: str | None
    pp_vocab_parallel: bool | None
    pp_offload: str | None
    pp_offload_policy: str | None
    pp_cheap_recompute: bool | None
    moe_pipeline_chunks: str | None
    moe_memory_reuse: str | None
