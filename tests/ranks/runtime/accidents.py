"""Passes that only take time, and what can go wrong in one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.runtime.executor import StageRunner
from tests.ranks.runtime import toy
from tests.support.held_time import HeldTime, TimeInPasses
from tests.support.waiting import wait_until


class SleepyRunner(StageRunner):
    """Passes that take time and compute nothing."""

    def __init__(
        self, seconds: float, rank: int, nap: Callable[[float], None] = time.sleep
    ) -> None:
        self.seconds, self.rank, self._nap = seconds, rank, nap
        self.special: dict[int, Callable[[], None]] = {}
        self.passes = self.sets = 0

    def _pass(self, units: int = 1) -> torch.Tensor:
        self.passes += 1
        say(f"pass {self.passes}")
        self._nap(units * self.seconds)
        action = self.special.get(self.passes)
        if action is not None:
            action()
        return torch.zeros(toy.SHAPE)

    def forward(self, chunk: int, microbatch: int, x: Any) -> torch.Tensor:
        """F."""
        self.sets += 1
        return self._pass()

    def backward(self, chunk: int, microbatch: int, grad: Any, split: bool) -> torch.Tensor:
        """B or BW."""
        self.sets -= not split
        return self._pass(1 if split else 2)

    def weight(self, chunk: int, microbatch: int) -> None:
        """W."""
        self.sets -= 1
        self._pass()

    def live_sets(self) -> int:
        """As counted."""
        return self.sets


def say(text: str) -> None:
    """Straight to the log, past any buffer."""
    os.write(2, f"<{text}>\n".encode())


def _raise(_: HeldTime) -> None:
    raise ValueError("the model is on fire")


def _take_long(clock: HeldTime) -> None:
    """A slow pass; meanwhile the whole job stands still for hours."""
    assert isinstance(clock, TimeInPasses)
    clock.nap(0.2)
    clock.jump(10_000)


def _come_late(clock: HeldTime) -> None:
    wait_until((clock.start.parent / "go on").exists, "nobody lets the pass go on")


def _replace_stderr(_: HeldTime) -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise OSError("nobody reads this")

    sys.stderr = Broken()  # type: ignore[assignment]
    say("stderr is broken")
    time.sleep(3600)


# In each the clock of the rank's watchdog.
ACCIDENTS: dict[str, Callable[[HeldTime], Any]] = {
    "raise": _raise,
    "sleep": lambda _: time.sleep(3600),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "slow pass": _take_long,
    "late": _come_late,
    "broken stderr": _replace_stderr,
}
