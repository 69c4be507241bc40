"""Imports torch once and forks rank processes on demand; run as a script by conftest.py.

Everything in this folder runs inside ranks, never inside pytest.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))


def serve(control: Connection) -> dict[str, Any] | None:
    """Fork ranks and report what became of them. Returns in every rank, with its job."""
    children: set[int] = set()
    while True:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                control.send((pid, os.waitstatus_to_exitcode(status)))
        if not wait([control], timeout=0.02):
            continue
        try:
            job = control.recv()
        except EOFError:  # pytest is gone, whatever the reason.
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if not pid:
            control.close()
            return dict(job)
        children.add(pid)
        control.send(pid)


def become_rank(job: dict[str, Any]) -> None:
    """Run ``job`` with output in its own file. Exceptions end the process as they would any."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import cases

    if job["case"] is None:
        cases.serve_cases(job)
    else:
        cases.run_once(job)


def main() -> None:
    """Connect to pytest, load torch, serve."""
    control = Client(sys.argv[1], family="AF_UNIX")
    start = time.monotonic()
    import cases
    import torch

    torch.set_num_threads(1)
    assert cases.NAMES
    gc.freeze()  # The collector would touch, and so copy, torch's objects in every rank.
    control.send(("ready", torch.__version__, time.monotonic() - start))
    job = serve(control)
    if job is not None:
        become_rank(job)


if __name__ == "__main__":
    main()
