"""Copies that are as late as late can be, without a clock."""

from __future__ import annotations

import threading

from megatron_ext.offload.device import Direction


class Gate:
    """Copies of one direction do not start before it opens.

    ``delay`` is for ``Faults``.
    """

    def __init__(self, direction: Direction) -> None:
        self._direction, self._event = direction, threading.Event()
        self.open = self._event.set

    def delay(self, direction: Direction) -> float:
        """Wait if the copy is of that direction."""
        if direction is self._direction:
            self._event.wait(60)
        return 0.0
