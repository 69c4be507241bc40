"""Which Megatron there is to test against."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from script_server import ScriptServer  # noqa: E402

RANKS = Path(__file__).parent / "ranks"
TAGS = ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0")
MAIN_TAG = TAGS[-1]


def running_here() -> tuple[str, ...]:
    """The versions whose Python is this one: from 0.17 on they need 3.12."""
    return TAGS if sys.version_info >= (3, 12) else TAGS[:1]


def cached(tag: str) -> Path | None:
    """A stock checkout of just this version, from the cache that scripts/get_megatron.sh fills."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "megatron-ext" / "Megatron-LM" / tag
    return path if (path / "pretrain_gpt.py").is_file() else None


def checkout(tag: str) -> Path | None:
    """A stock checkout: $MEGATRON_LM, whatever version that is, or the cached one."""
    named = os.environ.get("MEGATRON_LM")
    if named and (Path(named) / "pretrain_gpt.py").is_file():
        return Path(named)
    return cached(tag)


def has(module: str) -> bool:
    """Whether an installed distribution provides ``module``."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_megatron = pytest.mark.skipif(
    not has("megatron.core"), reason="needs megatron-core; run ./scripts/test.sh, it installs it"
)


def environment() -> dict[str, str]:
    """Environment of a test's process: this checkout, one thread, loopback."""
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    env.pop("MEGATRON_EXT_TRACE", None)
    return env


def run(command: list[str], seconds: float, **more_env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end or fail the test with the output; never waits longer than ``seconds``."""
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
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(
            f"{' '.join(command[:6])} ... did not end within {seconds} s:\n{output[-5000:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, output, "")


Serve = Callable[[Path | None, str], ScriptServer]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """``serve(path, tag)``: ``pretrain_gpt.py`` of the checkout of ``tag`` at ``path``, imported
    once for all tests and ready to fork ranks; skips the test where that cannot be."""
    servers: dict[Path, ScriptServer] = {}

    def start(path: Path | None, tag: str) -> ScriptServer:
        if path is None:
            pytest.skip(f"needs a checkout; run ./scripts/get_megatron.sh {tag}")
        if tag not in running_here():
            pytest.skip(f"{tag} needs Python 3.12")
        if path not in servers:
            servers[path] = ScriptServer(path / "pretrain_gpt.py")
        return servers[path]

    yield start
    for server in servers.values():
        server.__exit__()
