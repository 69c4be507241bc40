"""Divisions of a model over a number of devices, as Megatron's rules allow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._input import attribute
from .flags import job_of
from .gpu import NODE
from .model import Job, PlanError

PAIRS = "--overlap-moe-expert-parallel-comm"
TOKENS = 4096  # of a sequence: least a context-parallel rank is given by the search
SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
RULES = (
    "tensor parallel ranks divide heads and lie in one node, the pipeline has no more stages than "
    "layers, data-parallel ranks divide --global-batch-size, twice the context-parallel ranks "
    "divide --seq-length, expert-parallel ranks divide the experts"
)


def divisions(given: dict[str, Any], node: int = NODE) -> list[Job]:
    """Every division of ``--world-size`` devices; those without a pipeline are among them.

    Sizes in ``given`` stay. Sequence parallelism is on with tensor parallelism, the distributed
    optimizer wherever Megatron has it for the optimizer.

    Args:
        given: Megatron's arguments by name, with the world size and the global batch size.
        node: devices of one node.

    Raises:
        PlanError: arguments are missing, or there is no such division.
    """
    for name in ("world_size", "global_batch_size"):
        if given.get(name) is None:
            flag = "--" + name.replace("_", "-")
            raise PlanError(f"the search over parallel sizes needs {flag} too")
    layout = given.get("pipeline_model_parallel_layout")
    if layout is not None and "|" in str(layout) and given.get(SIZES[1]) is None:
        raise PlanError("--pipeline-model-parallel-layout lists pipeline stages: give --pp too")
    jobs: list[Job] = []
    failed: PlanError | None = None
    job_of(undivided(given))
    for sizes in _sizes(given, node):
        try:
            job = job_of(_divided(given, sizes))
            if job.global_batch_size is None or job.global_batch_size % job.data_parallel_size:
                continue
            if job.num_query_groups % sizes[0] and sizes[0] % job.num_query_groups:
                continue
        except PlanError as error:
            failed = error
            continue
        jobs.append(job)
    if not jobs:
        fixed = [f"{n.replace('_', '-')} {given[n]}" for n in SIZES if given.get(n) is not None]
        with_ = f" with {', '.join(fixed)}" if fixed else ""
        why = f" (the last one tried: {failed})" if failed else ""
        raise PlanError(
            f"--world-size {given['world_size']} has no division{with_} for this model: {RULES}"
            f"{why}"
        )
    return jobs


def undivided(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model on one device."""
    alone = {"world_size": None, attribute(PAIRS): False}  # which needs experts on several ranks
    return given | alone | dict.fromkeys(SIZES, 1)


def _divided(given: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    out = given | dict(zip(SIZES, sizes))
    if sizes[0] > 1:
        out["sequence_parallel"] = True
    if given.get("optimizer", "adam") in ("adam", "sgd"):
        out["use_distributed_optimizer"] = True
    return out


def _sizes(given: dict[str, Any], node: int) -> Iterator[tuple[int, ...]]:
    world, experts = given["world_size"], given.get("num_experts") or 0
    sequence, layers = given["seq_length"], given.get("num_layers") or world
    for tp in _options(given, SIZES[0], (n for n in _divisors(node) if n <= world)):
        for cp in _options(given, SIZES[2], _context(sequence)):
            if world % (tp * cp) or (cp > 1 and sequence % (2 * cp)):
                continue
            for pp in _options(given, SIZES[1], _divisors(world // (tp * cp))):
                if world % (tp * cp * pp) or pp > layers:
                    continue
                if not experts:
                    yield tp, pp, cp, 1, tp
                    continue
                etp = given.get(SIZES[4]) or 1
                for ep in _options(given, SIZES[3], _divisors(experts)):
                    alone = ep == 1 and given.get(attribute(PAIRS))
                    if world // pp % (ep * etp) == 0 and not alone:
                        yield tp, pp, cp, ep, etp


def _options(given: dict[str, Any], name: str, values: Any) -> list[int]:
    return [given[name]] if given.get(name) is not None else list(values)


def _context(sequence: int) -> list[int]:
    return [1] + [n for n in (2, 4, 8, 16, 32) if sequence // n >= TOKENS]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
