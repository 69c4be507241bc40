"""Bubble and peak of the last iterations, as measured."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from ....runtime.trace import Recorder
from ...utils import gather

# Iterations whose times are kept for the next line: enough for a mean, few enough to hold.
_KEPT = 8


class Meter:
    """Bubble and peak of the last iterations; the device is waited for only when they are read.

    Megatron itself waits for the device there, and nowhere else because of us.
    """

    def __init__(self) -> None:
        self._recent: deque[Recorder] = deque(maxlen=_KEPT)
        self._peak: float = 0
        self._group: Any = None

    def add(self, recorder: Recorder, group: Any) -> None:
        """Take a training iteration, which the device may still be busy with.

        Args:
            recorder: its times; not to be reset.
        """
        self._recent.append(recorder)
        self._peak, self._group = max(self._peak, recorder.peak_sets), group

    def read(self) -> tuple[float, float] | None:
        """Bubble and peak since the last call; all ranks of the pipeline call this together.

        Returns:
            The mean bubble of the last iterations (8 at most), where an iteration's bubble is the
            mean over ranks of the share of time, from the first start to the last end of the
            rank on which that is longest, in which the rank computes nothing; and the most
            activation sets on a rank. None if there was no iteration.
        """
        if not self._recent:
            return None
        mine = [recorder.extent() for recorder in self._recent], self._peak
        self._recent.clear()
        self._peak = 0
        every = gather(mine, self._group)
        bubbles = [_bubble(ranks) for ranks in zip(*(extents for extents, _ in every))]
        return statistics.fmean(bubbles), max(peak for _, peak in every)


def _bubble(ranks: Sequence[tuple[float, float]]) -> float:
    """Of one iteration, from every rank's (compute, first start to last end)."""
    busy, extents = zip(*ranks)
    whole = max(extents)
    return 1 - sum(busy) / (len(ranks) * whole) if whole > 0 else 0.0
