"""What benchmarks on forked ranks share: options, environment of the results, files."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks import on_ranks

HERE = Path(__file__).resolve().parent


def priority() -> str:
    """Of this process, in words."""
    policy = os.sched_getscheduler(0)
    if policy in (os.SCHED_FIFO, os.SCHED_RR):
        return "real-time priority"
    return f"nice {os.nice(0)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the results go, and what they say of the run."""
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--machine", default=f"{os.cpu_count()} shared cores", help="in words")


def measured(
    args: argparse.Namespace,
    count: int,
    task: Callable[[int, argparse.Namespace, Path], None],
    names: tuple[str, ...],
) -> tuple[Any, dict[str, Any]] | None:
    """Run ``task(rank, args, folder)`` on ``count`` ranks; None if one of them failed.

    Args:
        names: of the arguments that the results tell.

    Returns:
        What rank 0 has left in ``folder/rows.json``, and what it was measured on and with.
    """
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not on_ranks(count, lambda rank: task(rank, args, folder)):
            return None
        rows = json.loads((folder / "rows.json").read_text())
    about = {
        "date": args.date,
        "machine": args.machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "priority": priority(),
        "load": f"{load:.1f} before and {os.getloadavg()[0]:.1f} after",
        **{name: getattr(args, name) for name in names},
    }
    return rows, about


def save(args: argparse.Namespace, name: str, rows: Any, about: dict[str, Any]) -> Path:
    """Write results/DATE-NAME.json."""
    target: Path = args.output / "results" / f"{args.date}-{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return target
