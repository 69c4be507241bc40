"""Autotuner by trials: plans of the MoE layers, tried in training for three steps each.

A step of training runs all its calls by one plan; so a forward pass that is repeated is cut as it
was, and Megatron's own layer can be one of the plans. Between steps all ranks that run them
together agree on a ``StepReport``, and everything here is a function of reports: all ranks take the
same decision. Plain Python; what touches devices and ranks is in the integration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .plan import LayerPlan, Strategy

STEPS = 3  # of a trial; the first one pays for what is loaded and allocated once
MARGIN = 0.01  # a plan must be faster than a simpler one by this


class StepReport(NamedTuple):
    """A step as its ranks have run it.

    Attributes:
        seconds: a token, on the slowest rank.
        room_bytes: left on the fullest device at its peak; infinite where there is no limit.
        rows: that the experts of a rank have held for backward, at most.
    """

    seconds: float
    room_bytes: float = float("inf")
    rows: float = 0

    @classmethod
    def of(cls, ranks: Sequence[StepReport]) -> StepReport:
        """The report of a step from those of all its ranks."""
        seconds, room, rows = zip(*ranks)
        return cls(max(seconds), min(room), max(rows))


class _Trial(NamedTuple):
    seconds: float
    room_bytes: float


class Tuner:
    """Chooses the plan of each step.

    The plan that keeps least is tried first. What keeps more follows, where the memory that is left
    at the peak has room for it.

    Args:
        plans: what may be chosen, the simplest first; each keeps less than the one before it.
        row_bytes: of a row of the experts, what a strategy keeps on the device.
        log: takes a line for people, at every decision.

    Attributes:
        plan: of the step.
        tries: whether the step is part of a trial.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        row_bytes: Callable[[Strategy], float],
        log: Callable[[str], None],
    ) -> None:
        self._plans, self._row_bytes, self._log = list(plans), row_bytes, log
        self._waiting = list(plans)
        self.plan = self._waiting.pop()
        self.tries = True
        self._steps: list[StepReport] = []
        self._trials: dict[LayerPlan, _Trial] = {}
        log(f"trying {len(plans)} plans, {STEPS} steps each")

    def end_step(self, report: StepReport) -> None:
        """Choose for the next step, after one of a trial; the same on all ranks."""
        self._steps.append(report)
        if len(self._steps) < STEPS:
            return
        seconds = min(step.seconds for step in self._steps[1:])
        room = min(step.room_bytes for step in self._steps)
        rows = max(step.rows for step in self._steps)
        self._trials[self.plan] = _Trial(seconds, room)
        self._steps = []
        kept = self._row_bytes(self.plan.strategy)
        while self._waiting:
            following = self._waiting.pop()
            if rows * (self._row_bytes(following.strategy) - kept) <= room:
                self.plan = following
                return
            self._log(f"{following} is not tried: {_gib(max(0, room))} are left at the peak")
        self._decide()

    def _decide(self) -> None:
        """Take the simplest plan within a margin of the fastest that leaves room."""
        self.tries, trials = False, self._trials
        fitting = [plan for plan in self._plans if plan in trials and trials[plan].room_bytes >= 0]
        if fitting:
            least = min(trials[plan].seconds for plan in fitting)
            near = (plan for plan in fitting if trials[plan].seconds <= least * (1 + MARGIN))
            self.plan = next(near)
        else:
            self.plan = max(trials, key=lambda plan: trials[plan].room_bytes)
        found = "; ".join(self._text(plan, trial) for plan, trial in trials.items())
        self._log(f"{self.plan}, of {found}")

    @staticmethod
    def _text(plan: LayerPlan, trial: _Trial) -> str:
        text = f"{plan}: {1e6 * trial.seconds:.3f} us a token"
        if trial.room_bytes < float("inf"):
            text += f", {_gib(trial.room_bytes)} left"
        return text


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
