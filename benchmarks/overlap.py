#!/usr/bin/env python3
"""Forward and backward passes in pairs beside Megatron's own combined schedule, simulated.

    python3 -m benchmarks.overlap [--sizes 4,8] [--output DIR] [--date YYYY-MM-DD] [--check]

A rank computes F = B = W = 1 a microbatch, and F and B exchange tokens with experts on other ranks
for so long besides. A pair takes the longer of its computation and its communication. Writes
results/DATE-overlap.json and overlap.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from benchmarks import page as pages
from benchmarks.page import Claim, Row
from megatron_ext.schedule import NAMES, Joint, Op, Schedule, ScheduleSpec, select, simulate
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.simulate import Simulation

EXCHANGES = (Fraction(1, 4), Fraction(1, 2), Fraction(1))
SHARES = (Fraction(1), Fraction(3, 4), Fraction(1, 2))  # of stock's memory
AIM = Fraction(4, 5)  # of the communication in steady state
STOCK, ALONE, DUALPIPEV = "stock combined", "stock, no overlap", "dualpipev"
OURS, UNPAIRED = "ours", "ours unpaired"
SINGLE = tuple(name for name in NAMES if name != DUALPIPEV)  # which has pairs by itself


class Size(NamedTuple):
    """Ranks, microbatches, and the exchange in F and in B each."""

    pp: int
    microbatches: int
    exchange: Fraction

    @property
    def costs(self) -> Costs:
        """Of a rank's passes."""
        longer = 1 + self.exchange
        return Costs.of(longer, longer, 1).with_exchange([[self.exchange, self.exchange]])


def combined(schedule: Schedule) -> Schedule:
    """``interleaved`` as Megatron's combined 1F1B runs it: one more F before the first B, then
    every B beside the F that follows it."""
    ranks = []
    for row in schedule.ranks:
        out = list(row[:1])
        for action in row[1:]:
            last = out[-1]
            if action.op is Op.F and last.op is not Op.F:  # type: ignore[union-attr]
                out[-1] = Joint(action, last)  # type: ignore[arg-type]
            else:
                out.append(action)
        ranks.append(out)
    return schedule.with_ranks(ranks)


def rows_of(size: Size) -> Iterator[Row]:
    """All orders of one size: ``what`` it is, the ``share`` of stock's memory that it may take
    (None: what it takes), its ``schedule``, ``makespan`` and how much ``slower`` it is than stock's
    combined schedule, ``memory`` in sets of a rank's layers for one microbatch and over stock's,
    and the share of the communication that is ``hidden``, in all and in steady state."""

    def made(name: str, **options: Any) -> tuple[str, Simulation]:
        spec = ScheduleSpec(name, size.pp, size.microbatches, costs=size.costs, **options)
        found = select(spec)
        return found.spec.name, simulate(found.schedule)

    spec = ScheduleSpec("interleaved", size.pp, size.microbatches, 2, costs=size.costs)
    interleaved = select(spec).schedule
    stock = simulate(combined(interleaved))
    most = max(stock.peak_activation)
    named = made("interleaved", chunks=2, overlap=True)[1]
    # The page says that they are alike.
    assert (named.makespan, max(named.peak_sets)) == (stock.makespan, max(stock.peak_sets)), size

    def row(what: str, share: Fraction | None, name: str, run: Simulation) -> Row:
        memory = max(run.peak_activation)
        return {
            "pp": size.pp,
            "microbatches": size.microbatches,
            "exchange": float(size.exchange),
            "what": what,
            "share": None if share is None else float(share),
            "schedule": name,
            "makespan": float(run.makespan),
            "slower": float(run.makespan / stock.makespan) - 1,
            "memory": float(memory),
            "of_stock": float(memory / most),
            "hidden": float(run.hidden_exchange or 0),
            "steady": float(run.hidden_steady or 0),
        }

    yield row(STOCK, None, "interleaved", stock)
    yield row(ALONE, None, "interleaved", simulate(interleaved))
    yield row(DUALPIPEV, None, *made("dualpipev"))
    for what, names in ((OURS, NAMES), (UNPAIRED, SINGLE)):
        found: tuple[str, Simulation] | None = None
        for share in SHARES:
            # What is best in more memory and needs no more than this is the best here, too.
            if found is None or max(found[1].peak_activation) > share * most:
                cap = ShareCap(share * most / size.pp)
                found = made("auto", cap=cap, overlap=what == OURS, names=names)
            yield row(what, share, *found)


def measure(sizes: str) -> Row:
    """All rows; progress on the terminal."""
    rows = []
    for pp in map(int, sizes.split(",")):
        for exchange in EXCHANGES:
            for times in (4, 8):
                for row in rows_of(Size(pp, times * pp, exchange)):
                    rows.append(row)
                    print(row, flush=True)
    return {"rows": rows}


def claims(data: Row) -> list[Claim]:
    """The aim, in stock's memory."""
    own = [r for r in data["rows"] if (r["what"], r["share"]) == (OURS, 1.0)]
    few = [row for row in own if row["steady"] < AIM]
    what = f"at least {float(AIM):.0%} of the communication hidden in steady state, stock's memory"
    text = f"{_range([row['steady'] for row in own], '.0%')}; less {_where(few)}"
    return [Claim(what, text, not few)]


def _range(values: Sequence[float], form: str) -> str:
    low, high = min(values), max(values)
    return format(low, form) if low == high else f"{low:{form}} to {high:{form}}"


def _where(rows: Sequence[Row]) -> str:
    each = (f"p={r['pp']}, m={r['microbatches']}, {r['exchange']:g}" for r in rows)
    return "at " + "; ".join(each) if rows else "nowhere"


def _statements(rows: Sequence[Row]) -> list[str]:
    """What the rows show, losses too."""
    out = []

    def size(row: Row) -> tuple[object, ...]:
        return row["pp"], row["microbatches"], row["exchange"]

    def ranges(own: Sequence[Row]) -> tuple[str, str, str]:
        return (
            _range([row["slower"] for row in own], "+.1%"),
            _range([row["of_stock"] for row in own], ".0%"),
            _range([row["steady"] for row in own], ".0%"),
        )

    for share in map(float, SHARES):
        own = [r for r in rows if (r["what"], r["share"]) == (OURS, share)]
        plain = {size(r): r for r in rows if (r["what"], r["share"]) == (UNPAIRED, share)}
        gains = [r["makespan"] / plain[size(r)]["makespan"] - 1 for r in own]
        few = [r for r in own if r["steady"] < AIM]
        times, held, hidden = ranges(own)
        out.append(
            f"- Ours with pairs in {share:.0%} of stock's memory (they take {held}): {times} time "
            "beside stock's combined schedule, faster in "
            f"{sum(r['slower'] < 0 for r in own)} of {len(own)} rows; {_range(gains, '+.1%')} time "
            f"beside our schedules without pairs. In steady state they hide {hidden} of the "
            f"communication; less than {float(AIM):.0%} "
            f"{_where(few) if len(few) < len(own) else 'in every row'}."
        )
    for what in (STOCK, DUALPIPEV):
        times, held, hidden = ranges([r for r in rows if r["what"] == what])
        out.append(
            f"- {what}: {f'{times} time, ' if what != STOCK else ''}{held} of stock's memory; "
            f"it hides {hidden} in steady state."
        )
    return out


def body(data: Row) -> list[Any]:
    """The page."""
    columns: pages.Columns = {
        "p": "{pp}",
        "m": "{microbatches}",
        "exchange": "{exchange:g}",
        "order": "{what}",
        "cap": lambda row: "" if row["share"] is None else f"{row['share']:.0%}",
        "schedule": "{schedule}",
        "time": "{makespan:g}",
        "beside stock combined": "{slower:+.1%}",
        "memory": "{memory:g}",
        "hidden": "{hidden:.1%}",
        "in steady state": "{steady:.1%}",
    }
    return [
        "A pair takes the longer of its computation and its communication, and no less than either "
        f"pass alone. *{STOCK}*: Megatron's `--overlap-moe-expert-parallel-comm` with two chunks a "
        "rank: one more F before the first B, then every B beside an F. `interleaved` with overlap "
        f"at its own memory takes the same time and memory in every row. *{DUALPIPEV}*: its own "
        f"pairs. *{OURS}*: the fastest order of `auto` with overlap, at most *cap* of the memory "
        f"of stock's combined schedule; *{UNPAIRED}*: the same without overlap and without "
        f"{DUALPIPEV}. *memory*: microbatches' activations on the fullest rank. *hidden*: of the "
        "communication, in all and between a rank's first backward and last forward pass.",
        pages.verdicts(claims(data)),
        _statements(data["rows"]),
        pages.table(columns, data["rows"]),
    ]


BENCHMARK = pages.Benchmark(
    "overlap",
    __doc__,
    "Passes in pairs",
    lambda data: (
        "**simulated, no measurement**; a rank computes F = B = W = 1 a microbatch, F and B "
        "exchange tokens with experts on other ranks for *exchange* besides, so F and B take "
        "1 + exchange"
    ),
    body,
    lambda args: measure(args.sizes),
    {"sizes": ("4,8", "pipeline ranks")},
    claims=claims,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
