#!/usr/bin/env python3
"""Forward and backward passes in pairs beside Megatron's own combined schedule, simulated.

    python3 -m benchmarks.overlap [--sizes 4,8] [--output DIR] [--date YYYY-MM-DD] [--check]

A rank computes F = B = W = 1 a microbatch, and F and B exchange tokens with experts on other ranks
for so long besides. A pair takes the longer of its computation and its communication. Writes
overlap.md.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from megatron_ext.schedule import NAMES, Joint, Op, Schedule, ScheduleSpec, select, simulate
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.simulate import Simulation

HERE = Path(__file__).resolve().parent
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


class Row(NamedTuple):
    """One order.

    Attributes:
        size: for what.
        what: STOCK, ALONE, DUALPIPEV, OURS or UNPAIRED.
        share: of stock's memory that it may take; None: what it takes.
        name: of the schedule.
        run: its simulation.
        stock: that of STOCK.
    """

    size: Size
    what: str
    share: Fraction | None
    name: str
    run: Simulation
    stock: Simulation

    @property
    def slower(self) -> float:
        """Than stock's combined schedule; below 0: faster."""
        return float(self.run.makespan / self.stock.makespan) - 1

    @property
    def memory(self) -> Fraction:
        """In sets of a rank's layers for one microbatch."""
        return max(self.run.peak_activation)

    @property
    def steady(self) -> Fraction:
        """Share of the communication hidden in steady state."""
        return self.run.hidden_steady or Fraction(0)


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


def fits(run: Simulation, most: Fraction) -> bool:
    """True if no rank holds more."""
    return max(run.peak_activation) <= most


def rows_of(size: Size) -> Iterator[Row]:
    """All orders of one size."""
    pp, microbatches, _ = size
    costs = size.costs

    def made(name: str, **options: object) -> tuple[str, Simulation]:
        found = select(ScheduleSpec(name, pp, microbatches, costs=costs, **options))  # type: ignore[arg-type]
        return found.spec.name, simulate(found.schedule)

    interleaved = select(ScheduleSpec("interleaved", pp, microbatches, 2, costs=costs)).schedule
    stock = simulate(combined(interleaved))
    named = made("interleaved", chunks=2, overlap=True)[1]
    for run in (stock, named):  # the page says that they are alike
        assert (run.makespan, max(run.peak_sets)) == (stock.makespan, max(named.peak_sets)), size
    yield Row(size, STOCK, None, "interleaved", stock, stock)
    yield Row(size, ALONE, None, "interleaved", simulate(interleaved), stock)
    yield Row(size, DUALPIPEV, None, *made("dualpipev"), stock)
    for what, names in ((OURS, NAMES), (UNPAIRED, SINGLE)):
        found: list[tuple[str, Simulation]] = []
        for share in SHARES:
            most = share * max(stock.peak_activation)
            # What is best in more memory and needs no more than this is the best here, too.
            if not found or not fits(found[-1][1], most):
                cap = ShareCap(most / pp)
                found.append(made("auto", cap=cap, overlap=what == OURS, names=names))
            yield Row(size, what, share, *found[-1], stock)


def rows(sizes: Sequence[int]) -> Iterator[Row]:
    """All of them; progress on the terminal."""
    for pp in sizes:
        for exchange in EXCHANGES:
            for times in (4, 8):
                for row in rows_of(Size(pp, times * pp, exchange)):
                    print(row_text(row), flush=True)
                    yield row


def row_text(row: Row) -> str:
    """Of the page's table."""
    share = "" if row.share is None else f"{float(row.share):.0%}"
    pp, microbatches, exchange = row.size
    cells = [
        *(str(pp), str(microbatches), f"{float(exchange):g}", row.what, share, row.name),
        f"{float(row.run.makespan):g}",
        f"{row.slower:+.1%}",
        f"{float(row.memory):g}",
        f"{float(row.run.hidden_exchange or 0):.1%}",
        f"{float(row.steady):.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def missed(found: Sequence[Row]) -> list[Row]:
    """The rows in stock's memory that hide less than the aim."""
    return [r for r in found if (r.what, r.share) == (OURS, SHARES[0]) and r.steady < AIM]


def _range(values: Sequence[float], form: str) -> str:
    low, high = min(values), max(values)
    return format(low, form) if low == high else f"{low:{form}} to {high:{form}}"


def _where(rows: Sequence[Row]) -> str:
    each = (f"p={r.size.pp}, m={r.size.microbatches}, {float(r.size.exchange):g}" for r in rows)
    return "at " + "; ".join(each) if rows else "nowhere"


def statements(found: Sequence[Row]) -> list[str]:
    """What the rows show, losses too."""
    out = []
    for share in SHARES:
        own = [r for r in found if (r.what, r.share) == (OURS, share)]
        plain = {r.size: r for r in found if (r.what, r.share) == (UNPAIRED, share)}
        gains = [float(r.run.makespan / plain[r.size].run.makespan) - 1 for r in own]
        held = [float(r.memory / max(r.stock.peak_activation)) for r in own]
        few = [r for r in own if r.steady < AIM]
        faster = f"faster in {sum(r.slower < 0 for r in own)} of {len(own)} rows"
        hidden = _range([float(r.steady) for r in own], ".0%")
        out.append(
            f"- Ours with pairs in {float(share):.0%} of stock's memory (they take "
            f"{_range(held, '.0%')}): {_range([r.slower for r in own], '+.1%')} time beside "
            f"stock's combined schedule, {faster}; {_range(gains, '+.1%')} time beside our "
            f"schedules without pairs. In steady state they hide {hidden} of the communication; "
            f"less than {float(AIM):.0%} {_where(few) if len(few) < len(own) else 'in every row'}."
        )
    for what in (STOCK, DUALPIPEV):
        own = [r for r in found if r.what == what]
        held = [float(r.memory / max(r.stock.peak_activation)) for r in own]
        times = f"{_range([r.slower for r in own], '+.1%')} time, "
        out.append(
            f"- {what}: {times if what != STOCK else ''}{_range(held, '.0%')} of stock's memory; "
            f"it hides {_range([float(r.steady) for r in own], '.0%')} in steady state."
        )
    return out


def page(found: Sequence[Row], date: str) -> str:
    """The Markdown page."""
    aim = f"at least {float(AIM):.0%} of the communication hidden in steady state"
    few = missed(found)
    holds = "holds at p = 4 and 8" if not few else f"is missed {_where(few)}"
    return "\n".join(
        [
            "# Passes in pairs",
            "",
            f"{date}, Python {platform.python_version()}: `python3 -m benchmarks.overlap --check`. "
            "**Simulated, no measurement.** A rank computes F = B = W = 1 a microbatch; F and B "
            "exchange tokens with experts on other ranks for *exchange* besides, so F and B take "
            "1 + exchange. A pair takes the longer of its computation and its communication, and "
            "no less than either pass alone.",
            "",
            f"*{STOCK}*: Megatron's `--overlap-moe-expert-parallel-comm` with two chunks a rank: "
            "one more F before the first B, then every B beside an F. `interleaved` with overlap "
            "at its own memory takes the same time and memory in every row. "
            f"*{DUALPIPEV}*: its own pairs. *{OURS}*: the fastest order of `auto` with overlap, at "
            "most *cap* of the memory of stock's combined schedule; "
            f"*{UNPAIRED}*: the same without overlap and without {DUALPIPEV}. *memory*: "
            "microbatches' activations on the fullest rank. *hidden*: of the communication, in all "
            "and between a rank's first backward and last forward pass.",
            "",
            f"The aim, {aim} in stock's memory, {holds}.",
            "",
            *statements(found),
            "",
            "| p | m | exchange | order | cap | schedule | time | beside stock combined | memory | "
            "hidden | in steady state |",
            "|--:|--:|--:|---|--:|---|" + "--:|" * 5,
            *map(row_text, found),
            "",
        ]
    )


def main() -> None:
    """Run and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="4,8", help="pipeline ranks")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--check", action="store_true", help="exit with 1 if the aim is missed")
    args = parser.parse_args()
    found = list(rows([int(size) for size in args.sizes.split(",")]))
    (args.output / "overlap.md").write_text(page(found, args.date))
    if args.check and missed(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
