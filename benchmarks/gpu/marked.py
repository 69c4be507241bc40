"""(0) The tests marked ``gpu``, where pytest is installed. What has run is kept test by test."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class _Kept:
    """Collects outcomes as a plugin of pytest."""

    def __init__(self, keep: Callable[[dict[str, Any]], None]) -> None:
        self.result: dict[str, Any] = {"passed": 0, "skipped": 0, "failures": [], "shown": {}}
        self._keep = keep

    def pytest_configure(self, config: Any) -> None:
        """The marker of pytest-timeout is known, installed or not."""
        config.addinivalue_line("markers", "timeout(seconds): by pytest-timeout")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test."""
        name = report.nodeid.rsplit("/", maxsplit=1)[-1]
        if report.failed:
            self.result["failures"].append(f"{name}: {report.longreprtext.splitlines()[-1]}")
        elif report.skipped:
            self.result["skipped"] += 1
        elif report.when == "call":
            self.result["passed"] += 1
            self.result["shown"].update(report.user_properties)
        self._keep(self.result)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Counts, what failed and why, and what the tests measured."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped_all": "pytest is not installed"}
    import pytest

    plugin = _Kept(args.keep)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    status = int(pytest.main([*options, str(ROOT / "tests" / "gpu")], plugins=[plugin]))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        plugin.result["failures"].append(f"pytest ended with status {status}")
    return plugin.result
