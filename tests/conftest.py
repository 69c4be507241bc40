"""Tiers: which tests a run selects, what it leaves out and why. See tests/README.md.

A test's tier is the folder of its file, or a marker of its own where one test has cheap and costly
parameters (``matrix``: other Megatron versions and full grids). A plain run has all tiers but
``matrix`` and ``campaign``; ``--all``, ``-m TIER``, or a path in ``tests/campaigns`` select those.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedule.generators.request import EFFORT
from tests.support import ROOT, orders, workers
from tests.support.checkouts import (
    MAIN_TAG,
    Serve,
    has,
    missing,
    start_servers,
    warm_interpreters,
)

# Threads of torch that wait for each other spin, and take the cores that other workers and ranks
# need. Before anything loads torch; every process that a test starts inherits it.
os.environ["OMP_NUM_THREADS"] = "1"
# Images set this. Without byte code every process compiles this package, and every worker rewrites
# the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Thousands of tests stay; looking through them all again and again takes half of the collection.
gc.set_threshold(50_000)
# Ranks wake each other all the time: where that interrupts one that holds a lock of gloo, others
# spin. As batch processes they wait for their turn.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Slowest first: a worker that is done early takes what is left of the faster ones.
FOLDERS = {
    "campaigns": "campaign",
    "checkout": "checkout",
    "megatron": "megatron",
    "ranks": "ranks",
    "gpu": "gpu",
    "unit": "unit",
}
TIERS = ("campaign", "matrix", *list(FOLDERS.values())[1:])
QUICK = "0.02"  # seconds of search in default runs; orders are searched in full at night
NOT_BY_DEFAULT = ("matrix", "campaign")
NEEDS = {"campaigns": "megatron", "checkout": "megatron", "megatron": "megatron",
         "ranks": "torch", "gpu": "torch"}  # fmt: skip

_left_out: Counter[str] = Counter()
_RUN, _PROCESSOR = pytest.StashKey[workers.Workers](), pytest.StashKey[str]()
_END_WARM = pytest.StashKey[Callable[[], None]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder for orders that are searched once, for the run's workers too; and let
    searches end sooner than a user's, but for the tests that ask for ``full_effort``."""
    if orders.FOLDER not in os.environ:
        cache = None if config.getoption("--all") else getattr(config, "cache", None)
        if cache is not None:
            os.environ[orders.FOLDER] = str(orders.kept_folder(cache.mkdir("orders")))
        else:
            folder = tempfile.TemporaryDirectory(prefix="orders-")
            os.environ[orders.FOLDER] = folder.name
            config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(orders.FOLDER))
    orders.share()
    if not config.getoption("--all"):
        os.environ.setdefault(EFFORT, QUICK)
    if config.getoption("--workers"):
        config.stash[_RUN] = workers.plugin(config, config.getoption("--workers"))
        config.stash[_END_WARM] = end = warm_interpreters()
        config.add_cleanup(end)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all``, ``--workers`` and ``--processor-budget``."""
    parser.addoption("--all", action="store_true", help="all tiers, matrix and campaigns too")
    parser.addoption("--workers", type=int, default=0, help="processes that run the tests")
    parser.addoption(
        "--processor-budget",
        type=float,
        default=0,
        metavar="SECONDS",
        help="fail if the run takes more processor time; with --workers",
    )


@functools.cache
def _folder(path: Path) -> str:
    parts = path.relative_to(ROOT / "tests").parts if path.is_relative_to(ROOT / "tests") else ()
    return parts[0] if parts else ""


def _named_campaign(config: pytest.Config, path: Path) -> bool:
    """Whether the command line names ``path``, or a folder of it, in ``tests/campaigns``."""
    if _folder(path) != "campaigns":
        return False
    named = [Path(str(word).split("::")[0]).resolve() for word in config.args]
    return any(path.is_relative_to(word) for word in named if _folder(word) == "campaigns")


def _selected(config: pytest.Config, tier: str) -> bool:
    """Whether this run has ``tier``, if it is none of the default ones: --all, or -m names it."""
    words = re.findall(r"\w+", config.getoption("-m") or "")
    return tier not in NOT_BY_DEFAULT or config.getoption("--all") or tier in words


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders that this run does not select, or whose packages are missing."""
    folder = _folder(collection_path)
    if folder == "campaigns" and not (
        _selected(config, "campaign") or _named_campaign(config, collection_path)
    ):
        return True
    needed = NEEDS.get(folder)
    if needed and not has("megatron.core" if needed == "megatron" else needed):
        _left_out[f"tests/{folder}: needs {needed}; ./scripts/test.sh installs it"] = 0
        return True
    return None


def tier_of(item: pytest.Item) -> str:
    """The marker of the test itself, else its folder's."""
    own = [tier for tier in TIERS if item.get_closest_marker(tier)]
    return own[0] if own else FOLDERS.get(_folder(item.path), "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its tier, drop those that are not selected, sort by tier."""
    tiers = {item: tier_of(item) for item in items}
    for item, tier in tiers.items():
        item.add_marker(tier)
    kept, dropped = [], []
    for item in items:
        if not (_selected(config, tiers[item]) or _named_campaign(config, item.path)):
            dropped.append(item)
        elif reason := _missing_version(item, tiers[item]):
            _left_out[reason] += 1
            dropped.append(item)
        else:
            kept.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = sorted(kept, key=lambda item: TIERS.index(tiers[item]))
    if any(tiers[item] == "gpu" for item in kept) and not _has_gpu():
        for item in items:
            if tiers[item] == "gpu":
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _missing_version(item: pytest.Item, tier: str) -> str:
    marker = item.get_closest_marker("version")
    if marker is not None:
        return missing(marker.args[0])
    return missing(MAIN_TAG) if tier == "checkout" else ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep how long every test took, and look whether the run fits its budget."""
    config = session.config
    run = config.stash.get(_RUN, None)
    if run is None:
        return
    config.stash[_END_WARM]()
    slowest = sorted(run.seconds.items(), key=lambda test: -test[1])
    cache = getattr(config, "cache", None)
    if cache is not None:
        cache.set("megatron_ext/seconds", dict(slowest))
    budget, taken = config.getoption("--processor-budget"), workers.processor_seconds()
    config.stash[_PROCESSOR] = f"{taken:.0f} s of processor time"
    if budget and taken > budget:
        config.stash[_PROCESSOR] += f", more than the budget of {budget:g} s"
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was left out, and by which command it is added; the processor time."""
    taken = terminalreporter.config.stash.get(_PROCESSOR, "")
    if taken:
        terminalreporter.write_line(taken, red="budget" in taken)
    for reason, count in _left_out.items():
        how_many = f"{count} tests" if count else "all tests"
        terminalreporter.write_line(f"left out {how_many}: {reason}", yellow=True)


@pytest.fixture
def full_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches take as long as a user's by default, for what is said of their quality."""
    monkeypatch.setenv(EFFORT, "1")


@pytest.fixture
def some_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of that, where it is enough."""
    monkeypatch.setenv(EFFORT, "0.1")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of this checkout, where the tools are run from."""
    return ROOT


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """``serve(tag)``: ``pretrain_gpt.py`` of that version, ready to fork ranks."""
    yield from start_servers()
