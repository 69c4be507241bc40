"""Ranks: N processes forked from one that has imported torch, Megatron and this package.

The one mechanism of all tests that need ranks::

    results = run(work, 4, argument)     # [work(argument) of each rank], or RankError

``work`` is a module-level function; it runs with the environment that torchrun would give.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_ext.releases import NEWEST

PATIENCE = 120.0  # seconds, far beyond what a case takes
GRACE = 3.0  # seconds that others have to end after one has failed

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
# $MEGATRON_LM, or the newest supported release where scripts/get_megatron.sh puts it.
CHECKOUT = Path(
    os.environ.get("MEGATRON_LM") or CACHE / "megatron-ext" / "Megatron-LM" / NEWEST.tag
)

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.harness.preload"])


class RankError(AssertionError):
    """A rank raised, died or hung; the message has the end of every rank's log."""


def run(work: Callable[..., Any], world: int, *args: Any, patience: float = PATIENCE) -> list[Any]:
    """Run ``work(*args)`` on ``world`` ranks and return what each returns."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port, pipes, processes = _free_port(), [], []
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(work, args, rank, world, port, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results, failed = _collect(pipes, processes, patience)
        if failed:
            ends = [_tail(Path(folder) / f"rank{r}.log") for r in range(world)]
            first = sorted(range(world), key=lambda r: r != failed[0][0])
            text = "\n".join(f"--- rank {r}\n{ends[r]}" for r in first)
            raise RankError("; ".join(f"rank {r} {why}" for r, why in failed) + "\n" + text)
        return results


def _collect(
    pipes: Sequence[Connection], processes: Sequence[Any], patience: float
) -> tuple[list[Any], list[tuple[int, str]]]:
    """(results, failures in the order in which they came); all processes have ended then."""
    results: list[Any] = [None] * len(pipes)
    done, failed, end = set(), [], time.monotonic() + patience
    while len(done) < len(pipes):
        left = [i for i in range(len(pipes)) if i not in done]
        ready = wait([pipes[i] for i in left], max(0.0, end - time.monotonic()))
        if not ready:
            failed += [(i, "hung" if not failed else "was left waiting") for i in left]
            break
        for i in left:
            if pipes[i] in ready:
                done.add(i)
                try:
                    ok, value = pickle.loads(pipes[i].recv_bytes())
                except EOFError:
                    processes[i].join(1)
                    ok, value = False, f"ended without a result (exit {processes[i].exitcode})"
                if ok:
                    results[i] = value
                else:
                    failed.append((i, value))
                    end = min(end, time.monotonic() + GRACE)
    for process in processes:
        if failed:
            process.kill()
        process.join(10)
        process.kill()
    return results, failed


def _rank(work: Any, args: Any, rank: int, world: int, port: int, folder: str, pipe: Any) -> None:
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    sent = []

    def send(ok: bool, value: Any) -> None:
        if not sent:
            sent.append(True)
            pipe.send_bytes(pickle.dumps((ok, value), protocol=5))
            pipe.close()

    status = 0
    try:
        send(True, work(*args))
    except SystemExit as end:
        send(False, f"exited with status {end.code}")
        status = 1
    except BaseException as error:
        traceback.print_exc()
        send(False, f"raised {type(error).__name__}: {error}"[:500])
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads do not outlive an orderly end


def log() -> str:
    """What this rank has printed."""
    sys.stdout.flush()
    return Path(f"/proc/self/fd/{sys.stdout.fileno()}").read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, size: int = 2500) -> str:
    return path.read_text(errors="replace")[-size:] if path.is_file() else ""
