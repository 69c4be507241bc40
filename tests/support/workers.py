"""Several processes for one run of pytest, forked after it has collected.

``--workers 4`` imports torch and Megatron, and collects, once for all of them. A file stays in one
process, so what its tests share is made once; files are given out in the order of collection.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import signal
import sys
import time
import warnings
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


def plugin(config: pytest.Config, count: int) -> Workers:
    """Let ``count`` processes run what ``config`` collects."""
    workers = Workers(count)
    config.pluginmanager.register(workers, "forked workers")
    return workers


def processor_seconds() -> float:
    """Of this process and of all that it has waited for, and these in turn."""
    return sum(os.times()[:4])


class Workers:
    """The end of the process that collects: it gives out files and prints what comes back."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers = itertools.count()
        self._running: dict[Connection, _Worker] = {}
        self.seconds: dict[str, float] = {}  # that each test took, with its fixtures

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """All tests of ``session``, in place of pytest's own loop."""
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None
        numbered = enumerate(session.items)
        files = itertools.groupby(numbered, key=lambda pair: pair[1].path)
        jobs = deque([number for number, _ in group] for _, group in files)
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()  # else every worker copies what the collector touches
        try:
            while jobs and len(self._running) < self._count:
                self._start(session, jobs, base)
            while self._running:
                for end in wait(list(self._running)):
                    assert isinstance(end, Connection)
                    self._hear(session, jobs, end, base)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
        finally:
            for worker in self._running.values():
                worker.kill()
            gc.unfreeze()
        return True

    def _start(self, session: pytest.Session, jobs: deque[list[int]], base: Any) -> None:
        here, there = Pipe()
        folder = base / f"worker{next(self._numbers)}"
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                for end in (here, *self._running):
                    end.close()
                _work(session, there, folder)
                status = 0
            finally:
                os._exit(status)  # what this process found at its start is not its to clean up
        there.close()
        self._running[here] = _Worker(process)
        self._give(jobs, here)

    def _give(self, jobs: deque[list[int]], end: Connection) -> None:
        job = jobs.popleft() if jobs else []
        with contextlib.suppress(BrokenPipeError):  # it ended; its end of the pipe says so next
            end.send(job)
        self._running[end].left.extend(job)

    def _hear(
        self, session: pytest.Session, jobs: deque[list[int]], end: Connection, base: Any
    ) -> None:
        worker = self._running[end]
        try:
            kind, value = end.recv()
        except (EOFError, ConnectionResetError):
            del self._running[end]
            end.close()
            self._ended(session, worker, jobs)
            if jobs:
                self._start(session, jobs, base)
            return
        hook = session.config.hook
        if kind == "next":
            self._give(jobs, end)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=value)
        elif kind == "done":
            number, self.seconds[session.items[number].nodeid] = value
            assert number == worker.left.popleft()
            item = session.items[number]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    @staticmethod
    def _ended(session: pytest.Session, worker: _Worker, jobs: deque[list[int]]) -> None:
        """Fail the test that ended its worker; what it had still to run is for another one."""
        status = worker.join()
        if not worker.left:
            assert status == 0, f"a worker failed after its last test, with exit status {status}"
            return
        item = session.items[worker.left.popleft()]
        text = f"the process that ran this test ended, with exit status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if worker.left:
            jobs.appendleft(list(worker.left))


class _Worker:
    """A process, and the numbers of the tests that it has still to run."""

    def __init__(self, process: int) -> None:
        self._process = process
        self.left: deque[int] = deque()

    def join(self) -> int:
        """Its exit status, minus the signal that killed it."""
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])

    def kill(self) -> None:
        """End it at once."""
        os.kill(self._process, signal.SIGKILL)
        self.join()


def _work(session: pytest.Session, end: Connection, folder: Any) -> None:
    """A worker: run the files that come, until an empty one."""
    config = session.config
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # its files are the parent's and the other workers'
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    terminal = config.pluginmanager.getplugin("terminalreporter")
    terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    config.pluginmanager.register(_Sender(config, end))
    job: deque[int] = deque(end.recv())
    while job:
        number = job.popleft()
        if not job:  # what is torn down after this test depends on the next
            end.send(("next", None))
            job.extend(end.recv())
        following = session.items[job[0]] if job else None
        before = time.monotonic()
        config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=following)
        end.send(("done", (number, round(time.monotonic() - before, 3))))


class _Sender:
    """Hands reports and warnings to the process that collects."""

    def __init__(self, config: pytest.Config, end: Connection) -> None:
        self._config, self._end = config, end

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of every phase of every test."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._end.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Its text and place; of its own class where that can be sent."""
        try:
            pickle.dumps(warning_message)
        except Exception:
            text = f"{warning_message.category.__name__}: {warning_message.message}"
            warning_message = warnings.WarningMessage(
                UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
            )
        value = {"warning_message": warning_message, "when": when, "nodeid": nodeid}
        self._end.send(("warning", {**value, "location": location}))
