"""Better orders for numbers of microbatches that come in mid-run, searched for beside the steps.

A step at a new number runs a quick order. The pipeline's first rank searches for a better one in
another process; ``STEPS`` training steps later all ranks take that. Which step it is depends on the
steps before and on nothing else: ranks of other pipelines, which meet this one's in tensor, context
and expert parallelism and in reductions of gradients, must change in the same one, and with
dropout, whose masks follow the order, a run stays reproducible. So a search that is not over by
then is waited for, and one that has failed is made again in the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..schedule.beside import Search, SearchFailed
from ..schedule.schedule import Schedule
from ..schedule.training import TrainingOrder
from .utils import gather

logger = logging.getLogger(__name__)

STEPS = 32  # training steps for a search of a second's effort or less
Armed = Callable[..., AbstractContextManager[None]]  # ``Watchdog.armed``


class Searches:
    """Of one model. All ranks of its pipeline call the same functions in the same steps.

    New numbers of microbatches are searched for, and their orders taken, one after the other.
    """

    def __init__(self) -> None:
        self._step = self._last = 0
        self._due: dict[int, int] = {}
        # Of the pipeline's first rank alone.
        self._requests: dict[int, TrainingOrder] = {}
        self._found: dict[int, Schedule | SearchFailed | None] = {}
        self._running: tuple[int, Search] | None = None

    def step(self) -> None:
        """A training step begins."""
        self._step += 1
        if self._running is not None and self._running[1].done:
            self._collect()
        self._start()

    def add(self, microbatches: int, request: TrainingOrder, leads: bool) -> None:
        """This step runs a quick order, the first one for ``microbatches``.

        Args:
            leads: this is the pipeline's first rank.
        """
        steps = STEPS * max(1, math.ceil(request.spec.effort))
        self._due[microbatches] = self._last = max(self._step, self._last) + steps
        if leads:
            self._requests[microbatches] = request
            self._start()

    def take(self, microbatches: int, group: Any, armed: Armed) -> Schedule | None:
        """The better order, in its step; else, and if there is none, None. Collective then."""
        if self._step < self._due.get(microbatches, self._step + 1):
            return None
        with armed("for the search of a better order"):
            mine = self._result(microbatches) if microbatches in self._requests else None
            found: Schedule | None = gather(mine, group)[0]
        self.drop(microbatches)
        return found

    def drop(self, microbatches: int) -> None:
        """No better order is wanted any more."""
        self._due.pop(microbatches, None)
        self._requests.pop(microbatches, None)
        self._found.pop(microbatches, None)
        if self._running is not None and self._running[0] == microbatches:
            self._running[1].close()
            self._running = None

    def close(self) -> None:
        """Drop all."""
        for microbatches in list(self._due):
            self.drop(microbatches)

    def _start(self) -> None:
        for microbatches, request in self._requests.items():
            if self._running is None and microbatches not in self._found:
                try:
                    self._running = microbatches, Search(request)
                except SearchFailed as error:
                    self._found[microbatches] = error

    def _collect(self) -> None:
        """The result of the search that runs; waits for it."""
        assert self._running is not None
        (microbatches, search), self._running = self._running, None
        try:
            self._found[microbatches] = search.result()
        except SearchFailed as error:
            self._found[microbatches] = error

    def _result(self, microbatches: int) -> Schedule | None:
        while microbatches not in self._found:
            self._collect()
            self._start()
        found = self._found[microbatches]
        if isinstance(found, SearchFailed):
            logger.warning(
                "the search beside training for %d microbatches failed (%s); this step makes it",
                microbatches,
                found,
            )
            return self._requests[microbatches].better()
        return found
