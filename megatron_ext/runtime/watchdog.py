"""Watchdog: turns a hang into a per-rank report and a non-zero exit.

A rank that waits for a dead or stuck peer sits inside a C++ call where no Python runs. So a thread
watches the progress of the main one, writes what this rank was waiting for, and ends the process.

The thread needs the GIL, which waits inside torch.distributed release; a native extension that
hangs while it holds the GIL is out of reach.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..schedule.actions import AnyAction

EXIT_STATUS = 75  # EX_TEMPFAIL: the job may succeed when it is started again.
POLL_SECONDS = 0.5
# Between the report of a hang and the exit: peers that got stuck a little later report their hang
# too, and not that this rank has closed its connections.
GRACE_SECONDS = 2.0
ENVIRONMENT = "MEGATRON_EXT_WATCHDOG_SECONDS"
_DEFAULT_SECONDS = 600.0  # Megatron's default of --distributed-timeout-minutes


def limit(seconds: float = _DEFAULT_SECONDS) -> float:
    """The longest time without progress: ``MEGATRON_EXT_WATCHDOG_SECONDS``, or else ``seconds``."""
    return float(os.environ.get(ENVIRONMENT, seconds))


class Watchdog:
    """Watches one rank.

    Args:
        name: how the report calls this rank.
        timeout_seconds: longest time without progress inside ``armed``.

    Attributes:
        pending: what the device waits for, for reports, where the host does not wait itself (NCCL):
            a rank that hangs there stops at its next synchronisation, often behind its passes.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._armed = self._ending = False
        self._steps = 0
        self._place: tuple[AnyAction, int, int] | None = None  # action, position, of how many
        self._detail = ""
        self._sending: Callable[[], list[int]] = list
        self.pending: Callable[[], str] = str
        # The exception on its way through nested blocks that has been reported already.
        self._reported: int | None = None

    def at(
        self, action: AnyAction, position: int, total: int, sending: Callable[[], list[int]]
    ) -> None:
        """Progress: ``action``, number ``position`` of ``total``, starts now."""
        self._place = action, position + 1, total
        self._detail, self._sending = "", sending
        self._steps += 1

    def waiting(self, detail: str, sending: Callable[[], list[int]] | None = None) -> None:
        """Progress: within the present action, the rank now does, or waits, as ``detail`` says."""
        self._detail = detail
        if sending is not None:
            self._place, self._sending = None, sending
        self._steps += 1

    @contextmanager
    def armed(self, detail: str = "before its first action") -> Iterator[None]:
        """Watch inside the block; an exception that leaves it is reported and passed on.

        So is ``sys.exit`` with a status that is not 0: a pass that ends its process ends others,
        too. Blocks may be nested: an exception is reported by the innermost. A ``ValueError``
        outside of an action speaks for itself.

        Args:
            detail: what the rank does at first.
        """
        if self._thread is None:
            self._closed.clear()
            self._thread = threading.Thread(target=self._watch, name="pp-watchdog", daemon=True)
            self._thread.start()
        outer, before = self._armed, self._detail
        self._place, self._detail, self._sending = None, detail, list
        self._steps += 1
        self._armed = True
        try:
            yield
        except (Exception, SystemExit) as error:
            self._stay_if_ending()
            orderly = isinstance(error, SystemExit) and not error.code
            quiet = isinstance(error, ValueError) and self._place is None
            if self._reported != id(error) and not orderly and not quiet:
                self._report(f"failed: {type(error).__name__}: {error}")
            self._reported = id(error) if outer else None
            raise
        else:
            self._stay_if_ending()
        finally:
            self._armed = outer
            self._place, self._detail, self._sending = None, before, list
            if outer:
                self._steps += 1
            else:
                self.pending = str  # and what it would ask is free

    def close(self) -> None:
        """End the thread; ``armed`` would start again. Within ``armed`` it goes on."""
        if self._thread is not None and not self._armed:
            thread, self._thread = self._thread, None
            self._closed.set()
            thread.join()

    def _stay_if_ending(self) -> None:
        """Keep a rank that has given up from ending as if well, if what it waited for comes now."""
        if self._ending:
            threading.Event().wait()

    def _watch(self) -> None:
        seen, idle, before = -1, 0.0, time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            now = time.monotonic()
            # A long gap means that this whole process was stopped (a suspended job, a debugger);
            # it counts as one poll, so that the job can go on when it is woken.
            idle += min(now - before, 2 * POLL_SECONDS)
            before = now
            if not self._armed or self._steps != seen:
                seen, idle = self._steps, 0.0
            elif idle > self.timeout_seconds:
                limit = f"{self.timeout_seconds:g} s"
                self._end(f"made no progress for {idle:.1f} s (limit {limit}), giving up")

    def _end(self, what: str) -> None:
        """Report ``what`` and all stacks, and end the process; does not return."""
        self._ending = True
        try:
            self._report(what)
            # Where stderr is no real file, there is nowhere to write stacks to.
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            # os._exit drops what is buffered.
            for stream in (sys.stderr, sys.stdout):
                with contextlib.suppress(Exception):
                    stream.flush()
            time.sleep(GRACE_SECONDS)
        finally:
            os._exit(EXIT_STATUS)

    def _report(self, what: str) -> None:
        detail = self._detail or "inside the model"
        if detail.startswith("for "):
            detail = f"waiting {detail}"
        where = ""
        if self._place is not None:
            where = "in {} (action {} of {}), ".format(*self._place)
        lines = [f"[megatron_ext] {self.name} {what}", f"  it was {where}{detail}"]
        # The report must come out, and the process end, whatever state the run is in.
        with contextlib.suppress(Exception):
            pending = sorted(set(self._sending()))
            if pending:
                lines.append(f"  not known to be taken: messages to pipeline rank(s) {pending}")
        with contextlib.suppress(Exception):
            if text := self.pending():
                lines.append(f"  {text}")
        with contextlib.suppress(Exception):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


_process: Watchdog | None = None


def process_watchdog() -> Watchdog:
    """The watchdog of this process, whichever models it trains."""
    global _process
    if _process is None:
        _process = Watchdog(f"global rank {os.environ.get('RANK', 0)}", limit())
    return _process


def close_process_watchdog() -> None:
    """End its thread; the next wait starts it again."""
    if _process is not None:
        _process.close()
