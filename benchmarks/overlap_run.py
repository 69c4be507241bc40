#!/usr/bin/env python3
"""Steps of the stock ``pretrain_gpt.py`` with passes in pairs, with emulated times.

    python -m benchmarks.overlap_run CHECKOUT [--pp 4] [--microbatches 16] [--unit-ms 100]
        [--exchange 0.5] [--steps 3] [--output DIR] [--date YYYY-MM-DD]

A mixture-of-experts model of one layer a stage trains on gloo ranks of this machine, with expert
parallelism over two pipelines: stock's interleaved 1F1B, stock's combined 1F1B
(``--overlap-moe-expert-parallel-comm``), and schedules of ours with that flag and without.
Everything is real (Megatron's plans, all-to-alls, messages, the executor), and a layer's parts take
emulated time on the stream that they are launched on (``benchmarks/overlap_clock.py``). Writes
results/DATE-overlap-run.json and overlap_run.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Row
from megatron_ext.prove.server import ScriptServer
from megatron_ext.schedule import Costs, Schedule, ScheduleSpec, select, simulate
from tests.support import ROOT
from tests.support.features import BASE, MOE

FLAG = "--overlap-moe-expert-parallel-comm"
CLOCK = ROOT / "benchmarks" / "overlap_clock.py"
# (what runs, schedule or None for stock's, in pairs)
RUNS = (
    ("stock, interleaved 1F1B", None, False),
    ("stock, combined 1F1B", None, True),
    ("v-zb", "v-zb", False),
    ("v-zb, pairs", "v-zb", True),
    ("dualpipev, pairs", "dualpipev", True),
    ("v-half", "v-half", False),
    ("v-half, pairs", "v-half", True),
    ("gis-h, pairs", "gis-h", True),
)


def costs_of(exchange: Fraction) -> Costs:
    """Computation of 1 in F, B and W; F and B contain the exchange."""
    return Costs.of(1 + exchange, 1 + exchange, 1).with_exchange([(exchange, exchange)])


def order_of(name: str | None, paired: bool, args: argparse.Namespace) -> Schedule:
    """What runs; stock's combined 1F1B is ``interleaved`` with pairs."""
    spec = ScheduleSpec(
        name or "interleaved",
        args.pp,
        args.microbatches,
        costs=costs_of(args.exchange),
        overlap=paired,
    )
    return select(spec).schedule


def command(args: argparse.Namespace) -> list[str]:
    """Stock's flags of all runs."""
    layers, world = 2 * args.pp, 2 * args.microbatches
    words = f"{BASE} {MOE} --bf16 --expert-model-parallel-size 2".split()
    words += f"--pipeline-model-parallel-size {args.pp} --num-layers {layers}".split()
    words += f"--global-batch-size {world} --train-iters {args.steps + 1}".split()
    return words


def measure(args: argparse.Namespace, server: ScriptServer, folder: Path) -> list[Row]:
    """All runs, one after the other."""
    unit, rows = args.unit_ms / 1e3, []
    value = {"compute": unit / 2, "exchange": unit / 2 * float(args.exchange), "layers": 1}
    for title, name, paired in RUNS:
        order = order_of(name, paired, args)
        words = command(args) + ([FLAG] if paired else [])
        if name is None:
            words += ["--num-virtual-stages-per-pipeline-rank", "2"]
        else:
            file = folder / f"{len(rows)}.json"
            file.write_text(json.dumps(order.to_json()))
            words += ["--pp-schedule", str(file)]
            if not order.placement.is_vee():
                words += ["--num-virtual-stages-per-pipeline-rank", "2"]
        run = folder / str(len(rows))
        outcome = server.run(words, 2 * args.pp, run, 600.0, prelude=CLOCK, value=value)
        if outcome.status != "ok":
            raise RuntimeError(f"{title}: {outcome.report}")
        ranks = [json.loads((run / f"steps{r}.json").read_text()) for r in range(2 * args.pp)]
        # The first step starts everything.
        steps = [max(times) for times in zip(*ranks)][1:]
        simulated = simulate(order)
        hidden = simulated.hidden_steady
        assert hidden is not None
        rows.append(
            {
                "name": title,
                "vee": order.placement.is_vee(),
                "peak": float(max(simulated.peak_activation)),
                "simulated": float(simulated.makespan) * unit,
                "hidden_steady": float(hidden),
                "steps": steps,
                "step": statistics.median(steps),
                "losses": [one["losses"] for one in outcome.losses()],
            }
        )
        print(f"{title}: {rows[-1]['step']:.3f} s, simulated {rows[-1]['simulated']:.3f} s")
    for vee in (True, False):  # initial weights are drawn rank by rank, so placements differ
        found = {json.dumps(row["losses"]) for row in rows if row["vee"] is vee}
        if len(found) != 1:
            raise RuntimeError(f"the runs of one placement computed different losses: {found}")
    return rows


def body(data: Row) -> list[Any]:
    """The page."""
    rows = data["rows"]
    stock = next(row for row in rows if row["name"] == "stock, combined 1F1B")
    columns: pages.Columns = {
        "run": "{name}",
        "peak": "{peak:g}",
        "hidden": "{hidden_steady:.0%}",
        "simulated s": "{simulated:.3f}",
        "measured s": "{step:.3f}",
        "error": lambda row: f"{row['step'] / row['simulated'] - 1:+.1%}",
        "over stock combined": lambda row: f"{row['step'] / stock['step']:.3f}",
    }
    return [
        "Streams are emulated by their clocks: what a layer's part takes, and which stream it "
        "runs on, counts; computation and messages of the machine itself come on top. All runs of "
        "one placement computed the same losses, bit for bit. *Peak* is in microbatches of a rank; "
        "*hidden* is the simulated share of the all-to-alls behind computation, between a rank's "
        "first B and its last F.",
        pages.table(columns, rows),
    ]


def with_server(args: argparse.Namespace) -> Row:
    """All runs of one checkout."""
    if args.checkout is None:
        raise SystemExit("give a checkout of Megatron-LM, or --page-of FILE")
    script = args.checkout / "pretrain_gpt.py"
    with (
        ScriptServer(script, modules=["tests.support", "benchmarks"]) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        rows = measure(args, server, Path(folder))
    return {"checkout": args.checkout.name.partition("-")[0], "rows": rows}


BENCHMARK = pages.Benchmark(
    "overlap-run",
    __doc__,
    "Steps with passes in pairs, with emulated times",
    lambda data: (
        f"the unmodified `pretrain_gpt.py` of {data['checkout']} on {2 * data['pp']} gloo "
        f"ranks, PP {data['pp']}, EP 2, one layer a stage, two stages a rank, m = "
        f"{data['microbatches']}; computation of a rank's F, B and W {data['unit_ms']:g} ms "
        f"each, all-to-alls {data['exchange']:g} times as long in F and in B. Medians of "
        f"{data['steps']} steps after the first"
    ),
    body,
    with_server,
    {
        "pp": 4,
        "microbatches": 16,
        "unit_ms": (100.0, "a rank's F without exchange"),
        "exchange": (Fraction(1, 2), "of computation"),
        "steps": 3,
    },
    ("torch",),
    extend=lambda parser: parser.add_argument(
        "checkout", type=Path, nargs="?", help="of Megatron-LM"
    ),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
