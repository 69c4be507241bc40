#!/usr/bin/env python3
"""Checks every claim on the schedules, compares them all, writes results and a short page.

    python3 -m benchmarks.schedules [--scope full|wide|medium|quick|smoke] [--no-torch] [--resume]
        [--times-again FILE] [--output DIR] [--date YYYY-MM-DD]

Runs on a bare Python; where torch can be imported, torch.distributed.pipelining's own orders are
compared too. Exit status 1 if a claim, other than a time, does not hold and is no known miss.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import page as pages
from benchmarks import torch_lists
from benchmarks.page import Claim, Row
from benchmarks.schedule_claims import TIMES, against_torch, all_claims, generation_times
from benchmarks.schedule_page import body, plot_settings, what
from benchmarks.schedule_plot import pareto
from benchmarks.schedule_scope import SCOPES, Scope
from benchmarks.schedule_sweep import (
    COLUMNS,
    caps_curve,
    describe,
    from_json,
    settings,
    sweep,
    to_json,
)
from benchmarks.schedule_sweep import Row as Entry

# Claims that are known not to hold; docs/concepts/schedules.md says so and why.
KNOWN_MISSES = ("above 6m + max(6p - 3k - 1, p - 1), the bound of the smallest pipelines",)


def report(data: Row) -> int:
    """Print the claims; exit status 1 if one fails that is no time and no known miss."""
    claims = [Claim(**claim) for claim in data["claims"]]
    for claim in claims:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[claim.holds]
        print(f"{mark} {claim.group}: {claim.what}: expected {claim.expected}: {claim.measured}")
    # Times are no reason to fail: they depend on what else the machine does.
    failed = [c for c in claims if c.holds is False and not c.group.startswith(TIMES)]
    wrong = [c for c in failed if c.what not in KNOWN_MISSES]
    print(f"{len(claims)} claims, {len(wrong)} unexpected failures, {len(data['rows'])} rows")
    return int(bool(wrong))


def measure(args: argparse.Namespace) -> Row:
    """All claims and rows, and the plots."""
    if args.scope not in SCOPES:
        raise SystemExit(f"--scope is one of {', '.join(SCOPES)}, not {args.scope}")
    scope, version = SCOPES[args.scope], None if args.no_torch else torch_lists.version()
    if args.times_again is not None:
        data = json.loads(args.times_again.read_text())
        scope = SCOPES[data["scope"]]
        claims = [Claim(**c) for c in data["claims"] if not c["group"].startswith(TIMES)]
        kept = {key: data[key] for key in ("scope", "torch", "seconds", "rows", "columns", "plots")}
    else:
        claims = all_claims(scope)
        part = args.output / "results" / f"{args.date}-schedules.part"
        if not args.resume:
            part.unlink(missing_ok=True)
        rows = table(scope, version is not None, part)
        claims += against_torch(rows)
        plots = []
        for number, setting in enumerate(plot_settings(scope), 1):
            own = [r for r in rows if r.setting == setting and not r.name.startswith("v-cap")]
            plots.append(f"results/{args.date}-pareto-{number}.svg")
            (args.output / plots[-1]).write_text(pareto(setting, own, caps_curve(setting)))
        kept = {"torch": version, "columns": COLUMNS, "rows": to_json(rows), "plots": plots}
        part.unlink(missing_ok=True)
    claims += generation_times(scope)
    return {**kept, "claims": [claim._asdict() for claim in claims]}


def table(scope: Scope, with_torch: bool, part: Path) -> list[Entry]:
    """Every setting's rows; ``part`` has those of an interrupted run, and grows by the others."""
    lines = part.read_text().splitlines() if part.exists() else []
    rows = [row for line in lines for row in from_json(json.loads(line))]
    known = {row.setting for row in rows}
    for setting in settings(scope):
        print(f"     {describe(setting)}", flush=True)
        if setting in known:
            continue
        new = to_json(sweep(setting, with_torch))
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps(new) + "\n")
        rows += from_json(new)  # as in the file, so that an interruption changes nothing
    return rows


BENCHMARK = pages.Benchmark(
    "schedules",
    __doc__,
    "Schedules: claims, table, losses",
    what,
    body,
    measure,
    {
        "scope": ("full", f"{', '.join(SCOPES)}: from an hour to next to nothing"),
        "resume": (False, "keep the settings that an interrupted run of the same code has left"),
        "no_torch": (False, "our schedules only"),
    },
    extend=lambda parser: parser.add_argument(
        "--times-again",
        type=Path,
        metavar="FILE",
        help="keep these results; take only the generation times again, on a quieter machine, say",
    ),
    report=report,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
