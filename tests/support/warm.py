"""An interpreter that has imported torch and Megatron already: ``python -m MODULE``, or
``-c PROGRAM``, at once.

One process a Megatron imports them, then forks for each command. ``python(tag)`` is a program that
takes the place of ``sys.executable``: it hands its arguments, folder, environment and standard
streams to that process, waits, and ends with the status of the fork; if it is killed, so is the
fork with all of its group. For modules that would import the same under the same ``PYTHONPATH``;
``python`` is ``sys.executable`` itself where nothing was started.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "MEGATRON_EXT_TESTS_WARM"  # names the folder of what was started


def start(folder: Path, tag: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start importing Megatron of ``tag``.

    Args:
        folder: for the socket and the program; ``$MEGATRON_EXT_TESTS_WARM`` has to name it then.
        tag: names it; empty: torch alone.
        environment: that of the commands to come, as to all that is read by imports.
    """
    program, address = folder / (tag or "torch"), folder / f"{tag or 'torch'}.socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    words = (sys.executable, "-SE", __file__, str(address))
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm", str(listener.fileno()), tag],
        # The stand-in has the most devices of any; what is not flushed may be lost.
        env={**environment, "LOCAL_WORLD_SIZE": "32", "PYTHONUNBUFFERED": ""},
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=(folder / f"{tag}.log").open("w"),
        stderr=subprocess.STDOUT,
    )


def python(tag: str) -> str:
    """The program to start commands with that need Megatron of ``tag`` (empty: torch alone)."""
    folder = os.environ.get(VARIABLE)
    program = Path(folder) / (tag or "torch") if folder else Path()
    return str(program) if folder and program.exists() else sys.executable


def _ask(address: str, argv: list[str]) -> int:
    """The program: returns the fork's exit status."""
    job = {"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(address)
        streams = array.array("i", (0, 1, 2))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)
        data = json.dumps(job).encode()
        head = len(data).to_bytes(8, "big")
        end.sendmsg([head], [rights])
        end.sendall(data)
        return int(end.makefile().readline() or 1)


def _serve(listener: socket.socket) -> None:
    """Fork for every command, and say how it ended."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    forks: dict[int, socket.socket] = {}
    parent, here = os.getppid(), os.getpid()
    try:
        while os.getppid() == parent:
            ready, _, _ = select.select([listener, wake, *forks.values()], [], [], 5)
            if listener in ready:
                _fork(listener, [wake, woken], forks)
            if wake in ready:
                wake.recv(4096)
            for process, end in forks.items():
                if end in ready:  # the program was killed
                    _kill(process)
            _collect(forks)
    finally:
        if os.getpid() == here:
            for process in forks:
                _kill(process)


def _collect(forks: dict[int, socket.socket]) -> None:
    """Send the exit status of every fork that has ended to its program."""
    while forks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        with forks.pop(process) as end, contextlib.suppress(OSError):  # killed before
            end.sendall(f"{os.waitstatus_to_exitcode(status) % 256}\n".encode())


def _kill(process: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group yet
            kill(process, signal.SIGKILL)


def _fork(
    listener: socket.socket, others: list[socket.socket], forks: dict[int, socket.socket]
) -> None:
    end, _ = listener.accept()
    head, rights, _, _ = end.recvmsg(8, socket.CMSG_SPACE(12))
    streams = array.array("i")
    streams.frombytes(rights[0][2])
    length, data = int.from_bytes(head, "big"), b""
    while len(data) < length:
        data += end.recv(length - len(data))
    process = os.fork()
    if process:
        forks[process] = end
        for stream in streams:
            os.close(stream)
        return
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for other in (listener, end, *others, *forks.values()):
            other.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        status = _run(json.loads(data))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(job: dict[str, Any]) -> int:
    """What ``python -m MODULE`` or ``python -c PROGRAM`` does; returns the exit status."""
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    option, what, *rest = job["argv"]
    assert option in ("-m", "-c"), job["argv"]
    sys.argv[:] = [what if option == "-m" else option, *rest]
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    status = 0
    try:
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _main(number: str, tag: str) -> None:
    gc.disable()  # what is imported stays
    import torch

    torch.set_num_threads(1)
    if tag:
        from megatron_ext import cpu

        cpu.install()
        for module in ("megatron.core.models.gpt", "megatron.training"):
            importlib.import_module(module)
        from tests.support.preload import preload

        preload()
    gc.collect()
    gc.freeze()
    gc.enable()
    _serve(socket.socket(fileno=int(number)))


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _main(*sys.argv[1:])
    else:
        sys.exit(_ask(sys.argv[1], sys.argv[2:]))
