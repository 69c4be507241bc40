#!/usr/bin/env python3
"""Checks every claim on the schedules, compares them all, writes results and a short page.

    python3 -m benchmarks.schedules [--quick] [--output DIR] [--date YYYY-MM-DD] [--no-torch]
                                    [--wide] [--resume] [--times-again FILE]

Runs on a bare Python; where torch can be imported, torch.distributed.pipelining's own orders are
compared too. Exit status 1 if a claim, other than a time, does not hold and is no known miss.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import torch_lists
from benchmarks.schedule_claims import TIMES, Claim, against_torch, all_claims, generation_times
from benchmarks.schedule_page import page, plot_settings
from benchmarks.schedule_plot import pareto
from benchmarks.schedule_scope import FULL, MEDIUM, QUICK, SMOKE, WIDE, Scope
from benchmarks.schedule_sweep import Row, caps_curve, describe, from_json, settings, sweep, to_json

HERE = Path(__file__).resolve().parent

# Claims that are known not to hold; docs/concepts/schedules.md says so and why.
KNOWN_MISSES = ("above 6m + max(6p - 3k - 1, p - 1), the bound of the smallest pipelines",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller sizes, under a minute")
    size.add_argument("--wide", action="store_true", help="p = 4 to 32, p x m to 2048, all costs")
    size.add_argument("--medium", action="store_true", help="p = 4 and 8, all costs; minutes")
    size.add_argument("--smoke", action="store_true", help="next to nothing, for the test suite")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--machine", default=_machine(), help="in words, for the page")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the settings that an interrupted run of the same code has left",
    )
    parser.add_argument("--no-torch", action="store_true", help="our schedules only")
    parser.add_argument(
        "--times-again",
        type=Path,
        metavar="FILE",
        help="keep these results; take only the generation times anew, e.g. on a quieter machine",
    )
    args = parser.parse_args(argv)
    sizes = {"quick": QUICK, "wide": WIDE, "medium": MEDIUM, "smoke": SMOKE}
    scope = next((sizes[name] for name in sizes if getattr(args, name)), FULL)
    version = None if args.no_torch else torch_lists.version()
    if args.times_again is not None:
        earlier = json.loads(args.times_again.read_text())
        scope = next(s for s in (FULL, *sizes.values()) if s.name == earlier["scope"])
        version, rows, seconds = earlier["torch"], from_json(earlier), earlier["seconds"]
        claims = [Claim(**c) for c in earlier["claims"] if not c["group"].startswith(TIMES)]
    else:
        started = time.perf_counter()
        claims = all_claims(scope)
        part = args.output / "results" / f"{args.date}-schedules.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            part.unlink(missing_ok=True)
        rows = _table(scope, version is not None, part)
        claims += against_torch(rows)
        seconds = round(time.perf_counter() - started)
    before = _load()
    claims += generation_times(scope)
    load = f"{before} before, {_load()} after"
    for claim in claims:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[claim.holds]
        print(f"{mark} {claim.group}: {claim.what}: expected {claim.expected}: {claim.measured}")
    head = {
        "date": args.date,
        "scope": scope.name,
        "machine": args.machine,
        "python": platform.python_version(),
        "torch": version,
        "load": load,
        "seconds": seconds,
        "results": f"results/{args.date}-schedules.json",
    }
    _write(args.output, head, claims, rows, scope)
    (args.output / "results" / f"{args.date}-schedules.part").unlink(missing_ok=True)
    # Times are no reason to fail: they depend on what else the machine does.
    failed = [c for c in claims if c.holds is False and not c.group.startswith(TIMES)]
    wrong = [c for c in failed if c.what not in KNOWN_MISSES]
    print(f"{len(claims)} claims, {len(wrong)} unexpected failures, {len(rows)} rows of the table")
    return int(bool(wrong))


def _table(scope: Scope, with_torch: bool, part: Path) -> list[Row]:
    """Every setting's rows; ``part`` has those of an interrupted run, and grows by the others."""
    rows: list[Row] = []
    if part.exists():
        lines = [json.loads(line) for line in part.read_text().splitlines()]
        rows = from_json({"rows": [row for line in lines for row in line]})
    known = {row.setting for row in rows}
    for setting in settings(scope):
        print(f"     {describe(setting)}", flush=True)
        if setting in known:
            continue
        new = sweep(setting, with_torch)
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(new)["rows"]) + "\n")
        # As they are in the file, so that an interruption changes nothing.
        rows += from_json(to_json(new))
    return rows


def _write(
    output: Path, head: dict[str, Any], claims: Sequence[Claim], rows: Sequence[Row], scope: Scope
) -> None:
    (output / "results").mkdir(parents=True, exist_ok=True)
    plots = []
    for number, setting in enumerate(plot_settings(scope), 1):
        here = [row for row in rows if row.setting == setting]
        name = f"results/{head['date']}-pareto-{number}.svg"
        shown = [row for row in here if not row.name.startswith("v-cap")]
        (output / name).write_text(pareto(setting, shown, caps_curve(setting)), encoding="utf-8")
        plots.append(name)
    data = {**head, "claims": [claim.to_json() for claim in claims], "table": to_json(rows)}
    (output / head["results"]).write_text(_compact(data), encoding="utf-8")
    (output / "schedules.md").write_text(page(head, claims, rows, plots), encoding="utf-8")


def _compact(data: dict[str, Any]) -> str:
    """JSON with one line a claim and a row, so that two runs can be compared with diff."""
    table, claims = data["table"], data["claims"]
    head = {key: value for key, value in data.items() if key not in ("table", "claims")}
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "claims": [']
    lines.append(",\n".join("  " + json.dumps(claim) for claim in claims))
    lines.append(' ],\n "columns": ' + json.dumps(table["columns"]) + ',\n "rows": [')
    lines.append(",\n".join("  " + json.dumps(row) for row in table["rows"]))
    return "\n".join(lines) + "\n ]\n}\n"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _machine() -> str:
    """Kind and number of processors, without names or paths."""
    cores = os.cpu_count() or 1
    return f"{platform.system()} on {platform.machine()}, {cores} cores"


if __name__ == "__main__":
    sys.exit(main())
