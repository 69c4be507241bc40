"""Kernels that the device waits for the host to launch, in models with experts.

The host waits for each layer's counts of tokens before it knows the sizes of what follows, so it
is never ahead of the device, and what it takes to launch comes on top. In models without experts
it runs ahead, and CUDA graphs of a whole iteration need no host; both take what the device takes.
``HOST_S`` is fitted to published runs (tests/unit/plan/runs.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._input import flag_of
from .model import Job
from .parts import Work

HOST_S = 12e-6  # of the host, a kernel
IN_PAIRS = 2.0  # as many, where a layer's parts are graphs of their own, with events between them

ASSUMPTIONS = (
    f"layers with experts: {HOST_S * 1e6:g} microseconds of the host a kernel on top, but in CUDA "
    "graphs, as the host waits for the counts of tokens",
)

# Kernels in forward, and in backward: counted on CPU tensors in Megatron's layers, without fused
# rotary embeddings (tests/megatron/test_launches.py). The names are those of Megatron's modules
# of CUDA graphs; "moe_preprocess" is part of the dispatcher's and small.
ATTENTION, LATENT = (16, 33), (60, 92)
ROUTER, DISPATCH, SHARED = (24, 13), (20, 35), (6, 12)
# A local expert's: one after the other, by Megatron's own modules.
ONE_BY_ONE = (5, 19)
# In one call of Transformer Engine, fc1 and fc2: a product each, and two in backward; quantized,
# the input or the gradient is cast and both operands' scales are laid out, for every product.
_GROUPED, _QUANTIZED = (2, 4), (8, 14)

_SWITCHES = ("enable_cuda_graph", "external_cuda_graph")  # before there was --cuda-graph-impl
_LISTS = ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")
GRAPHS = tuple(flag_of(name) for name in ("cuda_graph_impl", *_SWITCHES, *_LISTS))
# In ``Job.graphed``: an iteration, or every layer; and which of them.
WHOLE, ITERATION = "whole", "full_iteration"


def graphed(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that CUDA graphs hold, or ``WHOLE``, with ``ITERATION`` where they hold all of it, by
    Megatron's arguments of all versions."""
    kind = str(values.get("cuda_graph_impl") or "none")
    if kind == "none" and not any(values.get(name) for name in _SWITCHES):
        return ()
    names = modules_of(values)
    if kind == ITERATION or ITERATION in names:
        return (WHOLE, ITERATION)
    return (WHOLE,) if not names or "full" in names else tuple(sorted(names))


def modules_of(values: Mapping[str, Any]) -> set[str]:
    """What is listed as the modules, or the scope, of CUDA graphs."""
    names: set[str] = set()
    for name in _LISTS:
        given = values.get(name) or ()
        given = given.replace(",", " ").split() if isinstance(given, str) else given
        names |= {str(getattr(one, "name", one)) for one in given if one is not True}
    return names


def allow_full_recompute(job: Job) -> bool:
    """False for CUDA graphs of single layers, by Megatron's own rules."""
    return not job.graphed or ITERATION in job.graphed


def waits(job: Job, kernels: tuple[int, int], *modules: str) -> Work:
    """The host's launches of a part of a layer; nothing where a graph of one of ``modules`` is."""
    if not job.num_experts or {WHOLE, *modules} & set(job.graphed):
        return Work()
    times = IN_PAIRS if job.overlap_moe_expert_parallel_comm else 1.0
    return Work(launches=times * kernels[0], launches_back=times * kernels[1])


def of_experts(job: Job, own: int) -> Work:
    """The launches of a rank's ``own`` experts, of each call."""
    forward, backward = _GROUPED if job.quantization is None else _QUANTIZED
    if not job.moe_grouped_gemm:
        forward, backward = ONE_BY_ONE
    elif job.use_transformer_engine_op_fuser:  # one kernel for all of them
        own = 1
    return waits(job, (forward * own, backward * own), "moe")
