"""Parameters of every part of the model on one rank, and the bytes that Megatron keeps for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .kinds import embedding, last_norm, layer, position_parameters, prediction_layer
from .layout import Stage
from .model import _BYTES, Job
from .parts import Part, copies_weights


@dataclass(frozen=True)
class Count:
    """Parameters on one rank, in elements.

    Attributes:
        dense: weights of linear layers; the distributed optimizer shards them over all
            data-parallel ranks.
        expert: the same of experts, which fewer ranks share.
        other: norms, embeddings, the router, the output layer: never quantized, and Adam's where
            the optimizer is Muon.
    """

    dense: int = 0
    expert: int = 0
    other: int = 0

    def __add__(self, more: Count) -> Count:
        return Count(self.dense + more.dense, self.expert + more.expert, self.other + more.other)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert + self.other


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


def count(job: Job, parts: Iterable[Part]) -> Count:
    """Parameters of parts."""
    total = Count()
    for part in parts:
        total += Count(other=part.parameters)
        for linear in part.linears:
            kind = "expert" if linear.expert else "dense" if linear.quantized else "other"
            total += Count(**{kind: linear.parameters})
    return total


def layer_parameters(job: Job, number: int) -> Count:
    """Of one decoder layer (numbered from 0) on one rank."""
    return count(job, layer(job, job.layers[number]))


def embedding_parameters(job: Job) -> int:
    """Word embeddings of one tensor-parallel rank, and learned position embeddings."""
    return embedding(job).parameters


def output_parameters(job: Job, *, with_embedding: bool) -> int:
    """The last norm and the output layer on the stage that has the loss.

    Args:
        with_embedding: the same *stage* has the embedding (no pipeline), so that tied weights are
            one tensor. On two stages each has a copy, on the same rank too (V placement).
    """
    shared = with_embedding and not job.untie_embeddings_and_output_weights
    return last_norm(job).parameters + (0 if shared else job.words * job.hidden_size)


def prediction_parameters(job: Job) -> Count:
    """Of all depths of multi-token prediction, without the embedding that their stage needs."""
    kinds = job.mtp_layers[:1] if job.mtp_use_repeated_layer else job.mtp_layers
    return sum((count(job, prediction_layer(job, each)) for each in kinds), Count())


def shard_parameters(job: Job) -> Count:
    """Of a rank's rows of a vocabulary that is sharded over all pipeline ranks."""
    if not job.vocab_parallel:
        return Count()
    matrices = 2 if job.untie_embeddings_and_output_weights else 1
    return Count(other=matrices * job.words * job.hidden_size)


def stage_parameters(job: Job, stage: Stage) -> Count:
    """Of one stage on one rank, without ``shard_parameters``."""
    each: dict[str, Count] = {}
    total = Count()
    for number in stage.layers:
        kinds = job.layers[number]
        if kinds not in each:
            each[kinds] = layer_parameters(job, number)
        total += each[kinds]
    predicts = stage.predicts and bool(job.mtp_layers)
    if predicts:
        total += prediction_parameters(job)
    if job.vocab_parallel:
        ends = position_parameters(job) if stage.first else 0
        return total + Count(other=ends + (last_norm(job).parameters if stage.last else 0))
    if stage.first or predicts:
        total += Count(other=embedding_parameters(job))
    if stage.last:
        total += Count(other=output_parameters(job, with_embedding=stage.first))
    return total


def gathered_bytes(job: Job, count: Count) -> int:
    """What data-parallel ranks gather of ``count`` parameters once an iteration: matrices as they
    are quantized with ``--fp8-param-gather``, but MXFP8's in 16 bits."""
    recipe = job.quantization
    if recipe is None or not job.quantized_parameters or job.recipe == "mxfp8":
        return job.element_bytes * count.total
    return count.dense + count.expert + job.element_bytes * count.other


def _keeps_lower_halves(job: Job) -> bool:
    """True if the optimizer takes a bf16 parameter for the upper half of the fp32 one, and stores
    the lower half alone: under FP8 recipes other than the delayed one Megatron keeps all of it
    (``use_precision_aware_optimizer_no_fp8_or_ds_fp8``)."""
    precise = job.use_precision_aware_optimizer and job.params_dtype == "bf16"
    whole = job.recipe in ("tensorwise", "blockwise", "mxfp8") and not job.optimizer_cpu_offload
    return precise and not whole


def state_bytes(job: Job, count: Count) -> StateBytes:
    """What stays on the device for ``count`` parameters: the parameters, gradients, optimizer.

    Megatron keeps gradients in buffers of one type; mixed precision adds an fp32 copy of the
    parameters; Adam two numbers each, Muon one (and Adam's for what is no matrix). The distributed
    optimizer, or Muon's layer-wise one, divides the last three over an instance's data-parallel
    ranks (Megatron's distributed optimizer page: bf16 18, or 6 + 12/d bytes a parameter; fp16 16,
    or 4 + 12/d; fp32 16, or 8 + 8/d). Padding of buckets is not counted.

    Quantized weights are there row-wise for F and column-wise for B, and are kept through a step.
    Without ``--fp8-param-gather`` the 16-bit ones are there too; both copies are then in
    every activation set instead with ``--disable-parameter-transpose-cache``.
    """
    size = job.element_bytes
    gradient = 4 if job.grads_in_fp32 or job.params_dtype == "fp32" else size
    if job.grad_reduce_in_bf16:
        gradient = 2
    matrices, total = count.dense + count.expert, count.total
    parameters = total * size
    if job.quantization is not None:
        if not copies_weights(job):
            parameters += 2 * job.quantization.bytes(matrices)
        if job.quantized_parameters:
            parameters -= size * matrices
    main = 0 if job.params_dtype == "fp32" else _BYTES[job.main_params_dtype]
    if main == 4 and _keeps_lower_halves(job):
        main = 2
    moments = _BYTES[job.exp_avg_dtype] + _BYTES[job.exp_avg_sq_dtype]
    if job.optimizer == "sgd":
        moments = 4 if job.sgd_momentum else 0
    each = main + moments
    of_matrix = main + 4 if job.optimizer in ("muon", "dist_muon") else each
    d = expert_d = 1
    if job.use_distributed_optimizer or job.optimizer == "dist_muon":
        instances = job.num_distributed_optimizer_instances
        ranks = job.data_parallel_size * job.context_parallel_size
        d = max(1, ranks // instances)
        expert_d = max(1, job.expert_data_parallel_size // instances)
    optimizer = -(-(count.dense * of_matrix + count.other * each) // d)
    optimizer += -(-count.expert * of_matrix // expert_d)
    if job.optimizer_cpu_offload:
        optimizer = round(optimizer * (1 - job.optimizer_offload_fraction))
    return StateBytes(parameters, total * gradient, optimizer)
