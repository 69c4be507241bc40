"""``--pp-trace``, and bubble and peak in the log: planned, and in Megatron's line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ....runtime import files
from ....schedule.baseline import Promise, promise
from ....schedule.schedule import Schedule
from ...callbacks import Callback, Loads, Step
from ...errors import ConfigError
from ...feature import Feature, Flag, Run
from ...hooks import bound, hooked
from ...targets import PRINT_LAST, TRAINING_LOG
from . import measured, text
from .traces import Traces

logger = logging.getLogger(__name__)

_IN_LINE = "the log line would not say bubble and peak"


class Telemetry(Feature):
    """On for every schedule: a line of rank 0's log when a plan is known, and inside Megatron's
    training loop bubble and peak in its line."""

    flags = (
        Flag(
            "--pp-trace",
            "write each rank's measured timeline and peak resident activation sets here",
            "DIR",
            compared=lambda value, args: "a directory",  # may be each node's own
        ),
    )

    def check_flags(self, run: Run) -> None:
        trace = run.args.pp_trace
        if trace is None:
            return
        try:
            usable = os.access(files.folder(trace), os.W_OK)
            why = "it is not writable"
        except OSError as error:
            usable, why = False, error.strerror or str(error)
        if not usable:
            raise ConfigError(f"--pp-trace {trace} cannot be written ({why}); give another folder")

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None:
            return ()
        self._run = run
        self._traces = None if run.args.pp_trace is None else Traces(run.args.pp_trace)
        self._meter = measured.Meter()
        self._said = ""
        self._plan: Schedule | None = None  # the last one that was made
        self._ran: Schedule | None = None  # in the last step
        self._promise: tuple[Schedule, Promise] | None = None
        self._by_lengths = False  # a plan for the lengths of a step was made
        self._in_line = ""
        return (self,)

    def times(self, training: bool) -> bool:
        return self._traces is not None or (self._run.training and training)

    # --- plans ---

    def planned(self, plan: Schedule) -> None:
        former, self._plan = self._plan, plan
        if dist.get_rank() != 0:
            return
        line = text.of_plan(plan, self.promise(plan))
        # Of a ramp-up of the batch the first plan alone; of new measurements every other one.
        again = former is not None and former.microbatches == plan.microbatches
        if line != self._said:
            logger.log(logging.INFO if again or not self._said else logging.DEBUG, "%s", line)
            self._said = line

    def planned_for(self, plan: Schedule, loads: Loads) -> None:
        self._plan = plan
        first, self._by_lengths = not self._by_lengths, True
        if dist.get_rank() == 0 and first:
            line = text.of_plan(plan, self.promise(plan), loads)
            logger.info("%s; planned for its lengths, as every step is", line)

    def promise(self, plan: Schedule) -> Promise:
        """Of a plan, simulated at its first use."""
        if self._promise is None or self._promise[0] is not plan:
            self._promise = plan, promise(plan)
        return self._promise[1]

    # --- an iteration ---

    def end(self, step: Step) -> None:
        if step.training and self._run.training:
            self._meter.add(step.recorder, step.call.group)
            self._ran = step.plan
        if self._traces is not None:
            self._traces.take(step)

    def returning(self, step: Step) -> None:
        if self._traces is not None:
            self._traces.write(step.losses)

    # --- Megatron's loop ---

    @hooked(TRAINING_LOG, _IN_LINE, when=lambda self: self._run.training)
    def _with_measuring(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        given = bound(original, *args, **kwargs).arguments
        due = given["iteration"] % get_args().log_interval == 0
        found = self._meter.read() if due or given.get("is_first_iteration") else None
        if found is not None:
            assert self._ran is not None
            bubble, peak = found[0], found[1] / self._ran.chunks
            self._in_line = text.in_line(100 * bubble, peak, self.promise(self._ran))
        try:
            return original(*args, **kwargs)
        finally:
            self._in_line = ""

    @hooked(PRINT_LAST, _IN_LINE, when=lambda self: self._run.training)
    def _with_text(
        self, original: Callable[..., Any], message: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._in_line and " iteration " in str(message) and str(message).endswith("|"):
            message, self._in_line = f"{message}{self._in_line}", ""
        return original(message, *args, **kwargs)
