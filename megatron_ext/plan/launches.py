"""Kernels that the device waits for the host to launch, in models with experts.

The host waits for each layer's counts of tokens before it knows the sizes of what follows, so it
is never ahead of the device, and what it takes to launch comes on top. In models without experts
it runs ahead.
``HOST_S`` is fitted to published runs (tests/unit/plan/runs.json).
"""

from __future__ import annotations

from .model import Job
from .parts import Work

HOST_S = 12e-6  # of the host, a kernel
IN_PAIRS = 2.0  # as many, where a layer's parts are graphs of their own, with events between them

ASSUMPTIONS = (
    f"layers with experts: {HOST_S * 1e6:g} microseconds of the host a kernel on top, as the host "
    "waits for the counts of tokens",
)

# Kernels in forward, and in backward: counted on CPU tensors in Megatron's layers, without fused
# rotary embeddings (tests/megatron/test_launches.py).
ATTENTION, LATENT = (16, 33), (60, 92)
ROUTER, DISPATCH, SHARED = (24, 13), (20, 35), (6, 12)
# A local expert's: one after the other, by Megatron's own modules.
ONE_BY_ONE = (5, 19)
# In one call of Transformer Engine, fc1 and fc2: a product each, and two in backward; quantized,
# the input or the gradient is cast and both operands' scales are laid out, for every product.
_GROUPED, _QUANTIZED = (2, 4), (8, 14)


def waits(job: Job, kernels: tuple[int, int]) -> Work:
    """The host's launches of a part of a layer."""
    if not job.num_experts:
        return Work()
    times = IN_PAIRS if job.overlap_moe_expert_parallel_comm else 1.0
    return Work(launches=times * kernels[0], launches_back=times * kernels[1])


def of_experts(job: Job, own: int) -> Work:
    """The launches of a rank's ``own`` experts, of each call."""
    forward, backward = _GROUPED if job.quantization is None else _QUANTIZED
    if not job.moe_grouped_gemm:
        forward, backward = ONE_BY_ONE
    return waits(job, (forward * own, backward * own))
