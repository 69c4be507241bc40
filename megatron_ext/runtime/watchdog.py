"""Turns a hang into a per-rank report and a non-zero exit.

A rank that waits for a dead or stuck peer sits inside a C++ call where no Python runs. So a thread
watches the progress of the main one, and also takes SIGTERM (what torchrun sends to the survivors
when one rank dies), writes what this rank was waiting for, and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..schedule.actions import Action

EXIT_STATUS = 75  # EX_TEMPFAIL: the job may succeed when it is started again.
POLL_SECONDS = 0.5


class Watchdog:
    """Watches one rank.

    Args:
        name: how the report calls this rank.
        timeout_seconds: longest time without progress inside ``armed``.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self._thread: threading.Thread | None = None
        self._armed = False
        self._since = time.monotonic()
        self._action: Action | None = None
        self._position = self._total = 0
        self._detail = ""
        self._sending: Callable[[], list[int]] = list
        self._wakeup: socket.socket | None = None

    def at(
        self, action: Action, position: int, total: int, sending: Callable[[], list[int]]
    ) -> None:
        """Progress: ``action``, number ``position`` of ``total``, starts now."""
        self._action, self._position, self._total = action, position, total
        self._detail, self._sending = "", sending
        self._since = time.monotonic()

    def waiting(self, detail: str, sending: Callable[[], list[int]] | None = None) -> None:
        """Progress: within the present action, the rank now waits as ``detail`` says."""
        self._detail = detail
        if sending is not None:
            self._action, self._sending = None, sending
        self._since = time.monotonic()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Watch inside the block; an exception that leaves it is reported and passed on."""
        if self._thread is None:
            self._start()
        self._action, self._detail, self._sending = None, "before its first action", list
        self._since = time.monotonic()
        self._armed = True
        try:
            yield
        except Exception as error:
            self._report(f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._armed = False

    def _start(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # The C-level handler writes to this socket at once, even while the main thread is
            # blocked in C++; a Python-level handler would wait for it to return.
            self._wakeup, write_end = socket.socketpair()
            self._wakeup.settimeout(POLL_SECONDS)
            write_end.setblocking(False)
            signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
            self._write_end = write_end
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._thread = threading.Thread(target=self._watch, name="pp-watchdog", daemon=True)
        self._thread.start()

    def _on_sigterm(self, signum: int, frame: object) -> None:
        # Only reached when the main thread runs Python; the thread below handles the other case.
        self._end_by_sigterm()

    def _end_by_sigterm(self) -> None:
        if self._armed:
            self._report("was told to stop (SIGTERM)")
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)

    def _watch(self) -> None:
        while True:
            if self._signalled() == signal.SIGTERM:
                self._end_by_sigterm()
            stuck = time.monotonic() - self._since
            if self._armed and stuck > self.timeout_seconds:
                limit = f"{self.timeout_seconds:g} s"
                self._report(f"made no progress for {stuck:.1f} s (limit {limit}), giving up")
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.flush()
                os._exit(EXIT_STATUS)

    def _signalled(self) -> int | None:
        """The signal that arrived within one poll interval, if any."""
        if self._wakeup is None:
            time.sleep(POLL_SECONDS)
            return None
        try:
            data = self._wakeup.recv(1)
        except TimeoutError:
            return None
        except OSError:
            self._wakeup = None
            return None
        return data[0] if data else None

    def _report(self, what: str) -> None:
        lines = [f"[megatron_ext] {self.name} {what}"]
        where = f"in {self._action} " if self._action is not None else ""
        if where:
            where += f"(action {self._position + 1} of {self._total}) "
        lines.append(f"  it was {where}{self._detail or 'inside the model'}".rstrip())
        pending = sorted(set(self._sending()))
        if pending:
            lines.append(f"  not yet taken: messages to pipeline rank(s) {pending}")
        print("\n".join(lines), file=sys.stderr, flush=True)
