"""A search in a process of its own, beside the steps of a training run.

It is a fresh interpreter without torch, site packages and environment variables of Python, at the
lowest priority. A thread would take the GIL from the one that launches kernels, and a fork after
CUDA has started is unsafe. The process ends with the one that has started it, whatever ends that.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

from .schedule import Schedule
from .training import TrainingOrder

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from megatron_ext.schedule import beside; "
    "beside.main(int(sys.argv[2]))"
)
_LOOKS_SECONDS = 1.0  # between looks for the parent


class SearchFailed(RuntimeError):
    """The process has ended without an answer; the text says why."""


class Search:
    """``TrainingOrder.better``, begun at once.

    Raises:
        SearchFailed: no process can be started.
    """

    def __init__(self, request: TrainingOrder) -> None:
        try:
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(_ROOT), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=self._answer,
                stderr=self._log,
            )
        except (OSError, ValueError) as error:
            raise SearchFailed(str(error)) from None
        self._end = weakref.finalize(self, _end, self._process)
        with contextlib.suppress(OSError):  # it has ended, and ``result`` says why
            assert self._process.stdin is not None
            pickle.dump(request, self._process.stdin)
            self._process.stdin.close()

    @property
    def done(self) -> bool:
        """True if ``result`` has not to wait."""
        return self._process.poll() is not None

    def result(self) -> Schedule | None:
        """The better order; None: there is none.

        Raises:
            SearchFailed: there is no answer.
        """
        if self._process.wait():
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            raise SearchFailed(lines[-1] if lines else f"exit status {self._process.returncode}")
        self._answer.seek(0)
        found: Schedule | None = pickle.load(self._answer)
        return found

    def close(self) -> None:
        """End it."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def main(parent: int) -> None:
    """In the new process: from a request on standard input to the answer on standard output."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(19)
    request: TrainingOrder = pickle.load(sys.stdin.buffer)
    pickle.dump(request.better(), sys.stdout.buffer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOKS_SECONDS)
    os._exit(1)
