"""What benchmarks that simulate share: options, environment of the results, files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's, by its docstring: where the results go, what they say of the run, or a page of
    earlier ones."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores", help="in words")
    parser.add_argument(
        "--page-of", type=Path, metavar="FILE", help="earlier results; runs nothing"
    )
    return parser


def run(
    args: argparse.Namespace,
    name: str,
    measure: Callable[[], dict[str, Any]],
    page: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Write ``results/DATE-NAME.json`` and ``NAME.md``; returns what the first holds.

    Args:
        measure: the results, without what they were made on.
        page: Markdown of them.
    """
    if args.page_of is None:
        (args.output / "results").mkdir(parents=True, exist_ok=True)
        started, before = time.perf_counter(), _load()
        found = measure()
        data = {
            "date": args.date,
            "machine": args.machine,
            "python": platform.python_version(),
            "load": f"{before} before, {_load()} after",
            "seconds": round(time.perf_counter() - started, 1),
            "results": f"results/{args.date}-{name}.json",
            **found,
        }
        text = json.dumps(data, indent=1) + "\n"
        (args.output / data["results"]).write_text(text, encoding="utf-8")
    else:
        data = json.loads(args.page_of.read_text())
    (args.output / f"{name}.md").write_text(page(data), encoding="utf-8")
    return data


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
