"""Runs a Megatron training script many times on CPU ranks, importing torch and Megatron once.

Started as ``python -m tests.support.server SCRIPT [--double] [MODULE ...]``: it imports all
that the script imports, then reads one job a line (JSON) from standard input, forks the job's
ranks, lets each run the launcher as torchrun would, and answers one line:

    {"argv": [...], "world": 4, "folder": "...", "timeout": 120}
    {"status": "ok" | "failed" | "hung", "seconds": 3.2}

Each rank writes ``rankN.log`` into the folder; ``losses.jsonl`` there holds the exact losses.
``ScriptServer`` is the other end.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.prove import session
from tests.support.preload import keep_writing_here, preload

HOME = Path(__file__).resolve().parents[2]  # of the package
# Far beyond what any job takes on a machine with ten times more to do than cores.
PATIENCE = 400.0  # seconds
MOST_RANKS = 32  # of the largest layout that shrinking can leave
MOST_SAMPLE_BYTES = 1 << 30
_END = 3000  # characters of a rank's log that a report shows


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: ``ok``, ``failed`` (a rank's exit status was not 0) or ``hung``.
        seconds: it took.
        folder: with logs and losses.
        exits: exit status by rank, minus the signal that killed it.
        orphans: how many ranks left processes behind that were still there when all had ended.
        first: the rank that ended first of those with another status than 0; -1: none did.
    """

    status: str
    seconds: float
    folder: Path
    exits: tuple[int, ...] = ()
    orphans: int = 0
    first: int = -1

    @property
    def report(self) -> str:
        """How every rank ended, and the end of what it printed; the first to fail comes first."""
        ranks = sorted(range(len(self.exits)), key=lambda rank: rank != self.first)
        ends = [f"rank {rank}: exit {self.exits[rank]}\n{self.log(rank)[-_END:]}" for rank in ranks]
        return "\n".join([f"{self.status} after {self.seconds:.1f} s", *ends])

    def log(self, rank: int) -> str:
        """What a rank printed."""
        path = self.folder / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def losses(self) -> list[dict[str, Any]]:
        """One entry an iteration, floats as hexadecimal, from the launcher's ``--loss-log``."""
        path = self.folder / "losses.jsonl"
        return [json.loads(line) for line in path.open()] if path.is_file() else []


def reason(outcome: Outcome, world: int) -> str:
    """Why a run failed."""
    return session.reason(outcome.folder, world)


class ScriptServer:
    """A process that has imported ``script`` and forks ranks from there. Use as a context.

    Args:
        script: a Megatron training script, e.g. ``pretrain_gpt.py`` of a checkout.
        python: interpreter to run it with.
        double: compute in float64 wherever Megatron names float32.
        modules: imported first, for preludes: packages of the script's folder may have their names.
    """

    def __init__(
        self,
        script: Path,
        python: str = sys.executable,
        double: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        env["PYTHONPATH"] = str(HOME)
        env["GLOO_SOCKET_IFNAME"] = "lo"
        # The CPU device is prepared once for all jobs, so for the most ranks that any may have.
        env["LOCAL_WORLD_SIZE"] = str(MOST_RANKS)
        # Megatron shuffles 100,000 mock documents in samples of a few tokens: a second a rank. Here
        # one rank does it, for all jobs whose samples are the same.
        self._samples = tempfile.TemporaryDirectory(prefix="samples-")
        self._process = subprocess.Popen(
            [
                *(python, "-m", "tests.support.server", str(Path(script).resolve())),
                *(["--double"] if double else []),
                *modules,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=HOME,
            start_new_session=True,
        )

    def __enter__(self) -> ScriptServer:
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._samples.cleanup()

    def run(
        self,
        argv: Sequence[str],
        world: int,
        folder: Path,
        timeout: float = PATIENCE,
        *,
        more: Mapping[int, Sequence[str]] | None = None,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        prelude: Path | None = None,
        value: Any = None,
        grace: float = 10.0,
        script: str = "",
    ) -> Outcome:
        """Run the script with ``argv`` on ``world`` ranks; waits for the end.

        Args:
            argv: the script's arguments.
            world: ranks.
            folder: emptied, for logs and losses.
            timeout: seconds.
            more: arguments and
            environment: variables of single ranks alone.
            prelude: a Python file that every rank runs first, in the environment of its own; for
                tests that injure a rank. Its ``prepare(value, rank, folder)``, if it has one, is
                called then, with
            value: as it is (JSON).
            grace: seconds that the other ranks have to end when one has failed, on a machine that
                has nothing else to do; those that are stopped have none.
            script: another one than the server's, of the same folder.

        Raises:
            RuntimeError: the server is gone.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        samples = Path(self._samples.name)
        if sum(file.stat().st_size for file in samples.iterdir()) > MOST_SAMPLE_BYTES:
            self._forget_samples()
        argv = [*argv, "--data-cache-path", str(samples)]
        job = {"argv": argv, "world": world, "folder": str(folder), "timeout": timeout}
        job["grace"] = grace
        job["more"] = {str(rank): list(own) for rank, own in (more or {}).items()}
        job["environment"] = {str(rank): dict(own) for rank, own in (environment or {}).items()}
        job["prelude"] = None if prelude is None else str(prelude)
        job["value"], job["script"] = value, script
        answer = self._ask(job)
        if answer["status"] != "ok":
            self._forget_samples()  # It may have ended while it wrote them.
        answer["exits"] = tuple(answer["exits"])
        return Outcome(folder=folder, **answer)

    def flags(self) -> dict[str, str]:
        """All flags that the script knows, ours too: ``switch``, ``list``, or the type of a value.

        Raises:
            RuntimeError: the server is gone.
        """
        return dict(self._ask({"flags": True})["flags"])

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the script server ended; its messages stand above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _forget_samples(self) -> None:
        for file in Path(self._samples.name).iterdir():
            file.unlink()


def _free_port() -> int:
    """A port below those that the system hands out itself, so that nobody takes it meanwhile."""
    for port in random.SystemRandom().sample(range(12000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("found no free port between 12000 and 32000")


def _rank(script: Path, job: dict[str, Any], rank: int, port: int) -> None:
    """Run the launcher in a forked process; never returns."""
    world, folder = job["world"], Path(job["folder"])
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()  # where it was, if the process crashes
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **job.get("environment", {}).get(str(rank), {}),
    )
    status = 1
    try:
        from megatron_ext import launch

        if "--async-save" not in job["argv"]:
            keep_writing_here()
        if job.get("prelude"):
            # Not by ``runpy``: what it defines has to live as long as the rank.
            defined = launch._execute(Path(job["prelude"]), "prelude")
            if "prepare" in defined:
                defined["prepare"](job["value"], rank, folder)
        own = ["--device", "cpu", "--loss-log", str(folder / "losses.jsonl")]
        path = script.with_name(job.get("script") or script.name)
        launch.main([*own, str(path), *job["argv"], *job.get("more", {}).get(str(rank), [])])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _prepare_for_all() -> None:
    """Do once what every rank of every job would do for seconds, with the same result."""
    from megatron.core.tokenizers.text import libraries  # noqa: F401
    from megatron.training import argument_utils, arguments

    from megatron_ext.integration import install  # noqa: F401

    # Megatron parses its configurations' source to find their help texts.
    factory = argument_utils.ArgumentGroupFactory
    blank, find = factory.__new__(factory), factory._get_field_docstrings
    read = functools.cache(lambda config: find(blank, config))
    factory._get_field_docstrings = lambda _, config: dict(read(config))
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    _compile_once()
    _parse_once()
    _skip_clean_up()
    preload()


def _compile_once() -> None:
    """The index helpers of datasets, by ``make``, which rank 0 of every job would start again."""
    from megatron.core.datasets import utils

    with contextlib.suppress(SystemExit):  # where that fails, the jobs say so
        utils.compile_helpers()
        utils.compile_helpers = lambda: None


def _parse_once() -> None:
    """Two features parse the whole command line again to see that nobody asks for them."""
    from megatron.training import arguments, ft_integration, inprocess_restart

    flags = {"--enable-ft-package", "--inprocess-restart", "--yaml-cfg"}
    neither = argparse.Namespace(enable_ft_package=False, inprocess_restart=False)

    def look(**how: Any) -> argparse.Namespace:
        asked = not flags.isdisjoint(sys.argv)
        return arguments.parse_args(**how) if asked else neither

    for module in (ft_integration, inprocess_restart):
        module.arguments = types.SimpleNamespace(parse_args=look)


def _skip_clean_up() -> None:
    """What torch registers to take its libraries' operators back at exit: ranks end without."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if getattr((finalizer.peek() or [None] * 2)[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


def _known_flags() -> dict[str, str]:
    """What Megatron's parser accepts, and our flags: ``ScriptServer.flags``."""
    from megatron.training import arguments

    from megatron_ext.integration.flags import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(arguments.add_megatron_arguments(parser))

    def kind(action: argparse.Action) -> str:
        named = getattr(action.type, "__name__", "str")
        return "switch" if action.nargs == 0 else "list" if action.nargs in ("*", "+") else named

    return {o: kind(a) for a in parser._actions for o in a.option_strings if o.startswith("--")}


def _run_job(script: Path, job: dict[str, Any]) -> dict[str, Any]:
    start, port = time.monotonic(), _free_port()
    running = {}
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(script, job, rank, port)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        running[pid] = rank
    status, ranks, exits, first = "ok", list(running), [0] * job["world"], -1
    stopped: set[int] = set()
    while running:
        pid, code = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid in running and os.WIFSTOPPED(code):
            stopped.add(pid)
        elif pid in running:
            rank = running.pop(pid)
            exits[rank] = os.waitstatus_to_exitcode(code)
            if code != 0 and status == "ok":
                first = rank
                # As torchrun: one rank's failure ends the others, after they could report.
                slowdown = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
                end = time.monotonic() - start + job["grace"] * slowdown
                status, job["timeout"] = "failed", end
        elif time.monotonic() - start > job["timeout"] or (
            status == "failed" and stopped.issuperset(running)
        ):
            status = "hung" if status == "ok" else status
            for left in running:
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(left, signal.SIGKILL)
            job["timeout"] = float("inf")
            stopped.clear()
        else:
            time.sleep(0.01)
    seconds = time.monotonic() - start
    orphans = sum(_left_behind(rank) for rank in ranks)
    return {
        **{"status": status, "seconds": seconds, "exits": exits},
        **{"orphans": orphans, "first": first},
    }


def _left_behind(rank: int) -> bool:
    """True if a rank that has ended left a process behind (a checkpoint writer, say), which is
    killed after a moment to end by itself."""

    limit = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < limit:
            os.killpg(rank, 0)
            time.sleep(0.02)
        os.killpg(rank, signal.SIGKILL)
        return True
    return False


def main() -> None:
    """Serve jobs for the script on the command line until standard input ends."""
    gc.disable()  # what is imported stays
    # Answers go to the pipe; whatever the script's imports print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from megatron_ext import cpu, launch

    script, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    for name in options:
        if name != "--double":
            importlib.import_module(name)
    launch._set_path(script)
    launch._set_tools_path()
    cpu.install()
    if "--double" in options:
        from megatron_ext.prove import double

        double.install()
    launch._execute(script, "preloaded_script")
    import torch

    _prepare_for_all()
    torch.set_num_threads(1)
    # Ranks that never look at it need no copies of its pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        job = json.loads(line)
        answer = {"flags": _known_flags()} if "flags" in job else _run_job(script, job)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
