"""Gloo ranks for tests: started once, fed with cases, never waited for without a limit.

pytest itself does not load torch. A process of its own does (``main`` below), and forks ranks:

- ``Pool``: four ranks that run one case after another,
- ``Zygote.fork``: fresh ranks for one test, which may be killed, stopped, or end themselves.

Cases are the functions of a module, whose name the process is given.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, warm
from tests.support.waiting import PATIENCE, wait_until

POOL_SIZE = 4


class Zygote:
    """The process that forks ranks."""

    def __init__(self, folder: Path, cases: str) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        listener = Listener(family="AF_UNIX")
        environment = dict(os.environ)
        environment.pop("PYTHONUNBUFFERED", None)  # Output that was not flushed has to be lost.
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._log = folder / "zygote.log"
        self._process = subprocess.Popen(
            [warm.python(""), "-m", "tests.support.rank_pool", str(listener.address), cases],
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )
        self._control = accept(listener, self._log)
        self._statuses: dict[int, int] = {}
        self.receive()

    def receive(self) -> Any:
        """The next word from the process; fails the test if none comes."""
        if not self._control.poll(PATIENCE):
            pytest.fail(f"no answer from the process that forks ranks:\n{self._log.read_text()}")
        return self._control.recv()

    def fork(self, case: str | None, world: int, **kwargs: Any) -> Ranks:
        """Start ``world`` ranks that run ``case``."""
        folder = self.folder / f"{next(self._numbers)}-{case or 'pool'}"
        folder.mkdir()
        pids = []
        for rank in range(world):
            job = {
                "case": case,
                "rank": rank,
                "world": world,
                "folder": str(folder),
                "log": str(folder / f"rank{rank}.log"),
                "kwargs": kwargs,
            }
            self._control.send(job)
            answer = self.receive()
            while isinstance(answer, tuple):  # News of another child came first.
                self._statuses[answer[0]] = answer[1]
                answer = self.receive()
            pids.append(answer)
        return Ranks(self, folder, pids)

    def status(self, pid: int) -> int | None:
        """Exit status of a rank (minus the signal that killed it), or None if it runs."""
        while self._control.poll():
            known, status = self._control.recv()
            self._statuses[known] = status
        return self._statuses.get(pid)

    def close(self) -> None:
        """End it, and with it all ranks."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


class Ranks:
    """Some rank processes."""

    def __init__(self, zygote: Zygote, folder: Path, pids: list[int]) -> None:
        self.zygote, self.folder, self.pids = zygote, folder, pids

    def output(self, rank: int) -> str:
        """What a rank has written to stdout and stderr so far."""
        path = self.folder / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def outputs(self) -> str:
        """All ranks' output and state, for a failure's message."""
        return "\n".join(
            f"--- rank {rank}, exit status {self.zygote.status(pid)}\n{self.output(rank)}"
            for rank, pid in enumerate(self.pids)
        )

    def kill(self, rank: int, number: int) -> None:
        """Send a signal."""
        os.kill(self.pids[rank], number)

    def tell(self, event: str) -> None:
        """What ranks wait for with ``Path.exists``: the file ``event`` in their folder."""
        (self.folder / event).touch()

    def wait_for(self, rank: int, text: str) -> None:
        """Until a rank has written ``text``; fails if it ends without."""
        pid = self.pids[rank]

        def done() -> bool:
            over = self.zygote.status(pid) is not None
            written = text in self.output(rank)
            assert written or not over, f"rank {rank} never wrote {text!r}:\n{self.outputs()}"
            return written

        wait_until(done, lambda: f"rank {rank} did not write {text!r}:\n{self.outputs()}")

    def wait(self, ranks: list[int] | None = None) -> list[int | None]:
        """Exit statuses of ``ranks`` (default: all), once they have ended."""
        pids = [self.pids[r] for r in (range(len(self.pids)) if ranks is None else ranks)]
        wait_until(
            lambda: all(self.zygote.status(pid) is not None for pid in pids),
            lambda: f"not all ranks ended:\n{self.outputs()}",
        )
        return [self.zygote.status(pid) for pid in pids]

    def end(self) -> None:
        """Kill what is left, stopped processes too."""
        for pid in self.pids:
            if self.zygote.status(pid) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Pool:
    """Four ranks of one gloo world that run case after case; replaced after a failure."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._ranks: Ranks | None = None
        self._connections: list[Connection] = []

    def run(self, case: str, ranks: int, **kwargs: Any) -> list[Any]:
        """Results of ``cases.<case>(context, **kwargs)`` on a group of ``ranks`` ranks.

        The group is the last ranks of the world, so that group and global ranks differ.
        """
        if self._ranks is None:
            self._start()
        connections = self._connections[POOL_SIZE - ranks :]
        for connection in connections:
            connection.send((case, ranks, kwargs))
        limit = time.monotonic() + PATIENCE
        results: dict[int, Any] = {}
        wrong = []
        waiting = dict(zip(connections, range(ranks)))
        while waiting and time.monotonic() < limit:
            for connection in wait(list(waiting), timeout=limit - time.monotonic()):
                rank = waiting.pop(connection)
                try:
                    good, value = connection.recv()
                except (EOFError, ConnectionError):
                    good, value = False, "died"
                if good:
                    results[rank] = value
                else:
                    wrong.append(f"rank {rank} of {ranks}: {value}")
                    # The others may now wait for this one; the verdict stands.
                    limit = min(limit, time.monotonic() + 2)
        wrong += [f"rank {rank} of {ranks} gave no result in time" for rank in waiting.values()]
        if wrong:
            outputs = self._ranks.outputs()
            self.close()
            pytest.fail("\n".join([*wrong, outputs]))
        return [results[rank] for rank in range(ranks)]

    def _start(self) -> None:
        listeners = [Listener(family="AF_UNIX") for _ in range(POOL_SIZE)]
        addresses = [listener.address for listener in listeners]
        self._ranks = self._zygote.fork(None, POOL_SIZE, addresses=addresses)
        self._connections = [
            accept(listener, self._ranks.folder / f"rank{rank}.log")
            for rank, listener in enumerate(listeners)
        ]

    def close(self) -> None:
        """Kill the ranks; the next ``run`` starts new ones."""
        if self._ranks is not None:
            self._ranks.end()
        for connection in self._connections:
            connection.close()
        self._ranks, self._connections = None, []


def accept(listener: Listener, log: Path) -> Connection:
    """``listener.accept()`` with a limit."""
    # Its public interface can only wait for ever.
    listener._listener._socket.settimeout(PATIENCE)
    try:
        return listener.accept()
    except TimeoutError:
        text = log.read_text() if log.exists() else "(no output)"
        pytest.fail(f"a process did not start within {PATIENCE} s:\n{text}")
    finally:
        listener.close()


def serve(control: Connection) -> dict[str, Any] | None:
    """Fork ranks and report what became of them. Returns in every rank, with its job."""
    children: set[int] = set()
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    while True:
        ready = wait([control, woken])
        if woken in ready:
            woken.recv(1024)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.discard(pid)
                    control.send((pid, os.waitstatus_to_exitcode(status)))
        if control not in ready:
            continue
        try:
            job = control.recv()
        except EOFError:  # pytest is gone, whatever the reason.
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control, woken, wake):
                end.close()
            return dict(job)
        children.add(pid)
        control.send(pid)


def become_rank(job: dict[str, Any], cases: Any) -> None:
    """Run ``job`` with output in its own file. Exceptions end the process as they would any."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job["case"] is None:
        cases.serve_cases(job)
    else:
        cases.run_once(job)


def main() -> None:
    """Connect to pytest, load torch, serve."""
    control = Client(sys.argv[1], family="AF_UNIX")
    start = time.monotonic()
    import torch

    cases = importlib.import_module(sys.argv[2])
    assert cases.NAMES
    gc.freeze()  # The collector would touch, and so copy, torch's objects in every rank.
    control.send(("ready", torch.__version__, time.monotonic() - start))
    job = serve(control)
    if job is not None:
        become_rank(job, cases)


if __name__ == "__main__":
    main()
