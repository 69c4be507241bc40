"""Passes that only take time, and what can go wrong in one."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from tests.ranks.runtime import toy


class SleepyRunner:
    """Passes that take time and compute nothing."""

    def __init__(self, seconds: float, rank: int, special: dict[int, Any] | None = None) -> None:
        self.seconds, self.rank, self.special = seconds, rank, special or {}
        self.passes = self.sets = 0

    def _pass(self, units: int = 1) -> torch.Tensor:
        self.passes += 1
        say(f"pass {self.passes}")
        nap(units * self.seconds)
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


def nap(seconds: float) -> None:
    """Sleep in slices: whoever is stopped meanwhile has the rest of it still to do."""
    slices = max(1, round(seconds / 0.05))
    for _ in range(slices):
        time.sleep(seconds / slices)


def say(text: str) -> None:
    """Straight to the log, past any buffer."""
    os.write(2, f"<{text}>\n".encode())


def _raise() -> None:
    raise ValueError("the model is on fire")


def _replace_stderr() -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise OSError("nobody reads this")

    sys.stderr = Broken()  # type: ignore[assignment]
    time.sleep(3600)


def _replace_handler() -> None:
    def in_good_order(number: int, frame: object) -> None:
        say("handler of the training script")

    signal.signal(signal.SIGTERM, in_good_order)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    raise SystemExit(0)


def _fork_and_terminate() -> None:
    """As data loaders do with their workers."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(1)
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    say(f"child ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    time.sleep(1)


ACCIDENTS = {
    "raise": _raise,
    "sleep": lambda: time.sleep(3600),
    "slow pass": lambda: nap(0.8),
    "broken stderr": _replace_stderr,
    "own handler": _replace_handler,
    "child": _fork_and_terminate,
}
