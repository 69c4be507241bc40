"""``--pp-slices auto``: as many slices as make a step shortest under the memory cap."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from ....plan.slices import overhead
from ....schedule import AUTO, NAMES, select
from ....schedule.memory_cap import number_text
from ....schedule.spec import Cut
from ...arguments import MegatronArgs
from ...errors import ConfigError
from .choose import ScheduleRequest

logger = logging.getLogger(__name__)


def with_slices(
    args: MegatronArgs,
    request: ScheduleRequest,
    microbatches: int,
    names: Sequence[str] = NAMES,
    chunks: int | None = None,
) -> ScheduleRequest:
    """``request`` with the best of the cuts that it has to choose from; the others are gone.

    Quick orders are compared, in which the W of every slice pays for adding to the gradients.

    Args:
        args: Megatron's.
        request: what ``--pp-schedule`` asks for.
        microbatches: of a step.
        names: schedules that ``auto`` may take.
        chunks: model chunks a rank; None: the schedule's own.

    Raises:
        ConfigError: no number of slices keeps the cap.
    """
    if not request.cuts:
        return request
    tokens = request.cuts[0].ends[-1] * args.micro_batch_size
    more = overhead(tokens)
    times: dict[int, Fraction] = {}
    found: dict[int, Cut | None] = {}
    failed: ValueError | None = None
    for cut in (None, *request.cuts):
        asked = replace(request, cut=None if cut is None else cut._replace(overhead=more))
        spec = asked.spec(args.pipeline_model_parallel_size, chunks, microbatches)
        spec = replace(spec.order_alone() if spec.name != AUTO else spec, effort=0, overlap=False)
        count = 1 if cut is None else len(cut.ends)
        try:
            times[count], found[count] = select(replace(spec, names=tuple(names))).time, cut
        except ValueError as error:
            failed = error
    if not times:
        raise ConfigError(f"--pp-slices auto: no number of slices keeps the cap: {failed}")
    best = min(times, key=lambda count: (times[count], count))
    if args.rank == 0:
        logger.info("%s", _text(times, best, more))
    args.pp_slices = best
    return replace(request, cut=found[best], cuts=())


def _text(times: dict[int, Fraction], best: int, more: Fraction) -> str:
    """What is chosen, and what it gains."""
    whole = times.get(1)
    if best == 1:
        gain = "whole microbatches are fastest"
    elif whole is None:
        gain = f"{best} slices a microbatch; whole ones do not keep the cap"
    else:
        gain = f"{best} slices a microbatch: a step takes {float(1 - times[best] / whole):.1%} less"
        gain += " than with whole ones"
    every = ", ".join(f"{count}: {number_text(time)}" for count, time in sorted(times.items()))
    return (
        f"--pp-slices auto: {gain} (makespans of quick orders by slices: {every}; the W of every "
        f"slice takes {float(more):.2g} of a whole one longer, as measured on an H200)"
    )
