"""Sets that grow between B and W: counted in caps that are fractions of 1F1B's peak, and logged."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction

from ....plan.budget import Budget
from ....plan.memory import growth
from ....plan.model import PlanError
from ....schedule import AUTO, Placement
from ....schedule.memory_cap import ShareCap, number_text
from ...arguments import MegatronArgs
from ...errors import ConfigError
from .choose import ScheduleRequest
from .job import job_of_args

logger = logging.getLogger(__name__)

_SMALL = Fraction(21, 20)


def counted(args: MegatronArgs, request: ScheduleRequest) -> ScheduleRequest:
    """``request`` with a fraction of 1F1B's peak as a fraction of its bytes.

    As of its sets where they do not grow between B and W, and where the model is not modelled.
    """
    auto = request.name == AUTO
    if request.cap_bytes is not None or not (auto or request.splits_backward):
        return request
    assert request.splits is not None
    try:
        budget = Budget(job_of_args(args), 0, request.splits, request.profile)
        most = growth(budget.stages(Placement.loop(args.pipeline_model_parallel_size, 1)))
    except (ConfigError, PlanError):
        return request
    if most <= _SMALL:
        return request
    if args.rank == 0:
        logger.warning(
            "megatron_ext: --pp-schedule %s: an activation set takes up to %s times as many bytes "
            "between B and W as before B (inputs and output gradients of linear layers); "
            "a --pp-memory-cap counts them, the memory of a schedule's name does not",
            request.name,
            number_text(most),
        )
    if auto or request.cap is not None:
        cap = request.cap or ShareCap(Fraction(1))
        assert isinstance(cap, ShareCap)
        request = replace(request, cap=replace(cap, growth=most))
    return request
