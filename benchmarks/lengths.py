"""Idle time with microbatches of different lengths: planned for them, arranged, and cut.

python3 -m benchmarks.lengths                    # 20 seeds a distribution; lengths.md
python3 -m benchmarks.lengths --seeds 2          # fewer
python3 -m benchmarks.lengths --page-of FILE     # the page alone, of earlier results
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.page import parser_of, run
from megatron_ext.schedule import Costs, Placement, Schedule, ScheduleSpec, select
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import Rows, replay
from megatron_ext.schedule.generators.lengths import arranged
from megatron_ext.schedule.generators.sliced import planned
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.search import FINE
from megatron_ext.schedule.tasks import Tasks
from megatron_ext.schedule.units import SHARE, slice_costs

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
PP, MICROBATCHES, ATTENTION = 8, 16, Fraction(3, 10)
MEAN = 4096  # tokens
FIRST = 1000  # seed; none from here on was used while this was built
WORK = 100_000  # passes that a search places: about 1 s
DRAWS: dict[str, Callable[[random.Random], float]] = {
    "spread of 0.3": lambda rng: rng.lognormvariate(0, 0.3),
    "long tail": lambda rng: min(4.0, rng.lognormvariate(-0.4, 0.9)),
}
CONTENDERS = (  # (name, arranged, slice length, work); the first one is the order for the mean
    ("planned for the mean", False, None, None),
    ("true lengths, given order, lists", False, None, 0),
    ("true lengths, given order, search", False, None, WORK),
    ("arranged, lists", True, None, 0),
    ("arranged, search", True, None, WORK),
    ("slices, given order, lists", False, MEAN // 4, 0),
    ("slices, arranged, lists", True, MEAN // 4, 0),
    ("slices, arranged, search", True, MEAN // 4, WORK),
)


def draw(kind: str, seed: int) -> list[int]:
    """Lengths in tokens, ``MEAN`` on average but for rounding."""
    rng = random.Random(seed)
    found = [DRAWS[kind](rng) for _ in range(MICROBATCHES)]
    return [round(x * MEAN * MICROBATCHES / sum(found)) for x in found]


def table(lengths: Sequence[int], slice_length: int | None) -> Tasks:
    """All passes, without hops."""
    placement = Placement.vee(PP)
    units = [
        slice_costs(
            1 if slice_length is None else -(-length // slice_length),
            ATTENTION,
            length=Fraction(length, MEAN),
        )
        for length in lengths
    ]
    return Tasks(placement, Durations.unit(placement).times(FINE, 1), units)


def mean_order() -> Schedule:
    """``v-cap`` at 1F1B's memory for microbatches that are all as long as the mean."""
    costs = Costs.of("1", str(1 + float(ATTENTION)), str(1 - float(ATTENTION)), "0")
    cap = ShareCap(Fraction(1))
    return select(ScheduleSpec("v-cap", PP, MICROBATCHES, costs=costs, cap=cap)).schedule


def idle(tasks: Tasks, rows: Rows) -> float:
    """Per cent of the makespan."""
    ends = replay(tasks, rows)
    assert ends is not None
    return 100 * (1 - sum(tasks.duration) / PP / max(ends))


def measure(kind: str, seed: int, order: Schedule) -> Row:
    """Idle time and time to plan of every contender, all in the memory of the first."""
    lengths = draw(kind, seed)
    tasks = table(lengths, None)
    known = tasks.rows(order.ranks)
    cap = max(tasks.peaks(known))
    share = cap / SHARE / PP / 2
    row: Row = {"kind": kind, "seed": seed, "memory": round(share, 3), "idle": {}, "seconds": {}}
    for name, sorted_, slice_length, work in CONTENDERS:
        started = time.process_time()
        these = [lengths[k] for k in arranged(lengths)] if sorted_ else lengths
        tasks = table(these, slice_length)
        rows = known
        if work is not None:
            bases = [known] if slice_length is None else []
            rows = planned(tasks, [cap] * PP, work, bases)
        row["seconds"][name] = round(time.process_time() - started, 3)
        row["idle"][name] = round(idle(tasks, rows), 2)
        if max(tasks.peaks(rows)) > cap:
            raise RuntimeError(f"{kind}, seed {seed}, {name}: more memory than {cap}")
    return row


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def page(data: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Microbatches of different lengths",
        "",
        f"Simulated {data['date']} with Python {data['python']} ({data['machine']}) in "
        f"{data['seconds']:.0f} s; load average {data['load']}. Nothing here was measured on a "
        f"GPU. All rows: [{data['results']}]({data['results']}).",
        "",
        f"    python3 -m benchmarks.lengths --seeds {data['seeds']}",
        "",
        f"p={PP}, m={MICROBATCHES}, V placement, no hops, core attention {float(ATTENTION):g} of "
        f"the F of a microbatch of mean length; {data['seeds']} seeds of each distribution, from "
        f"{FIRST} on. Per cent of the makespan that ranks are idle, on average and at most. All "
        "of a row's orders keep to the memory of the order planned for the mean, run with the "
        "true lengths; memory is a share of p microbatches of mean length. *Lists* are list "
        f"schedules alone, *search* places {WORK} passes more. *Arranged*: short microbatches "
        "at both ends. *Slices*: of a quarter of the mean, with F's that take equally long. "
        "Seconds, of processor time under that load, are those to make the table and plan, in the "
        "median and at most.",
    ]
    for kind in DRAWS:
        rows = [row for row in data["rows"] if row["kind"] == kind]
        memory = [row["memory"] for row in rows]
        lines += [
            "",
            f"## {kind.capitalize()}",
            "",
            f"Memory {_mean(memory):.2f} on average, {max(memory):.2f} at most.",
            "",
            "| planned | idle, mean | idle, worst | seconds, median | seconds, worst |",
            "|---|--:|--:|--:|--:|",
        ]
        for name, *_ in CONTENDERS:
            share = [row["idle"][name] for row in rows]
            took = sorted(row["seconds"][name] for row in rows)
            times = f"{took[len(took) // 2]:.3f} | {took[-1]:.3f}"
            if name == CONTENDERS[0][0]:
                times = "- | -"  # one order, made once for all seeds
            lines.append(f"| {name} | {_mean(share):.1f} | {max(share):.1f} | {times} |")
    return "\n".join(lines) + "\n"


def _data(args: argparse.Namespace) -> dict[str, Any]:
    order = mean_order()
    seeds = range(FIRST, FIRST + args.seeds)
    rows = []
    for kind in DRAWS:
        for seed in seeds:
            rows.append(measure(kind, seed, order))
            print(kind, seed, rows[-1]["idle"], flush=True)
    return {"rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = parser_of(__doc__, seeds=(20, "of each distribution"))
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds is 1 or more, not {args.seeds}")
    run(args, "lengths", lambda: _data(args), page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
