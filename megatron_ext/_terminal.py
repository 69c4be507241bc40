"""Terminals: colours where standard output is one, progress on standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

_QUIET_S = 2.0  # what takes less needs no progress
_TERMINAL_S, _LOG_S = 0.2, 5.0  # between two lines


def colored() -> bool:
    """True if standard output takes colours and the user has not switched them off."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def paint(text: str, code: str) -> str:
    """``text`` in a style of ECMA-48, such as ``1;32`` (bold green), where ``colored()``."""
    return f"\x1b[{code}m{text}\x1b[0m" if colored() else text


class Progress:
    """What a command does now, on stderr once it takes more than two seconds. Use as a context.

    A terminal has one line, which is written over; a log gets a line every few seconds. A call on
    it is a new text.

    Args:
        command: its name, before each line.
    """

    def __init__(self, command: str) -> None:
        self._command, self._start = command, time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._text, self._lines = "", list[str]()
        self._terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, text: str) -> None:
        self._text = text

    def line(self, text: str) -> None:
        """A result that stays on the screen, if it takes long until all of them are there."""
        with self._lock:
            self._lines.append(text)
        if time.monotonic() - self._start > _QUIET_S:
            self._draw(False)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal and time.monotonic() - self._start > _QUIET_S:
            sys.stderr.write("\r\x1b[K")

    def _run(self) -> None:
        wait = _QUIET_S
        while not self._ended.wait(wait):
            self._draw(True)
            wait = _TERMINAL_S if self._terminal else _LOG_S

    def _draw(self, now: bool) -> None:
        with self._lock:
            clear = "\r\x1b[K" if self._terminal else ""
            text = "".join(f"{clear}{self._command}: {line}\n" for line in self._lines)
            self._lines.clear()
            if now:
                seconds = time.monotonic() - self._start
                end = "" if self._terminal else "\n"
                text += f"{clear}{self._command}: {self._text} ({seconds:.0f} s){end}"
            sys.stderr.write(text)
            sys.stderr.flush()
