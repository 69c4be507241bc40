"""A job without a pipeline, on Megatron alone: one order, exactly known."""

from __future__ import annotations

from fractions import Fraction

from ..schedule import Placement, Schedule, ScheduleSpec
from ..schedule.actions import Action, Op
from .layout import Split
from .memory import message_bytes, rank_bytes
from .model import Job
from .point import NO_PIPELINE, Point
from .space import SearchSpace


def without_pipeline(space: SearchSpace, job: Job) -> Point:
    """One device's share of the model, whose microbatches run F, B and W one after the other.

    Raises:
        PlanError: the microbatches do not divide the batch.
    """
    microbatches, split = job.microbatches(), Split((job.num_layers,), even=True)
    work = space.workload(job, microbatches, split)
    placement = Placement.loop(1, 1)
    one = Schedule(NO_PIPELINE, placement, 1, ((Action(Op.F, 0, 0), Action(Op.BW, 0, 0)),))
    return Point(
        ScheduleSpec("1f1b", 1, microbatches, 1, work.costs),
        work,
        microbatches * sum(work.costs.per_rank_work(placement), Fraction(0)),
        Fraction(0),
        (Fraction(1),),
        (Fraction(0),),
        tuple(rank_bytes(one, work.stages, message_bytes(job))),
    )
