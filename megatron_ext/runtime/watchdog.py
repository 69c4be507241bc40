"""Watchdog: turns a hang into a per-rank report and a non-zero exit.

A rank that waits for a dead or stuck peer sits inside a C++ call where no Python runs. So a thread
watches the progress of the main one, and also takes SIGTERM (what torchrun sends to the survivors
when one rank dies), writes what this rank was waiting for, and ends the process.

The thread needs the GIL, which waits inside torch.distributed release; a native extension that
hangs while it holds the GIL is out of reach.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..schedule.actions import AnyAction

EXIT_STATUS = 75  # EX_TEMPFAIL: the job may succeed when it is started again.
POLL_SECONDS = 0.5
# Between the report of a hang and the exit: peers that got stuck a little later report their hang
# too, and not that this rank has closed its connections.
GRACE_SECONDS = 2.0
# Longest time for writing the report; a full pipe must not keep a stuck job alive.
LAST_WORDS_SECONDS = 5.0
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
        self._armed = False
        self._steps = 0
        self._place: tuple[AnyAction, int, int] | None = None  # action, position, of how many
        self._detail = ""
        self._sending: Callable[[], list[int]] = list
        self.pending: Callable[[], str] = str
        # (read end, write end): a signal or ``close`` wakes the thread.
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._ending = threading.Lock()
        # The exception on its way through nested blocks that has been reported already.
        self._reported: int | None = None
        mine = weakref.WeakMethod(self._forget_in_child)
        os.register_at_fork(after_in_child=lambda: (method := mine()) and method())

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
    def armed(
        self, detail: str = "before its first action", quiet: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Watch inside the block; an exception that leaves it is reported and passed on.

        So is ``sys.exit`` with a status that is not 0: a pass that ends its process ends others,
        too. Blocks may be nested: an exception is reported by the innermost.

        Args:
            detail: what the rank does at first.
            quiet: exceptions that speak for themselves.
        """
        if self._thread is None:
            self._start()
        outer, before = self._armed, self._detail
        self._place, self._detail, self._sending = None, detail, list
        self._steps += 1
        self._armed = True
        try:
            yield
        except (Exception, SystemExit) as error:
            if self._ending.locked():
                _never_return()
            orderly = isinstance(error, SystemExit) and not error.code
            if self._reported != id(error) and not orderly and not isinstance(error, quiet):
                self._report(f"failed: {type(error).__name__}: {error}")
            self._reported = id(error) if outer else None
            raise
        else:
            # What it waited for may come when it has given up; then it must not end as if well.
            if self._ending.locked():
                _never_return()
        finally:
            self._armed = outer
            self._place, self._detail, self._sending = None, before, list
            if outer:
                self._steps += 1
            else:
                self.pending = str  # and what it would ask is free

    def close(self) -> None:
        """End the thread and give SIGTERM back; ``armed`` would start again.

        Only the main thread can: signals are set there. Within ``armed`` it goes on.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._thread is None or self._armed or not in_main_thread:
            return
        thread, self._thread = self._thread, None
        ends = self._give_back_sigterm()
        ends[1].shutdown(socket.SHUT_RDWR)
        thread.join()
        for end in ends:
            end.close()

    def _start(self) -> None:
        read_end, write_end = self._wakeup = socket.socketpair()
        read_end.settimeout(POLL_SECONDS)
        write_end.setblocking(False)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._take_sigterm(write_end)
        self._thread = threading.Thread(
            target=self._watch, args=(read_end,), name="pp-watchdog", daemon=True
        )
        self._thread.start()

    def _take_sigterm(self, write_end: socket.socket) -> None:
        # The C-level handler writes to this socket at once, even while the main thread is
        # blocked in C++; a Python-level handler would wait for it to return.
        previous = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # Somebody's event loop lives on it.
            signal.set_wakeup_fd(previous)
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _give_back_sigterm(self) -> tuple[socket.socket, socket.socket]:
        """Whatever ``_take_sigterm`` has taken and nobody has taken since; the socket's ends."""
        assert self._wakeup is not None
        ends, self._wakeup = self._wakeup, None
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wakeup = signal.set_wakeup_fd(-1)
        if wakeup not in (-1, ends[1].fileno()):
            signal.set_wakeup_fd(wakeup)
        return ends

    def _forget_in_child(self) -> None:
        """In a forked process (a data loader's worker, say): it is not this rank.

        It shares the socket, so ending it with SIGTERM would end this rank as well.
        """
        self._armed, self._thread, self._ending = False, None, threading.Lock()
        if self._wakeup is not None:
            for end in self._give_back_sigterm():
                end.close()

    def _on_sigterm(self, signum: int, frame: object) -> None:
        # Only reached when the main thread runs Python; the thread below handles the other case.
        self._end_by_sigterm()

    def _end_by_sigterm(self) -> None:
        self._end(128 + signal.SIGTERM, "was asked to stop (SIGTERM)" if self._armed else "")

    def _watch(self, wakeup: socket.socket) -> None:
        seen, idle, before = -1, 0.0, time.monotonic()
        while (signalled := _signal_from(wakeup)) is not None:
            # The handler may have been replaced by one that wants to end the run in good order.
            ours = signal.getsignal(signal.SIGTERM) == self._on_sigterm
            if signalled == signal.SIGTERM and ours:
                self._end_by_sigterm()
            now = time.monotonic()
            # A long gap means that this whole process was stopped (a suspended job, a debugger);
            # it counts as one poll, so that the job can go on when it is woken.
            idle += min(now - before, 2 * POLL_SECONDS)
            before = now
            if not self._armed or self._steps != seen:
                seen, idle = self._steps, 0.0
            elif idle > self.timeout_seconds:
                limit = f"{self.timeout_seconds:g} s"
                what = f"made no progress for {idle:.1f} s (limit {limit}), giving up"
                self._end(EXIT_STATUS, what, stacks=True, grace_seconds=GRACE_SECONDS)

    def _end(
        self, status: int, what: str, stacks: bool = False, grace_seconds: float = 0.0
    ) -> None:
        """Report ``what``, unless it is empty, and end the process; does not return."""
        if not self._ending.acquire(blocking=False):
            _never_return()
        try:
            words = threading.Thread(target=self._last_words, args=(what, stacks), daemon=True)
            words.start()
            words.join(LAST_WORDS_SECONDS)
            time.sleep(grace_seconds)
        finally:
            os._exit(status)

    def _last_words(self, what: str, stacks: bool) -> None:
        if what:
            self._report(what)
        if stacks:
            # Where stderr is no real file, there is nowhere to write stacks to.
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # os._exit drops what is buffered.
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(Exception):
                stream.flush()

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


def _signal_from(wakeup: socket.socket) -> int | None:
    """The signal that arrived within one poll interval, 0 without one; None: closed."""
    try:
        data = wakeup.recv(1)
    except TimeoutError:
        return 0
    except OSError:
        return None
    return data[0] if data else None


_process: Watchdog | None = None


def process_watchdog() -> Watchdog:
    """The watchdog of this process, whichever models it trains."""
    global _process
    if _process is None:
        _process = Watchdog(f"global rank {os.environ.get('RANK', 0)}", limit())
    return _process


def close_process_watchdog() -> None:
    """End its thread and give SIGTERM back; the next wait starts it again."""
    if _process is not None:
        _process.close()


def _never_return() -> None:
    """The process is being ended by another thread: keep this one from changing the outcome."""
    threading.Event().wait()
