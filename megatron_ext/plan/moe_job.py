"""MoE layers in chunks as a job's flags ask for them: their plan and their bytes."""

from __future__ import annotations

from ..moe.plan import (
    DEPTH,
    STOCK,
    LayerPlan,
    LayerShape,
    Restore,
    Strategy,
    copied_bytes,
)
from .model import Job, PlanError
from .parts import Linear, Part, SavedTensor

CHUNKS, REUSE = "--moe-pipeline-chunks", "--moe-memory-reuse"
NUMBERS = ("1", "2", "4", "8")  # of chunks that the flag takes
AUTO = "auto"
_COPIES = 2  # of a chunk's rows: permuted to be sent, and sorted by expert
_MESSAGES = 4  # buffers of a chunk's rows: sent and received, to the experts and back


def has_experts(job: Job) -> bool:
    """True if a layer has experts."""
    return any("E" in kinds for kinds in (*job.layers, *job.mtp_layers))


def fixed_plan(job: Job) -> LayerPlan | None:
    """The plan of every MoE layer; None: Megatron's own layer, or nothing is decided yet.

    With ``moe_act`` recomputed, which cheap recompute asks for too where experts are grouped,
    ``none`` is ``s0``, as in training.
    """
    chunks, strategy = job.moe_pipeline_chunks, job.moe_memory_reuse or "none"
    if chunks in (None, "off", AUTO) or strategy == AUTO or not has_experts(job):
        return None
    plan = LayerPlan.of(int(str(chunks)), strategy)
    if plan.stock:
        return None
    activates = job.recomputes("moe_act") or (job.cheap_recompute and job.moe_grouped_gemm)
    if activates and plan.strategy is Strategy.NONE:
        return plan._replace(strategy=Strategy.S0)
    return plan


def keeps_from_offload(job: Job) -> bool:
    """True where the experts' tensors stay on the device under ``--pp-offload``: ``s0`` holds them
    by saved-tensor hooks of its own."""
    plan = fixed_plan(job)
    return plan is not None and plan.strategy is Strategy.S0


def with_plan(job: Job, plan: LayerPlan) -> Job:
    """The job with all its MoE layers run by ``plan``."""
    if plan.stock:
        return job.with_(moe_pipeline_chunks="off", moe_memory_reuse=None)
    return job.with_(moe_pipeline_chunks=str(plan.chunks), moe_memory_reuse=plan.strategy.value)


def without_chunks(job: Job) -> Job:
    """The job with Megatron's own MoE layers."""
    return job if job.moe_pipeline_chunks == "off" else with_plan(job, STOCK)


def flags(job: Job) -> list[str]:
    """The flags that training needs for the job's plan."""
    plan = fixed_plan(job)
    if plan is None:
        return []
    reuse = "" if plan.strategy is Strategy.NONE else f" {REUSE} {plan.strategy.value}"
    return [f"{CHUNKS} {plan.chunks}{reuse}"]


def check(job: Job) -> None:
    """Refuse values of the MoE flags that are none, and what the planner does not model.

    Raises:
        PlanError: with the rule and the fix.
    """
    if has_experts(job) and job.tensor_model_parallel_size > 1 and not job.sequence_parallel:
        # ``MoELayer.forward``, in training.
        raise PlanError(
            "Megatron trains experts with --tensor-model-parallel-size "
            f"{job.tensor_model_parallel_size} only beside --sequence-parallel; give it too"
        )
    values = (
        (CHUNKS, job.moe_pipeline_chunks, ("off", AUTO, *NUMBERS)),
        (REUSE, job.moe_memory_reuse, (*sorted(one.value for one in Strategy), AUTO)),
    )
    for flag, value, allowed in values:
        if value not in (None, *allowed):
            raise PlanError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")
    chunks = job.moe_pipeline_chunks
    other = without_chunks_because(job)
    if chunks not in (None, "off") and other:
        raise PlanError(f"{CHUNKS} {chunks} with {other} is not modelled; drop one of them")


def without_chunks_because(job: Job) -> str:
    """The setting with which chunks are not modelled; "" if there is none."""
    if job.overlap_moe_expert_parallel_comm:
        return "--overlap-moe-expert-parallel-comm"
    flex = job.moe_token_dispatcher_type == "flex"
    return "--moe-token-dispatcher-type flex" if flex else ""


def open_plans(job: Job) -> list[LayerPlan]:
    """All plans that the job's flags leave open, Megatron's own layer first."""
    chunks, strategy = job.moe_pipeline_chunks or AUTO, job.moe_memory_reuse
    if job.moe_pipeline_chunks is None:
        strategy = strategy or AUTO
    strategies = list(Strategy) if strategy == AUTO else [Strategy(strategy or "none")]
    numbers = NUMBERS if chunks == AUTO else (chunks,)
    return [LayerPlan(int(n), one) for one in strategies for n in numbers]


def shape_of(job: Job) -> LayerShape:
    """Sizes of the experts on one rank, with the bytes inside them that the planner counts.

    fc1's output and the activation function's: 3F elements a row if gated, else 2F.
    """
    width = job.moe_ffn_hidden_size // job.expert_tensor_parallel_size
    inside = (job.gates + 1) * width * job.element_bytes
    latent = job.moe_latent_size or job.hidden_size
    return LayerShape(latent, width, job.swiglu, job.element_bytes, inside)


def buffer_bytes(shape: LayerShape, rows: int, plan: LayerPlan) -> int:
    """Bytes of the buffers that all MoE layers of a device share, in backward, which has most.

    The experts' input and what lies inside them, restored, and their gradients, of as many chunks
    as have slots; a chunk's permuted copies and messages; and, where the input is kept, what the
    weight gradients of all chunks at once take.

    Args:
        rows: of the busiest rank's experts in a call.
    """
    chunk, slots = -(-rows // plan.chunks), min(DEPTH, plan.chunks)
    e, row = shape.element_bytes, shape.hidden * shape.element_bytes
    inner = (3 if shape.gated else 2) * shape.ffn * e  # gradients inside
    kept = shape.kept_inside(plan.strategy)
    copied = plan.strategy.inside is Restore.OFFLOAD
    once = plan.strategy.keeps_products
    ring: float = inner + (2 if once else 3) * row * slots
    ring += (shape.inside_bytes - kept) * (slots if copied else 1)
    ring *= chunk
    if once and not plan.stock:  # Megatron's own layer computes them one by one
        joined = rows * (row + shape.ffn * e) * (plan.chunks > 1)  # fc2's rows of all chunks
        ring = rows * max(0.0, row + inner - kept) + max(ring, joined)
    return round(ring) + (_COPIES + _MESSAGES * DEPTH) * chunk * row


def in_chunks(job: Job, part: Part) -> Part:
    """The experts' part by the job's plan: what is restored is not kept, buffers are added.

    Rows that are restored lie in buffers that all layers of the device share; so they are no
    ``recompute_bytes`` of the part. Where the experts' input is restored, W is computed in B.
    """
    plan = fixed_plan(job)
    if plan is None:
        return part
    rows = next(one.rows for one in part.linears if one.expert)
    shape = shape_of(job)
    return part._replace(
        pieces=tuple(_restored(piece, plan.strategy) for piece in part.pieces),
        widest=0,  # the gradients of a chunk's activations are in the buffers
        buffers=buffer_bytes(shape, rows, plan),
        host=round(copied_bytes(shape, rows, plan.strategy)),
    )


INPUT = "experts' input"
INSIDE = ("experts' fc1's output", "experts' activation function's output")


def _restored(piece: Linear | SavedTensor, strategy: Strategy) -> Linear | SavedTensor:
    if strategy is Strategy.NONE or piece.what not in (INPUT, *INSIDE):
        return piece
    if strategy is Strategy.S0:
        if isinstance(piece, Linear) and piece.what != INPUT:  # fc2's input
            return piece._replace(input="kept")
        return piece
    keeps = (strategy.input if piece.what == INPUT else strategy.inside) is Restore.KEEP
    if isinstance(piece, Linear):  # its input is in the buffers
        return piece._replace(splits=False, input=piece.input if keeps else "kept")
    return piece if keeps else piece._replace(bytes_f_to_b=0)
