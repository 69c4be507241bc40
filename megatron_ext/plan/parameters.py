"""Parameters of every part of the model on one rank, and the bytes that Megatron keeps for them."""

from __future__ import annotations

from dataclasses import dataclass

from .model import _BYTES, Job


@dataclass(frozen=True)
class Count:
    """Parameters on one rank, in elements.

    Attributes:
        dense: sharded over all data-parallel ranks by the distributed optimizer.
        expert: of experts, which fewer ranks share.
    """

    dense: int = 0
    expert: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank (or stage) that stay through all steps."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


def norm_parameters(job: Job, width: int) -> int:
    """Of one norm: LayerNorm has a bias beside its weight."""
    return width if job.normalization == "RMSNorm" else 2 * width


def attention_parameters(job: Job) -> int:
    """Of one layer's self-attention on one tensor-parallel rank, its input norm included."""
    tp, h = job.tensor_model_parallel_size, job.hidden_size
    qkv = (job.query_width + 2 * job.key_width) // tp
    count = h * qkv + job.query_width // tp * h
    if job.add_bias_linear or job.add_qkv_bias:
        count += qkv
    if job.add_bias_linear:
        count += h  # of the projection, the same on every tensor-parallel rank
    if job.qk_layernorm:
        count += 2 * norm_parameters(job, job.kv_channels)
    return count + norm_parameters(job, h)


def mlp_parameters(job: Job, width: int, shards: int, *, bias: bool) -> int:
    """Of one MLP of ``width`` hidden units on one of ``shards`` ranks, without a norm."""
    h, f = job.hidden_size, width // shards
    return h * job.gates * f + f * h + ((job.gates * f + h) if bias else 0)


def layer_parameters(job: Job, layer: int) -> Count:
    """Of one transformer layer (numbered from 0) on one rank."""
    dense = attention_parameters(job) + norm_parameters(job, job.hidden_size)
    tp = job.tensor_model_parallel_size
    if not job.moe_layers[layer]:
        return Count(dense + mlp_parameters(job, job.ffn_hidden_size, tp, bias=job.add_bias_linear))
    dense += job.num_experts * job.hidden_size  # the router
    if job.add_bias_linear:
        dense += job.num_experts
    shared = job.moe_shared_expert_intermediate_size
    if shared:
        dense += mlp_parameters(job, shared, tp, bias=False)
        dense += job.hidden_size if job.moe_shared_expert_gate else 0
    own = job.num_experts // job.expert_model_parallel_size
    one = mlp_parameters(
        job, job.moe_ffn_hidden_size, job.expert_tensor_parallel_size, bias=job.add_bias_linear
    )
    return Count(dense, own * one)


def embedding_parameters(job: Job) -> int:
    """Word embeddings of one tensor-parallel rank, and learned position embeddings."""
    words = job.padded_vocab_size // job.tensor_model_parallel_size * job.hidden_size
    if job.position_embedding_type == "learned_absolute":
        words += job.max_position_embeddings * job.hidden_size
    return words


def output_parameters(job: Job, *, with_embedding: bool) -> int:
    """The last norm and the output layer on the stage that has the loss.

    Args:
        job: the job.
        with_embedding: the same *stage* has the embedding (no pipeline), so that tied weights are
            one tensor. On two stages each has a copy, on the same rank too (V placement).
    """
    shared = with_embedding and not job.untie_embeddings_and_output_weights
    words = 0 if shared else job.padded_vocab_size // job.tensor_model_parallel_size
    return norm_parameters(job, job.hidden_size) + words * job.hidden_size


def state_bytes(job: Job, count: Count) -> StateBytes:
    """What stays on the device for ``count`` parameters: the parameters, gradients, optimizer.

    Megatron keeps gradients in buffers of one type; mixed precision adds an fp32 copy of the
    parameters; Adam two numbers each. The distributed optimizer divides the last three over the
    data-parallel ranks (Megatron's distributed optimizer page: bf16 18, or 6 + 12/d bytes a
    parameter; fp16 16, or 4 + 12/d; fp32 16, or 8 + 8/d). Padding of buckets is not counted.
    """
    size = job.element_bytes
    gradient = 4 if job.grads_in_fp32 or job.params_dtype == "fp32" else size
    if job.grad_reduce_in_bf16:
        gradient = 2
    if job.optimizer == "sgd":
        moments = 4 if job.sgd_momentum else 0
    else:
        moments = _BYTES[job.exp_avg_dtype] + _BYTES[job.exp_avg_sq_dtype]
    main = 0 if job.params_dtype == "fp32" else _BYTES[job.main_params_dtype]
    if job.use_precision_aware_optimizer and job.params_dtype == "bf16" and main == 4:
        main = 2  # a bf16 parameter is the upper half of the fp32 one; the lower half is stored
    each = main + moments
    total = count.total
    if not job.use_distributed_optimizer:
        return StateBytes(total * size, total * gradient, total * each)
    d = job.data_parallel_size * job.context_parallel_size
    optimizer = -(-count.dense * each // d) + -(
        -count.expert * each // job.expert_data_parallel_size
    )
    return StateBytes(total * size, total * gradient, optimizer)
