"""Idle time with microbatches of different lengths: planned for them, arranged, and cut.

python3 -m benchmarks.lengths                    # 20 seeds a distribution; lengths.md
python3 -m benchmarks.lengths --seeds 2          # fewer
python3 -m benchmarks.lengths --page-of FILE     # the page alone, of earlier results
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from statistics import fmean
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Row
from megatron_ext.schedule import Costs, Placement, Schedule, ScheduleSpec, select
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.engine import Rows, replay
from megatron_ext.schedule.generators.lengths import arranged
from megatron_ext.schedule.generators.sliced import planned
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.search import FINE
from megatron_ext.schedule.tasks import Tasks
from megatron_ext.schedule.units import SHARE, slice_costs

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


def scaled(shares: Sequence[float], mean: int) -> list[int]:
    """Lengths in tokens by their shares, ``mean`` on average but for rounding."""
    return [round(x * mean * len(shares) / sum(shares)) for x in shares]


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
    rng = random.Random(seed)
    lengths = scaled([DRAWS[kind](rng) for _ in range(MICROBATCHES)], MEAN)
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


def rows_of(seeds: int) -> Row:
    """All rows; progress on the terminal."""
    order, rows = mean_order(), []
    for kind in DRAWS:
        for seed in seeds_from_first(seeds):
            rows.append(measure(kind, seed, order))
            print(kind, seed, rows[-1]["idle"], flush=True)
    return {"rows": rows}


def seeds_from_first(count: int) -> range:
    """So many."""
    if count < 1:
        raise SystemExit(f"--seeds is 1 or more, not {count}")
    return range(FIRST, FIRST + count)


def body(data: Row) -> list[Any]:
    """The page."""
    parts: list[Any] = [
        f"p={PP}, m={MICROBATCHES}, V placement, no hops, core attention {float(ATTENTION):g} of "
        f"the F of a microbatch of mean length; {data['seeds']} seeds of each distribution, from "
        f"{FIRST} on. Per cent of the makespan that ranks are idle, on average and at most. All "
        "of a row's orders keep to the memory of the order planned for the mean, run with the "
        "true lengths; memory is a share of p microbatches of mean length. *Lists* are list "
        f"schedules alone, *search* places {WORK} passes more. *Arranged*: short microbatches "
        "at both ends. *Slices*: of a quarter of the mean, with F's that take equally long. "
        "Seconds, of processor time under that load, are those to make the table and plan, in the "
        "median and at most; the order for the mean is made once for all seeds.",
    ]
    for kind in DRAWS:
        rows = [row for row in data["rows"] if row["kind"] == kind]
        memory = [row["memory"] for row in rows]
        cells = []
        for name, *_ in CONTENDERS:
            share = [row["idle"][name] for row in rows]
            took = sorted(row["seconds"][name] for row in rows)
            times = [f"{took[len(took) // 2]:.3f}", f"{took[-1]:.3f}"]
            if name == CONTENDERS[0][0]:
                times = ["", ""]
            cells.append((name, f"{fmean(share):.1f}", f"{max(share):.1f}", *times))
        parts += [
            f"## {kind.capitalize()}",
            f"Memory {fmean(memory):.2f} on average, {max(memory):.2f} at most.",
            pages.grid(
                ("planned", "idle, mean", "idle, worst", "seconds, median", "seconds, worst"), cells
            ),
        ]
    return parts


BENCHMARK = pages.Benchmark(
    "lengths",
    __doc__,
    "Microbatches of different lengths",
    lambda data: "simulated, nothing here was measured on a GPU",
    body,
    lambda args: rows_of(args.seeds),
    {"seeds": (20, "of each distribution")},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
