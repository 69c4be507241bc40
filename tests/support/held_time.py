"""Stand-ins for ``time`` in ``megatron_ext.runtime.watchdog``.

On a busy machine any rank may come seconds late, which to a watchdog looks like a hang. So its time
stands still until a test, or an accident, lets it go: then only who has to wait for ever gives up.
"""

from __future__ import annotations

import time
from pathlib import Path

from megatron_ext.runtime import watchdog
from tests.support.waiting import wait_until


class HeldTime:
    """Real time, from when the file ``start`` is there.

    Args:
        start: a file that somebody makes.
        leave: likewise; until then the pause lasts in which a rank that has reported waits for the
            reports of others. None: it takes its time.

    Attributes:
        start: that file.
        looks: how often the watchdog has asked for the time, which it does behind everything else.
    """

    def __init__(self, start: Path, leave: Path | None = None) -> None:
        self.start, self._leave = start, leave
        self._began: float | None = None
        self.looks = 0

    def install(self) -> None:
        """Give it to the watchdogs of this process."""
        watchdog.time = self  # type: ignore[assignment]

    def monotonic(self) -> float:
        """As ``time.monotonic``."""
        self.looks += 1
        if self._began is None:
            if not self.start.exists():
                return 0.0
            self._began = time.monotonic()
        return time.monotonic() - self._began

    def sleep(self, seconds: float) -> None:
        """As ``time.sleep``."""
        if self._leave is None or not seconds:
            time.sleep(seconds)
        else:
            wait_until(self._leave.exists, "nobody let the rank leave")

    def nap(self, seconds: float) -> None:
        """Spend time in a pass."""
        time.sleep(seconds)

    def wait_for_looks(self, count: int = 2) -> None:
        """Until the watchdog has judged what there was to see when this was called."""
        # The second look comes behind the judgement that follows the first.
        before = self.looks
        wait_until(lambda: self.looks >= before + count, "the watchdog does not look", every=0.002)


class TimeInPasses(HeldTime):
    """Time that only passes in passes, in steps that the watchdog sees one by one."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._now = 0.0

    def monotonic(self) -> float:
        """See ``HeldTime``."""
        self.looks += 1
        return self._now

    def nap(self, seconds: float) -> None:
        """See ``HeldTime``."""
        for _ in range(round(seconds / watchdog.POLL_SECONDS)):
            self.jump(watchdog.POLL_SECONDS)

    def jump(self, seconds: float) -> None:
        """``seconds`` pass at once, as for a process that was stopped."""
        self._now += seconds
        self.wait_for_looks()
