"""What ``plan`` searches: its options, and the search space of one division."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from .._input import meant
from ..plan.gpu import Gpu
from ..plan.model import Job, PlanError
from ..plan.slices import NUMBERS
from ..plan.space import SearchSpace
from ..schedule.generators import NAMES
from .options import SEARCHED
from .parser import Parser
from .plan_given import Given

OFFLOAD = ("half", "full", "auto")
CHUNKS = (2, 4, 8)


def declare(parser: Parser) -> None:
    """What is searched."""
    parser.declare("what is searched", SEARCHED)


def spaces(
    args: argparse.Namespace, jobs: Sequence[Job], gpu: Gpu, own: Given
) -> list[SearchSpace]:
    """What may be searched: one space for every division.

    Args:
        jobs: of every division, or of one.
        own: the user's own pipeline.

    Raises:
        PlanError: what was given is of one division, or there is none.
    """
    if len(jobs) == 1 and not args.grid and not own.searches:
        return [of_division(args, jobs[0], gpu, own)]
    if args.microbatches:
        raise PlanError(
            "--microbatches is of one division: give the parallel sizes and --pp beside it"
        )
    asked = numbers(args.micro_batch_sizes, "--micro-batch-sizes")
    found = []
    for job in jobs:
        sizes = asked or tuple(sorted({1, 2, 4, job.micro_batch_size}))
        share, rest = divmod(job.global_batch_size or 0, job.data_parallel_size)
        fitting = tuple(size for size in sizes if not rest and share % size == 0)
        if fitting:
            one = job.with_(micro_batch_size=fitting[0])
            space = of_division(args, one, gpu, own)
            found.append(replace(space, micro_batch_sizes=fitting))
    if not found:
        raise PlanError(
            f"--micro-batch-sizes {args.micro_batch_sizes}: none divides --global-batch-size "
            f"{jobs[0].global_batch_size} on any division; give others"
        )
    return found


def of_division(args: argparse.Namespace, job: Job, gpu: Gpu, own: Given) -> SearchSpace:
    """What one division's search may choose from."""
    pp = job.pipeline_model_parallel_size
    if pp < 2 and (args.pp is not None or not job.global_batch_size):
        raise PlanError(
            f"a pipeline needs at least 2 ranks, got --pp {pp}; give 2 or more, or --world-size "
            "without --pp to search all parallel sizes"
        )
    if args.microbatches is not None:
        if job.global_batch_size is not None:
            raise PlanError("--microbatches and --global-batch-size both give the batch; drop one")
        batch = args.microbatches * job.micro_batch_size * job.data_parallel_size
        job = job.with_(global_batch_size=batch)
    job.microbatches()  # refuses what cannot be divided
    offload = args.offload
    return SearchSpace(
        job,
        gpu,
        pp,
        schedules(args.schedules),
        numbers(args.chunks, "--chunks") or _chunks(job, own),
        _sizes(args, job),
        recompute(args, job),
        {None: OFFLOAD, "any": OFFLOAD, "off": ()}.get(offload, (str(offload),)),
        not args.no_balance,
        always_offload=offload in OFFLOAD,
        vocabulary=args.shard_vocabulary == "auto",
        full_recompute=args.cheap_recompute in (None, "auto"),
        overlap=own.overlap,
        slices=_slices(args),
    )


def _slices(args: argparse.Namespace) -> tuple[int, ...]:
    """Numbers of slices that are tried."""
    if args.slices == "off":
        return ()
    if args.slices in (None, "auto"):
        return NUMBERS
    return tuple(n for n in numbers(args.slices, "--slices") or () if n > 1)


def schedules(text: str | None) -> tuple[str, ...]:
    """Of ``--schedules``; all without it.

    Raises:
        PlanError: one of them is unknown.
    """
    names = tuple(text.split(",")) if text else NAMES
    for name in names:
        if name not in NAMES:
            raise PlanError(
                f"unknown schedule {name!r}; give some of {', '.join(NAMES)}{meant(name, NAMES)}"
            )
    return names


def _chunks(job: Job, own: Given) -> tuple[int, ...]:
    """``CHUNKS`` that there are layers for, and the user's own."""
    pp = job.pipeline_model_parallel_size
    mine = {own.chunks} if own.schedule != "1f1b" else set()
    return tuple(v for v in sorted({*CHUNKS} | mine) if v == 2 or v * pp <= job.num_layers)


def _sizes(args: argparse.Namespace, job: Job) -> tuple[int, ...]:
    given = numbers(args.micro_batch_sizes, "--micro-batch-sizes")
    if given is not None:
        return given
    assert job.global_batch_size is not None
    share = job.global_batch_size // job.data_parallel_size
    return tuple(b for b in sorted({1, 2, 4, job.micro_batch_size}) if share % b == 0)


def recompute(args: argparse.Namespace, job: Job) -> tuple[bool, ...]:
    """Which of without and with cheap recompute."""
    if args.cheap_recompute in (None, "auto"):
        if job.recompute_granularity == "full":
            return (False,)
        return (True,) if job.cheap_recompute else (False, True)
    if args.cheap_recompute == "on" and job.recompute_granularity == "full":
        raise PlanError("--cheap-recompute on has nothing to do under full recomputation")
    return (args.cheap_recompute == "on",)


def numbers(text: str | None, flag: str) -> tuple[int, ...] | None:
    """Such as 1,2,4; None if there is no text."""
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise PlanError(f"{flag} must be whole numbers >= 1 such as 1,2,4, got {text!r}")
    return numbers
