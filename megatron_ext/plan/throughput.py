"""Numbers that an expert checks: tokens a second, TFLOP/s and MFU of a device."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .gpu import Gpu
from .kinds import layer, loss, prediction_layer
from .model import Job
from .moe_job import without_chunks


class Throughput(NamedTuple):
    """Of every device, in an iteration.

    Attributes:
        tokens: a second.
        tflops: the model's FLOPs a second, in 10^12.
        mfu: of the device's dense 16-bit peak, whatever type the products have.
    """

    tokens: float
    tflops: float
    mfu: float


@lru_cache(maxsize=256)
def model_flops(job: Job) -> float:
    """FLOPs of one sequence, forward and backward: linear layers, causal attention, output layer.

    Nothing that is computed again counts, as in PaLM's MFU (arXiv 2204.02311, appendix B), but
    attention is causal: half of what that counts. Experts count as often as a token has them.
    """
    alone = without_chunks(job).with_(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
        expert_model_parallel_size=1, expert_tensor_parallel_size=1, sequence_parallel=False,
        micro_batch_size=1, vocab_parallel=False, cheap_recompute=False,
        recompute_granularity=None, recompute_modules=(),
    )  # fmt: skip
    parts = [part for kinds in alone.layers for part in layer(alone, kinds)]
    for kinds in alone.mtp_layers:
        parts += [*prediction_layer(alone, kinds), loss(alone)]
    total = 0.0
    for part in [*parts, loss(alone)]:
        products = sum(2.0 * one.rows * one.outputs * one.inputs for one in part.linears)
        total += 3 * (products + part.work.flops)
    return total


def devices(job: Job) -> int:
    """Of the whole job."""
    ranks = job.tensor_model_parallel_size * job.pipeline_model_parallel_size
    return ranks * job.context_parallel_size * job.data_parallel_size


def throughput(job: Job, gpu: Gpu, microbatches: int, iteration_us: Fraction) -> Throughput:
    """Of one device, in an iteration of so many microbatches a data-parallel rank."""
    seconds = float(iteration_us) / 1e6
    samples = microbatches * job.micro_batch_size * job.data_parallel_size
    each = samples / seconds / devices(job)
    flops = each * model_flops(job)
    return Throughput(each * job.seq_length, flops / 1e12, flops / gpu.flops)


# Root of the mean square of errors of the time of all passes, of what nothing was fitted to
# (tests/unit/plan/passes.json and runs.json): by device, elsewhere, and by kind of job.
_OF_DEVICE = {"A100": 0.073, "H200": 0.051}
_ELSEWHERE, _DIVIDED, _EXPERTS, _PAIRS = 0.112, 0.103, 0.09, 0.30


def expected_error(gpu: Gpu, job: Job) -> float:
    """The share by which the job's time of all passes may be off."""
    own = _OF_DEVICE.get(gpu.name, _ELSEWHERE) if gpu.has_rates_of_the_table else _ELSEWHERE
    found = [_DIVIDED if job.tensor_model_parallel_size > 1 else own]
    found += [_EXPERTS] if job.num_experts else []
    found += [_PAIRS] if job.overlap_moe_expert_parallel_comm else []
    return max(found)
