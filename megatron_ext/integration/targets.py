"""Every place of Megatron, torch and trainers on it that we hook, and what each must take.

Where one has moved, its places stand side by side, the newest first; nothing else of the package
names them. ``megatron-ext doctor`` looks for all that features use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A function or class that hooks take the place of.

    Attributes:
        places: ``module:qualified.name``, in order of preference: upstream moves things.
        parameters: names that the signature must have, for all hooks that take it.
    """

    places: tuple[str, ...]
    parameters: tuple[str, ...] = ()

    @classmethod
    def at(cls, place: str, *parameters: str) -> Target:
        """One that has not moved."""
        return cls((place,), parameters)

    @property
    def loaded(self) -> bool:
        """True if a module of it is imported; for those that nobody needs to have."""
        return any(place.partition(":")[0] in sys.modules for place in self.places)

    def resolve(self) -> tuple[str, Any, str] | None:
        """(place, the object that owns it, its attribute there) of the first place that this
        version has, whose module is imported; None if there is none."""
        for place in self.places:
            module, _, path = place.partition(":")
            try:
                owner: Any = importlib.import_module(module)
            except ImportError:
                continue
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            if owner is not None and hasattr(owner, name):
                return place, owner, name
        return None

    @property
    def exists(self) -> bool:
        """True if this version has it."""
        return self.resolve() is not None

    @property
    def found(self) -> Any:
        """It itself.

        Raises:
            ImportError: this version lacks it.
        """
        place = self.resolve()
        if place is None:
            raise ImportError(f"this megatron-core has no {' or '.join(self.places)}")
        return getattr(*place[1:])


_CORE, _TRAINING = "megatron.core", "megatron.training"
_GPT = f"{_CORE}.models.gpt.gpt_model:GPTModel"
_LAYER = f"{_CORE}.transformer.moe.moe_layer:MoELayer"

# Pipeline.
SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
FUNCTIONS = tuple(
    f"forward_backward_pipelining_{kind}_interleaving" for kind in ("with", "without")
)
_OF_A_CALL = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length"),
    *("micro_batch_size", "forward_only"),
)
PIPELINES = {name: Target.at(f"{SCHEDULES}:{name}", *_OF_A_CALL) for name in FUNCTIONS}
NO_PIPELINE = Target.at(f"{SCHEDULES}:forward_backward_no_pipelining", *_OF_A_CALL)
STEPS = (NO_PIPELINE, *PIPELINES.values())
PARALLEL_STATE = Target.at(
    f"{_CORE}.parallel_state:initialize_model_parallel",
    *("pipeline_model_parallel_size", "expert_model_parallel_size", "get_embedding_ranks"),
    "high_priority_stream_groups",
)
DESTROY_GROUP = Target.at("torch.distributed.distributed_c10d:destroy_process_group", "group")
LAST_STAGE = Target.at(
    f"{_CORE}.parallel_state:is_pipeline_last_stage", "ignore_virtual", "vp_stage"
)
LAST_STAGE_OF_GROUP = Target.at(f"{_CORE}.pipeline_parallel.utils:is_pp_last_stage", "pp_group")
LAST_VIRTUAL_STAGE = Target.at(
    f"{_CORE}.pipeline_parallel.utils:is_vp_last_stage", "vp_stage", "vp_size"
)

# Models.
CONFIG_POST_INIT = Target.at(
    f"{_CORE}.transformer.transformer_config:TransformerConfig.__post_init__", "self"
)
GPT_INIT = Target.at(
    f"{_GPT}.__init__",
    *("self", "config", "vocab_size", "pre_process", "post_process"),
    *("share_embeddings_and_output_weights", "vp_stage"),
)
GPT_FORWARD = Target.at(
    f"{_GPT}.forward",
    *("self", "input_ids", "position_ids", "attention_mask", "labels", "inference_context"),
)
GPT_POSTPROCESS = Target.at(
    f"{_GPT}._postprocess", "self", "hidden_states", "labels", "mtp_in_postprocess", "loss_mask"
)
GPT_STATE = Target.at(f"{_GPT}.sharded_state_dict", "self")
ATTENTION = {
    name: Target.at(
        f"{_CORE}.{place}.forward",
        *("self", "query", "key", "value", "attention_mask", "attn_mask_type"),
    )
    for name, place in (
        ("local", "transformer.dot_product_attention:DotProductAttention"),
        ("transformer_engine", "extensions.transformer_engine:TEDotProductAttention"),
    )
}
ROTARY = tuple(
    Target.at(f"{_CORE}.models.common.embeddings.{place}.forward", "self", "max_seq_len", "offset")
    for place in (
        "rotary_pos_embedding:RotaryEmbedding",
        "yarn_rotary_pos_embedding:YarnRotaryEmbedding",
    )
)
ROTATION = Target.at(
    f"{_CORE}.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
    *("t", "freqs", "config", "cu_seqlens"),
)
_MTP = f"{_CORE}.transformer.multi_token_prediction"
MTP_ROLL = Target.at(f"{_MTP}:roll_tensor", "tensor", "shifts")
MTP_LOSS = Target.at(
    f"{_MTP}:process_mtp_loss", "labels", "loss_mask", "compute_language_model_loss"
)
# From core_v0.19 on.
MTP_ACCEPTANCE = Target.at(
    f"{_MTP}:_compute_mtp_acceptance_counts",
    *("mtp_logits", "mtp_labels", "loss_mask", "output_layer"),
)
MLP_FORWARD = Target.at(
    f"{_CORE}.transformer.mlp:MLP.forward", "self", "hidden_states", "per_token_scale"
)
CHECKPOINT_INIT = Target.at(
    f"{_CORE}.tensor_parallel.random:CheckpointWithoutOutput.__init__", "self", "fp8"
)
MOE_FORWARD = Target.at(
    f"{_LAYER}.forward", "self", "hidden_states", "intermediate_tensors", "padding_mask"
)
_ROUTER = f"{_CORE}.transformer.moe.router"
ROUTING = Target.at(f"{_ROUTER}:TopKRouter.routing", "self", "logits")
ROUTER_LOSSES = {
    kind: Target.at(
        f"{_ROUTER}:TopKRouter._apply_{kind}_loss",
        *("self", "probs", "scores_for_aux_loss", "routing_map"),
    )
    for kind in ("aux", "seq_aux", "global_aux")
}
BALANCING_LOSS = Target.at(
    f"{_ROUTER}:switch_load_balancing_loss_func",
    *("moe_aux_loss_coeff", "probs", "tokens_per_expert", "total_num_tokens"),
)
BALANCING_LOG = Target.at(
    f"{_ROUTER}:TopKRouter.attach_and_log_load_balancing_loss",
    *("self", "activation", "aux_loss", "valid_token_count"),
)
Z_LOSS = Target.at(f"{_ROUTER}:z_loss_func", "logits", "z_loss_coeff")

# Gradients.
LINEAR = Target.at(
    f"{_CORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
)
REDUCE_SCATTER = Target.at(
    f"{_CORE}.tensor_parallel.mappings:_ReduceScatterToSequenceParallelRegion"
)
SAVED_TENSORS = Target.at("torch.autograd.function:BackwardCFunction.saved_tensors")
TE_FUNCTIONS = tuple(
    Target.at(f"transformer_engine.pytorch.module.{module}:{name}")
    for module, name in (
        ("linear", "_Linear"),
        ("layernorm_linear", "_LayerNormLinear"),
        ("layernorm_mlp", "_LayerNormMLP"),
        ("grouped_linear", "_GroupedLinear"),
    )
)
DDP_HOOK_MAKER = Target.at(
    f"{_CORE}.distributed.distributed_data_parallel:"
    "DistributedDataParallel._make_backward_post_hook",
    *("self", "param"),
)
TIED_GRADIENTS = Target.at(
    f"{_CORE}.distributed.finalize_model_grads:_allreduce_word_embedding_grads", "model"
)
RESHARDABLE_STATE = Target.at(
    f"{_CORE}.optimizer.distrib_optimizer:"
    "DistributedOptimizer.sharded_param_state_fully_reshardable",
    *("self", "model_sharded_state_dict"),
)
PARALLEL_SAVE = Target.at(
    f"{_CORE}.dist_checkpointing.strategies.fully_parallel:"
    "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
    *("self", "sharded_state_dict"),
)

# Megatron's training scripts.
ARGUMENTS = Target.at(f"{_TRAINING}.arguments:add_megatron_arguments", "parser")
VALIDATE = Target.at(f"{_TRAINING}.arguments:validate_args", "args")
INITIALIZE = Target.at(f"{_TRAINING}.initialize:_initialize_distributed", "get_embedding_ranks")
GET_MODEL = Target.at(f"{_TRAINING}.training:get_model", "model_provider_func")
BUILDERS = Target.at(
    f"{_TRAINING}.models.dist_utils:unimodal_build_distributed_models",
    *("build_model_func", "pre_wrap_hook"),
)
TRAIN = Target.at(f"{_TRAINING}.training:train", "forward_step_func", "model")
TRAIN_STEP = Target.at(f"{_TRAINING}.training:train_step", "forward_step_func", "optimizer")
TRAINING_LOG = Target.at(f"{_TRAINING}.training:training_log", "iteration", "is_first_iteration")
PRINT_LAST = Target.at(f"{_TRAINING}.utils:print_rank_last", "message")
LOAD_BASE = Target.at(
    f"{_TRAINING}.checkpointing:_load_base_checkpoint",
    *("load_dir", "args", "rank0", "sharded_state_dict"),
)
BATCH = Target(
    tuple(f"{m}.utils:get_batch_on_this_tp_rank" for m in (_CORE, _TRAINING)),
    ("mtp_on_this_rank",),
)
DATASETS = Target.at(
    f"{_CORE}.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
    *("cls", "sizes", "is_built_on_rank", "config"),
)

# Trainers on Megatron.
BRIDGE_EMBEDDINGS = Target.at(
    "megatron.bridge.models.conversion.model_bridge:"
    "MegatronModelBridge._broadcast_shared_embeddings",
    "megatron_model",
)
