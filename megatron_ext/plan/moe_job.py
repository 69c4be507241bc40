"""MoE layers in chunks as a job's flags ask for them: the plan, what it excludes, its bytes.

The bytes are those of ``moe/plan.py``, which training chooses by; here they become tensors of a
``Part``, and ``--moe-pipeline-chunks`` and ``--moe-memory-reuse`` settings of a ``Job``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .._conflict import first_conflict, values_of
from .._input import attribute, parse_bytes, size_text
from ..moe.plan import (
    STOCK,
    Budget,
    BudgetError,
    LayerPlan,
    LayerShape,
    Restore,
    Strategy,
    copied_bytes,
    footprint,
    simplest_first,
)
from .model import Job, PlanError
from .moe_conflicts import CONFLICTS, parts_of
from .parts import Linear, Part, SavedTensor

CHUNKS, REUSE, BUDGET = "--moe-pipeline-chunks", "--moe-memory-reuse", "--moe-memory-budget"
NUMBERS = (1, 2, 4, 8)  # of chunks that the flag takes
AUTO = "auto"


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
    if plan.stock and (job.moe_pipeline_chunks, job.moe_memory_reuse) == ("off", None):
        return job.with_(moe_memory_budget=None) if job.moe_memory_budget else job
    if plan.stock:
        return job.with_(moe_pipeline_chunks="off", moe_memory_reuse=None, moe_memory_budget=None)
    return job.with_(
        moe_pipeline_chunks=str(plan.chunks),
        moe_memory_reuse=plan.strategy.value,
        moe_memory_budget=None,
    )


def without_chunks(job: Job) -> Job:
    """The job with Megatron's own MoE layers."""
    return with_plan(job, STOCK)


def flags(job: Job) -> list[str]:
    """What training needs for the job's plan."""
    plan = fixed_plan(job)
    if plan is None:
        return []
    reuse = "" if plan.strategy is Strategy.NONE else f" {REUSE} {plan.strategy.value}"
    return [f"{CHUNKS} {plan.chunks}{reuse}"]


def check(job: Job) -> None:
    """Refuse MoE flags that training refuses, as far as a job knows.

    Raises:
        PlanError: with the rule and the fix.
    """
    if has_experts(job) and job.tensor_model_parallel_size > 1 and not job.sequence_parallel:
        # ``MoELayer.forward``, in training.
        raise PlanError(
            "Megatron trains experts with --tensor-model-parallel-size "
            f"{job.tensor_model_parallel_size} only beside --sequence-parallel; give it too"
        )
    chunks, strategy = job.moe_pipeline_chunks, job.moe_memory_reuse
    check_flags(chunks, strategy, job.moe_memory_budget)
    if chunks in (None, "off"):
        return
    if not has_experts(job):
        raise PlanError(
            f"{CHUNKS} {chunks} is for MoE layers, and the model has none (--num-experts is not "
            f"set); drop {CHUNKS}"
        )
    strategy = "none" if strategy in (None, AUTO) else strategy
    why = obstacle(job, strategy)
    if why is not None:
        what = f"{CHUNKS} {chunks}" if strategy == "none" else f"{REUSE} {strategy}"
        raise PlanError(f"{what} cannot be combined with {why}")


def check_flags(chunks: str | None, strategy: str | None, budget: str | None) -> None:
    """Refuse values of the three flags that are none, or contradict each other.

    Raises:
        PlanError: with the rule and the fix.
    """
    allowed = ("off", AUTO, *map(str, NUMBERS))
    if chunks not in (None, *allowed):
        raise PlanError(f"{CHUNKS} must be one of {', '.join(allowed)}, got {chunks!r}")
    names = [*sorted(one.value for one in Strategy), AUTO]
    if strategy not in (None, *names):
        raise PlanError(f"{REUSE} must be one of {', '.join(names)}, got {strategy!r}")
    if chunks in (None, "off"):
        for flag, value in ((REUSE, strategy), (BUDGET, budget)):
            if value not in (None, "none"):
                raise PlanError(
                    f"{flag} {value} is for MoE layers in chunks; give {CHUNKS} {AUTO} or a number "
                    f"too, or drop {flag}"
                )
    elif budget is not None:
        if AUTO not in (chunks, strategy):
            raise PlanError(f"{BUDGET} {budget} is what {AUTO} chooses by; give {REUSE} {AUTO} too")
        try:
            parse_bytes(budget)
        except ValueError as error:
            raise PlanError(f"{BUDGET}: {error}") from None


def open_plans(chunks: str | None, strategy: str | None) -> list[LayerPlan]:
    """All plans that the flags leave open, the simplest first: of what is not given, all."""
    if chunks == "off":
        return [STOCK]
    numbers = NUMBERS if chunks in (None, AUTO) else (int(str(chunks)),)
    free = strategy == AUTO or (strategy is None and chunks is None)
    names = tuple(Strategy) if free else (Strategy(strategy or "none"),)
    return simplest_first([LayerPlan(n, s) for n in numbers for s in names])


def obstacle(job: Job, strategy: str) -> str | None:
    """The setting of Megatron with which MoE layers do not run in chunks; None: there is none.

    Args:
        strategy: that is wanted.
    """
    if job.moe_token_dispatcher_type == "flex":
        return f"--moe-token-dispatcher-type flex: plan does not model its chunks; drop {CHUNKS}"
    args = SimpleNamespace(
        recompute_granularity=job.recompute_granularity,
        recompute_modules=job.recompute_modules,
        fp8=job.recipe is not None,
        fp8_recipe=job.recipe,
        overlap_moe_expert_parallel_comm=job.overlap_moe_expert_parallel_comm,
        expert_tensor_parallel_size=job.expert_tensor_parallel_size,
    )
    found = first_conflict(CONFLICTS, args, ("", *parts_of(strategy)))
    return None if found is None else found[1]


def exclude_chunks(given: dict[str, Any], ignored: Sequence[str]) -> None:
    """Keep Megatron's own MoE layers where a flag that plan ignores does not go with chunks.

    Args:
        given: values by Megatron's argument name; changed.
        ignored: the rest of the command line.

    Raises:
        PlanError: chunks are asked for.
    """
    found = first_conflict(CONFLICTS, SimpleNamespace(**values_of(ignored)))
    if found is None:
        return
    chunks = given.setdefault(attribute(CHUNKS), "off")
    if chunks != "off":
        raise PlanError(f"{CHUNKS} {chunks} cannot be combined with {found[1]}")


def shape_of(job: Job) -> LayerShape:
    """Sizes of the experts on one rank, with the bytes inside them that the planner counts.

    fc1's output and the activation function's: 3F elements a row if gated, else 2F.
    """
    width = job.moe_ffn_hidden_size // job.expert_tensor_parallel_size
    inside = (job.gates + 1) * width * job.element_bytes
    latent = job.moe_latent_size or job.hidden_size
    return LayerShape(latent, width, job.swiglu, job.element_bytes, inside)


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
    needs = footprint(shape, rows, 1, plan)
    return part._replace(
        pieces=tuple(_restored(piece, plan.strategy) for piece in part.pieces),
        widest=0,  # the gradients of a chunk's activations are in the buffers
        buffers=needs.ring_bytes + needs.temporary_bytes,
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


def within(job: Job, plans: Sequence[LayerPlan], rows: int, in_flight: int) -> list[LayerPlan]:
    """The plans that keep ``--moe-memory-budget``.

    Args:
        rows: that the experts get in a call. in_flight: calls that are kept at a time.

    Raises:
        PlanError: there is none.
    """
    size = parse_bytes(job.moe_memory_budget or "")
    budget = Budget(size, shape_of(job), lambda: in_flight)
    try:
        budget.require(plans, rows)
    except BudgetError as error:
        raise PlanError(
            f"--moe-memory-budget {size_text(size)} is too small for {in_flight} calls of MoE "
            f"layers in flight: the least is {size_text(error.needed_bytes)}; raise it to that"
        ) from None
    return [plan for plan in plans if budget.fits(plan, rows)]
