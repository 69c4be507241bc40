"""What the schedule gives, in rank 0's log: as planned, beside 1F1B, and at the end as measured."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch.distributed as dist

from ....schedule.baseline import Promise, promise, stock
from ....schedule.generators import generate
from ....schedule.schedule import Schedule
from ...callbacks import Callback, Loads, Step
from ...hooks import hooked
from ...targets import TRAIN

logger = logging.getLogger(__name__)


class Summary(Callback):
    """One line when a plan is known, and one when training has ended.

    Args:
        training: Megatron's training loop is there, whose end is the end of training.
    """

    def __init__(self, training: bool) -> None:
        self._training, self._said = training, ""
        self._plan: Schedule | None = None
        self._promise: tuple[Schedule, Promise] | None = None
        self._measured: list[tuple[float, float]] = []
        self._made = self._planned = 0  # plans for the lengths of steps, and those steps

    def promise(self, plan: Schedule) -> Promise:
        """Of a plan, simulated at its first use."""
        if self._promise is None or self._promise[0] is not plan:
            self._promise = plan, promise(plan)
        return self._promise[1]

    def planned(self, plan: Schedule) -> None:
        former, self._plan = self._plan, plan
        if dist.get_rank() != 0:
            return
        text = self._text(plan)
        # Of a ramp-up of the batch the first plan alone; of new measurements every other one.
        again = former is not None and former.microbatches == plan.microbatches
        if text != self._said:
            logger.log(logging.INFO if again or not self._said else logging.DEBUG, "%s", text)
            self._said = text

    def improved(self, plan: Schedule, former: Schedule) -> None:
        if dist.get_rank() == 0:
            quick, better = promise(former).bubble_text, self.promise(plan).bubble_text
            logger.info(
                "%s, %d microbatches: a better order from this step on, searched for beside "
                "training: planned bubble %s (%s by the quick order so far)",
                plan.name,
                plan.microbatches,
                better,
                quick,
            )
        self._plan = plan

    def planned_for(self, plan: Schedule, loads: Loads) -> None:
        self._plan = plan
        self._made += 1
        if dist.get_rank() == 0 and self._made == 1:
            logger.info("%s; planned for its lengths, as every step is", self._text(plan, loads))

    def begin(self, step: Step) -> None:
        self._planned += step.loads is not None and bool(step.loads.units)

    def measured(self, bubble: float, peak: float) -> None:
        """Take a line of Megatron's log: a share, and microbatches."""
        self._measured.append((bubble, peak))

    def _text(self, plan: Schedule, loads: Loads | None = None) -> str:
        own, other = self.promise(plan), stock(plan)
        if other is not None and loads is not None:
            other = _as_given(other, loads)
        bubble, peak = f"planned bubble {own.bubble_text}", f"peak activations {own.peak_text}"
        peak += " microbatches a rank"
        if other is not None:
            beside = promise(other)
            bubble += f" (1F1B {beside.bubble_text})"
            peak += f" (1F1B {beside.peak_text})"
        chunks = f"{plan.chunks} chunk{'s' * (plan.chunks > 1)}"
        return (
            f"{plan.name}, {plan.pp} ranks x {chunks}, {plan.microbatches} microbatches"
            f"{_slices(plan)}: {bubble}, {peak}"
        )

    @hooked(TRAIN, "the log would not compare measured and planned", lambda self: self._training)
    def _with_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except SystemExit:  # how Megatron ends at --exit-interval and on a signal
            self._end()
            raise
        self._end()
        return result

    def _end(self) -> None:
        if self._plan is None or not self._measured or dist.get_rank() != 0:
            return
        if self._planned:
            logger.info(
                "steps whose microbatches differ in length: %d; plans made for them: %d",
                self._planned,
                self._made,
            )
        # The first iterations warm up.
        bubbles, peaks = zip(*(self._measured[1:] or self._measured))
        own = self.promise(self._plan)
        logger.info(
            "measured bubble %.1f %% (plan %s), peak activations %.4g microbatches a rank (plan "
            "%s), mean of %d lines of the log",
            100 * statistics.fmean(bubbles),
            own.bubble_text,
            max(peaks),
            own.peak_text,
            len(bubbles),
        )


def _as_given(stock: Schedule, loads: Loads) -> Schedule:
    """1F1B of these microbatches, whole, in the order in which they are given."""
    rows = {
        number: tuple(sum(column, Fraction(0)) for column in zip(*units))
        for number, units in zip(loads.order, loads.units)
    }
    costs = replace(stock.costs, units=tuple(rows[number] for number in sorted(rows)))
    return generate("1f1b", stock.pp, stock.microbatches, costs=costs)


def _slices(plan: Schedule) -> str:
    """How many each microbatch has; empty where none is cut."""
    return f" in {plan.slices[0]} slices each" if plan.slices else ""
