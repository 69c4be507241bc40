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


def _replace_handler(clock: HeldTime) -> None:
    def in_good_order(number: int, frame: object) -> None:
        say("handler of the training script")

    signal.signal(signal.SIGTERM, in_good_order)
    os.kill(os.getpid(), signal.SIGTERM)
    clock.wait_for_looks(3)  # Whatever the watchdog makes of it, it has made by then.
    raise SystemExit(0)


def _fork_and_terminate(clock: HeldTime) -> None:
    """As data loaders do with their workers."""
    (started, start), (ended, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(end)
        os.write(start, b"x")
        os.read(ended, 1)  # Until this rank is gone.
        os._exit(1)
    os.read(started, 1)
    os.kill(pid, signal.SIGTERM)
    say(f"child ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    clock.wait_for_looks(3)


# In each the clock of the rank's watchdog.
ACCIDENTS: dict[str, Callable[[HeldTime], Any]] = {
    "raise": _raise,
    "sleep": lambda _: time.sleep(3600),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "slow pass": _take_long,
    "late": _come_late,
    "broken stderr": _replace_stderr,
    "own handler": _replace_handler,
    "child": _fork_and_terminate,
}
