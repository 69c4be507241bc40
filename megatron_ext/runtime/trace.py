"""Recorder of one rank: times of its compute actions and its resident sets.

Every rank times from a zero of its own. ``Recorder.zero_unix_us`` says where that zero lies on the
machine's wall clock, so ``zero_unix_us + start_us`` puts the ranks of one node on one clock. Ranks
of different nodes are off by what their clocks differ.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..schedule.actions import AnyAction
from . import files

EVERY = 50  # iterations
_NOTHING = nullcontext()


class _Waits:
    """Adds up the time inside it. One object for all: it is entered for every message."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


class Recorder:
    """Measures one iteration; ``resident`` always, times only with ``timed``.

    CUDA times come from events, read once at the end of the iteration, so that measuring does
    not synchronise the device between passes.

    Attributes:
        peak_sets: most activation sets held at once since ``reset``; slices count as their shares.
        machine: what the passes run on, for people.
    """

    def __init__(self, timed: bool, device: torch.device) -> None:
        self._timed = timed
        self.machine = machine_text(device)
        self._cuda = timed and device.type == "cuda"
        self._waits = _Waits()
        self.reset()

    def reset(self) -> None:
        """Start a new iteration."""
        self.peak_sets: float = 0
        self._spans: list[tuple[AnyAction, Any, Any]] = []
        self._waits.seconds = 0.0
        self._zero_unix = 0.0
        self._zero: Any = None
        if self._cuda:
            self._zero = self._now()
        elif self._timed:
            self._zero_unix, self._zero = _both_clocks()

    def resident(self, sets: float) -> None:
        """Note how many activation sets the rank holds now."""
        self.peak_sets = max(self.peak_sets, sets)

    def measure(self, action: AnyAction) -> AbstractContextManager[None]:
        """Time ``action``."""
        return self._measure(action) if self._timed else _NOTHING

    @contextmanager
    def _measure(self, action: AnyAction) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((action, start, self._now()))

    def wait(self) -> AbstractContextManager[None]:
        """Time spent blocked on a message (host time)."""
        return self._waits

    def events(self) -> list[dict[str, Any]]:
        """``[{"action", "start_us", "end_us"}]`` since ``reset``; waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        return [
            {"action": str(a), "start_us": self._since_zero(s), "end_us": self._since_zero(e)}
            for a, s, e in self._spans
        ]

    def durations(self) -> list[tuple[AnyAction, float]]:
        """Seconds that each action since ``reset`` took; waits for the device once."""
        if not self._cuda:
            return [(action, end - start) for action, start, end in self._spans]
        torch.cuda.synchronize()
        return [(action, s.elapsed_time(e) / 1e3) for action, s, e in self._spans]

    def unfinished(self) -> AnyAction | None:
        """The first action since ``reset`` that the device has not ended; None if there is none, or
        if the host knows (on the CPU). Callable from another thread."""
        spans = tuple(self._spans) if self._cuda else ()
        return next((action for action, _, end in spans if not end.query()), None)

    def extent(self) -> tuple[float, float]:
        """(seconds of compute, seconds from the first start to the last end); waits for the device
        once. Zeros if nothing ran."""
        events = self.events()
        if not events:
            return 0.0, 0.0
        busy = sum(event["end_us"] - event["start_us"] for event in events)
        whole = max(e["end_us"] for e in events) - min(e["start_us"] for e in events)
        return busy / 1e6, whole / 1e6

    @property
    def zero_unix_us(self) -> float | None:
        """Wall clock (microseconds since 1970) at the zero of ``events``;
        None if not timed.

        On CUDA that is the moment the device reached ``reset``, and asking waits for the device.
        """
        if not self._timed:
            return None
        if not self._cuda:
            return round(self._zero_unix * 1e6, 1)
        # Events carry no wall clock: stamp a new one when it has happened, and go back from there.
        moment = self._now()
        moment.synchronize()
        since_zero_ms: float = self._zero.elapsed_time(moment)
        now = time.time()
        return round(now * 1e6 - since_zero_ms * 1e3, 1)

    @property
    def waited_us(self) -> float:
        """Host time this rank was blocked on messages. NCCL blocks the stream, not the host, so
        there the gaps between ``events`` show it and this does not."""
        return round(self._waits.seconds * 1e6, 1)

    def _now(self) -> Any:
        # A torch.cuda.Event on CUDA, else seconds as a float.
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_zero(self, moment: Any) -> float:
        since_us: float
        if self._cuda:
            since_us = self._zero.elapsed_time(moment) * 1e3
        else:
            since_us = (moment - self._zero) * 1e6
        return round(since_us, 1)


def _both_clocks() -> tuple[float, float]:
    """(wall clock, performance counter) of one moment.

    Between two calls a rank may lose its core for longer than a pass takes. So the wall clock is
    read between two readings of the counter, a few times, and the closest pair of those taken.
    """
    best = (float("inf"), 0.0, 0.0)
    for _ in range(5):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        best = min(best, (after - before, wall, (before + after) / 2))
    return best[1:]


def machine_text(device: torch.device) -> str:
    """What a rank's passes ran on, for the picture of its times."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return f"{ranks} ranks on {os.cpu_count()} CPU cores" if ranks > 1 else "CPU"


class TraceFile:
    """``DIR/rank<R>.jsonl``: one JSON object per iteration, appended as training runs.

    What tracing costs is bounded: after the first ``EVERY`` iterations of a kind only one in
    ``EVERY`` is written. A written one waits for the device once, at its end, and takes about 80
    bytes a pass.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(self, directory: str | Path, name: str) -> None:
        self.directory = files.folder(directory)
        self._file = files.create(self.directory / f"{name}.jsonl")

    @staticmethod
    def due(iteration: int) -> bool:
        """True if the iteration of this number, from 1, is to be written."""
        return iteration <= EVERY or iteration % EVERY == 0

    def write(self, record: dict[str, Any]) -> None:
        """Append one line and flush it: a run that dies keeps what it measured."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
