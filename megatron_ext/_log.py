"""The log of training runs: one logger, whose lines begin with ``[megatron_ext]``.

Modules log to children of it. What is worth knowing is INFO; a WARNING is something to act on;
DEBUG, such as the list of hooks, is shown with ``MEGATRON_EXT_VERBOSE=1``.
"""

from __future__ import annotations

import logging
import os
import sys

VERBOSE = "MEGATRON_EXT_VERBOSE"
PREFIX = "[megatron_ext]"

_logger = logging.getLogger(__package__)


def verbose() -> bool:
    """True if the user asks for everything."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


def say(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"{PREFIX} {text}\n")
    sys.stderr.flush()


class _Handler(logging.Handler):
    """Writes to what ``sys.stderr`` is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        word = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        try:
            say(f"{word}{record.getMessage()}")
        except Exception:  # a full disk behind stderr must not end a training run
            self.handleError(record)


_HANDLER = _Handler()


def set_up() -> None:
    """Log to stderr in our own form, whatever the trainer makes of the root logger."""
    if _HANDLER not in _logger.handlers:
        _logger.addHandler(_HANDLER)
    _logger.setLevel(logging.DEBUG if verbose() else logging.INFO)
    _logger.propagate = False


def tear_down() -> None:
    """Undo ``set_up``."""
    _logger.removeHandler(_HANDLER)
    _logger.setLevel(logging.NOTSET)
    _logger.propagate = True
