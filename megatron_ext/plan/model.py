"""The training job: the model and its division, from which memory and time are computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .._input import flag_of
from .quantization import RECIPES, Quantization


class PlanError(ValueError):
    """Input that cannot be planned with; the text gives the reason and the fix."""


# What layers do not depend on.
_OF_LAYERS: dict[str, Any] = {
    **dict.fromkeys(("pipeline_model_parallel_size", "data_parallel_size"), 1),
    **{"global_batch_size": None, "vocab_parallel": False},
}
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Job:
    """One training job. Names and defaults are those of Megatron's arguments.

    Sizes are in elements, ``micro_batch_size`` in samples. ``padded_vocab_size`` is what Megatron
    pads the vocabulary to. ``cheap_recompute`` and ``vocab_parallel`` are ours.
    ``layers[i]`` are the parts of decoder layer i and ``mtp_layers[i]`` those of depth i of
    multi-token prediction, by the symbols of ``kinds.PARTS``. ``recipe`` is the FP8 recipe;
    ``quantized_parameters`` is ``--fp8-param-gather``; ``window`` how far attention looks."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    padded_vocab_size: int
    layers: tuple[str, ...]
    moe_ffn_hidden_size: int
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    swiglu: bool = False
    squared_relu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    flash_attention: bool = True
    attention_softmax_in_fp32: bool = False
    transformer_engine: bool = True
    mtp_layers: tuple[str, ...] = ()
    mtp_use_repeated_layer: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    window: int | None = None
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    output_logit_dtype: str | None = None
    num_experts: int = 0
    moe_latent_size: int | None = None
    moe_router_topk: int = 2
    moe_expert_capacity_factor: float | None = None
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_grouped_gemm: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_pipeline_chunks: str | None = None
    moe_memory_reuse: str | None = None
    no_gradient_accumulation_fusion: bool = False
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: str = "p2p"
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    data_parallel_size: int = 1
    params_dtype: str = "fp32"
    recipe: str | None = None
    quantized_parameters: bool = False
    disable_parameter_transpose_cache: bool = False
    grads_in_fp32: bool = False
    grad_reduce_in_bf16: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    use_precision_aware_optimizer: bool = False
    main_params_dtype: str = "fp32"
    main_grads_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    optimizer: str = "adam"
    sgd_momentum: float = 0.9
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ()
    distribute_saved_activations: bool = False
    cheap_recompute: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    vocab_parallel: bool = False
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    def check(self) -> None:
        """Refuse numbers that do not divide each other, and flags that contradict.

        Raises:
            PlanError: with the numbers and the fix.
        """
        for what, value, divisor in _shared(self):
            if value % divisor:
                raise PlanError(f"{what} {value} cannot be divided by {divisor}")
        if 0 < self.num_experts < self.moe_router_topk:
            raise PlanError(
                f"--moe-router-topk {self.moe_router_topk} is more than --num-experts "
                f"{self.num_experts}"
            )
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            raise PlanError(
                "--use-precision-aware-optimizer needs --use-distributed-optimizer; give both"
            )
        for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) not in _BYTES:
                raise PlanError(f"{flag_of(name)} must be one of {', '.join(_BYTES)}")
        if self.recipe not in (None, *RECIPES):
            raise PlanError(f"--fp8-recipe must be one of {', '.join(RECIPES)}")
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise PlanError("--optimizer-offload-fraction must be between 0 and 1")
        if self.cheap_recompute and self.recompute_granularity == "full":
            raise PlanError(
                "--pp-cheap-recompute has nothing to do under --recompute-granularity full; drop "
                "one of them"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter and of an activation."""
        return _BYTES[self.params_dtype]

    @property
    def quantization(self) -> Quantization | None:
        """Of linear layers; None in 16 or 32 bits."""
        return None if self.recipe is None else RECIPES[self.recipe]

    @property
    def stages_are_given(self) -> bool:
        """True if a layout lists every stage's layers."""
        return self.layout is not None

    @property
    def words(self) -> int:
        """Rows of the embedding, and of the output layer, on a rank that has them."""
        ranks = self.pipeline_model_parallel_size if self.vocab_parallel else 1
        return self.padded_vocab_size // (self.tensor_model_parallel_size * ranks)

    @property
    def heads(self) -> int:
        """That the loss has: the main one, and one of each depth of multi-token prediction."""
        return 1 + len(self.mtp_layers)

    @property
    def in_place_loss(self) -> bool:
        """True for Transformer Engine's loss, which replaces logits by their gradient."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te"

    def recomputes(self, module: str) -> bool:
        """True if ``--recompute-modules`` has it."""
        return module in self.recompute_modules

    @property
    def tokens(self) -> int:
        """Of one microbatch, on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length // self.context_parallel_size

    @property
    def sharded_tokens(self) -> int:
        """Tokens where sequence parallelism divides them over the tensor-parallel ranks."""
        return self.tokens // (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def query_width(self) -> int:
        """Elements per token of all heads together, before tensor parallelism."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_width(self) -> int:
        """Elements per token of all keys, or of all values, of a group or more for each rank."""
        return max(self.num_query_groups, self.tensor_model_parallel_size) * self.kv_channels

    @property
    def gates(self) -> int:
        """2 for gated activation functions, else 1."""
        return 2 if self.swiglu else 1

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts; context-parallel ranks count."""
        tp, ep = self.tensor_model_parallel_size, self.expert_model_parallel_size
        ranks = tp * self.data_parallel_size * self.context_parallel_size
        return max(1, ranks // (ep * self.expert_tensor_parallel_size))

    def microbatches(self) -> int:
        """Of one iteration on one data-parallel rank.

        Raises:
            PlanError: no global batch was given, or it cannot be divided.
        """
        batch, share = self.global_batch_size, self.micro_batch_size * self.data_parallel_size
        if batch is None:
            raise PlanError("plan needs --global-batch-size (or --microbatches) too")
        if batch % share:
            raise PlanError(
                f"--global-batch-size {batch} is no multiple of --micro-batch-size "
                f"{self.micro_batch_size} times {self.data_parallel_size} data-parallel ranks"
            )
        return batch // share

    @cached_property
    def of_layers(self) -> Job:
        """Equal for all jobs with the same layers on a rank, whatever their pipeline and batch."""
        return self.with_(**_OF_LAYERS)

    def with_(self, **changes: Any) -> Job:
        """The same job with other values."""
        return replace(self, **changes)


def _shared(job: Job) -> list[tuple[str, int, int]]:
    """What is cut into equal parts: its name, its size, and how many."""
    tp, cp, length = job.tensor_model_parallel_size, job.context_parallel_size, job.seq_length
    # Of a sequence two parts, so that causal attention is balanced.
    parts, shares = cp if cp == 1 else 2 * cp, tp if job.sequence_parallel else 1
    return [
        ("--num-attention-heads", job.num_attention_heads, tp),
        ("the query groups", max(job.num_query_groups, tp), tp),
        ("--seq-length (two parts a context-parallel rank)", length, parts),
        ("--seq-length of a context-parallel rank", length // cp, shares),
        ("--ffn-hidden-size", job.ffn_hidden_size, tp),
        ("--num-experts", job.num_experts, job.expert_model_parallel_size),
    ]
