"""Which Megatron there is to test against."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.releases import NEWEST, RELEASES
from tests.support import ROOT, warm
from tests.support.server import ScriptServer
from tests.support.waiting import PATIENCE

MAIN_TAG = NEWEST.tag
OLDEST_TAG = next(release.tag for release in RELEASES if release.tagged)
INSTALLED = "installed"  # not a version: the wheel of this environment


def checkout(tag: str) -> Path | None:
    """A stock checkout: of the newest version $MEGATRON_LM if that is set, else one from the cache
    that scripts/get_megatron.sh fills."""
    named = os.environ.get("MEGATRON_LM")
    if named and tag == MAIN_TAG and (Path(named) / "pretrain_gpt.py").is_file():
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "megatron-ext" / "Megatron-LM" / tag
    return path if (path / "pretrain_gpt.py").is_file() else None


def existing(tag: str) -> Path:
    """The checkout of a test that is marked with ``tag``."""
    path = checkout(tag)
    assert path is not None, f"a test without pytest.mark.version({tag!r}) needs that checkout"
    return path


def version(tag: str, *values: Any, nightly: bool = False) -> Any:
    """Parameters of a test that needs the checkout of ``tag``.

    Args:
        tag: of Megatron-LM; all but the newest are in tier ``matrix``.
        values: of the test's arguments; default: ``tag`` alone.
        nightly: in tier ``matrix`` too.
    """
    marks = [pytest.mark.version(tag)]
    if nightly or tag != MAIN_TAG:
        marks.append(pytest.mark.matrix)
    return pytest.param(*(values or [tag]), marks=marks)


def nightly(*values: Any) -> Any:
    """Parameters in tier ``matrix``, beside cheaper or more telling ones of the same test."""
    return pytest.param(*values, marks=pytest.mark.matrix)


def missing(tag: str) -> str:
    """Why tests with the checkout of ``tag`` cannot run, and what to do; empty if they can."""
    if tag != INSTALLED and checkout(tag) is None:
        return f"no stock Megatron-LM; add it by ./scripts/get_megatron.sh {tag}"
    return ""


def has(package: str) -> bool:
    """Whether this Python can import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def python_path(tag: str) -> str:
    """$PYTHONPATH for a process that imports Megatron of ``tag``, or the ``installed`` one."""
    path = [] if tag == INSTALLED else [str(existing(tag))]
    return os.pathsep.join([*path, str(ROOT)])


def environment() -> dict[str, str]:
    """Environment of a test's process: this checkout, one thread, loopback."""
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    env.pop("MEGATRON_EXT_TRACE", None)
    return env


def run(command: list[str], **more_env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end or fail the test with the output; never waits for ever."""
    env = {**environment(), **more_env}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(
            f"{' '.join(command[:6])} ... did not end within {PATIENCE} s:\n{output[-5000:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def run_cases(module: str, *arguments: str, tag: str = INSTALLED, fresh: bool = False) -> str:
    """Run ``tests.MODULE`` on Megatron of ``tag`` in a process of its own; fails the test unless
    it ends well.

    Args:
        fresh: nothing is imported before.

    Returns:
        What it printed.
    """
    python = sys.executable if fresh else warm.python(tag)
    done = run([python, "-m", f"tests.{module}", *arguments], PYTHONPATH=python_path(tag))
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def result(
    module: str, *arguments: str, tag: str = INSTALLED, fresh: bool = False
) -> dict[str, Any]:
    """The JSON object behind ``RESULT`` in what ``tests.MODULE`` prints (see ``run_cases``)."""
    printed = run_cases(module, *arguments, tag=tag, fresh=fresh)
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    assert lines, printed[-5000:]
    loaded: dict[str, Any] = json.loads(lines[-1][7:])
    return loaded


def warm_interpreters() -> Callable[[], None]:
    """Start interpreters that have imported torch and the installed Megatron, or the newest
    checkout's, for ``warm.python``. Returns what ends them."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    os.environ[warm.VARIABLE] = folder.name
    tags = (tag for tag in (INSTALLED, MAIN_TAG) if has("megatron.core") and not missing(tag))
    processes = []
    for tag in ("", *tags) if has("torch") else ():
        variables = {**environment(), "PYTHONPATH": python_path(tag or INSTALLED)}
        processes.append(warm.start(Path(folder.name), tag, variables))

    def end() -> None:
        while processes:
            process = processes.pop()
            process.terminate()
            process.wait()
        os.environ.pop(warm.VARIABLE, None)
        folder.cleanup()

    return end


Serve = Callable[[str], ScriptServer]


def start_servers() -> Iterator[Serve]:
    """A fixture's body: ``serve(tag)`` gives ``pretrain_gpt.py`` of that version, or our short
    script on the ``installed`` megatron-core, imported once and ready to fork ranks."""
    servers: dict[str, ScriptServer] = {}

    def serve(tag: str) -> ScriptServer:
        if tag not in servers:
            installed = ROOT / "scripts" / "pretrain_gpt_minimal.py"
            script = installed if tag == INSTALLED else existing(tag) / "pretrain_gpt.py"
            servers[tag] = ScriptServer(script, warm.python(tag), modules=["tests.support"])
        return servers[tag]

    yield serve
    for server in servers.values():
        server.__exit__()
