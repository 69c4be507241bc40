"""Which Megatron there is to test against."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).parent / "ranks"
MAIN_TAG = "core_v0.19.0"


def checkout(tag: str) -> Path | None:
    """A stock checkout: $MEGATRON_LM, or the user cache that scripts/get_megatron.sh fills."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    candidates = [cache / "megatron-ext" / "Megatron-LM" / tag]
    if os.environ.get("MEGATRON_LM"):
        candidates.insert(0, Path(os.environ["MEGATRON_LM"]))
    return next((path for path in candidates if (path / "pretrain_gpt.py").is_file()), None)


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
