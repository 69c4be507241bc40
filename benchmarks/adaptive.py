"""``v-cap`` beside the adaptive scheduler of the Controllable Memory authors, cell by cell.

    python3 -m benchmarks.adaptive                        # their stored makespans; adaptive.md
    python3 -m benchmarks.adaptive --resume               # go on where it was interrupted
    python3 -m benchmarks.adaptive --random 40 --seed 1   # and random sizes, costs, caps and hops
    python3 -m benchmarks.adaptive --page-of FILE         # the page alone, of earlier results

Their makespans are facts in ``results/adaptive-scheduler.json``. ``--theirs FILE``, or
``$ADAPTIVE_SCHEDULER``, names ``v_auto_schedule.py`` of a checkout of
sail-sg/zero-bubble-pipeline-parallelism; then their scheduler is run too: it makes the stored
orders again and those of the random grid. Without it the grid shows how far ours is from the lower
bound. Its code is no part of this repository. ``megatron_ext.schedule`` simulates all orders.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import page as pages
from benchmarks.page import Row
from megatron_ext.schedule import (
    Action,
    Costs,
    Op,
    Placement,
    Schedule,
    ScheduleSpec,
    check,
    select,
    simulate,
)
from megatron_ext.schedule.bounds import makespan_bound
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.memory_cap import ShareCap

STORED = pages.HERE / "results" / "adaptive-scheduler.json"
LOSS = 0.1  # per cent: what counts as slower


class Setting(NamedTuple):
    """One cell. Times are in units of F of a rank; each of its two passes takes half."""

    pp: int
    microbatches: int
    sets: int
    forward: str
    backward_input: str
    backward_weight: str
    hop: str

    @property
    def costs(self) -> Costs:
        """As our schedules take them."""
        return Costs.of(*self[3:])


def least_sets(pp: int) -> int:
    """V-Min's memory, below which there is no V schedule of ours."""
    return 2 * ((pp + 4) // 3)


def stored() -> list[tuple[Setting, float]]:
    """The settings of the file and their makespans, each once.

    Memory is what their order takes, which may be less than the limit that it was made for.
    """
    data = json.loads(STORED.read_text())
    found = {}
    for row in data["rows"]:
        sets = round(row["peakW_frac"] * 2 * row["p"])
        costs = map(str, (*data["costs"][row["cost"]], row["comm"]))
        setting = Setting(row["p"], row["m"], sets, *costs)
        found[setting] = min(row["makespan"], found.get(setting, row["makespan"]))
    return list(found.items())


def grid(count: int, seed: int) -> list[Setting]:
    """Random settings: p in 2..12, m in p..4p, any cap from V-Min's to 1F1B's memory, B and W from
    0.5 to 1.5 and 0.3 to 1.2 of F, hops to 0.15 of F, none in a third of them."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        pp = rng.randint(2, 12)
        b, w = (rng.randint(*ends) for ends in ((50, 150), (30, 120)))
        hop = rng.choice((0, rng.randint(1, 30), rng.randint(1, 30)))
        found.append(
            Setting(
                pp,
                rng.randint(pp, 4 * pp),
                rng.randint(least_sets(pp), 2 * pp),
                *("1", str(b / 100), str(w / 100), str(hop / 200)),
            )
        )
    return found


class Theirs:
    """Their scheduler as a black box: ``schedule(p, m, (F, B, W, hop), most sets)``.

    Args:
        file: their ``v_auto_schedule.py``, which needs the standard library alone.
    """

    def __init__(self, file: Path) -> None:
        spec = importlib.util.spec_from_file_location("adaptive_scheduler", file)
        if spec is None or spec.loader is None or not file.is_file():
            raise SystemExit(f"--theirs {file} is no Python file; give their v_auto_schedule.py")
        self._module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self._module  # its dataclasses look it up
        spec.loader.exec_module(self._module)

    def order(self, setting: Setting) -> Schedule | None:
        """Their order as a schedule of ours, checked; None where they make none that is valid."""
        # It counts in whole numbers; a transfer in the unit of one of a rank's two passes.
        costs = [*(Fraction(x) for x in setting[3:6]), 2 * Fraction(setting.hop)]
        whole = tuple(int(x * 200) for x in costs)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                made = self._module.schedule(setting.pp, setting.microbatches, whole, setting.sets)
            except Exception:  # anything: what they refuse is no result
                return None
        if not made:
            return None
        last = 2 * setting.pp - 1
        ranks = tuple(
            tuple(
                Action(Op[node.type], last - rank if node.chunk else rank, node.minibatch)
                for node in row
            )
            for rank, row in enumerate(made)
        )
        placement = Placement.vee(setting.pp)
        order = Schedule("adaptive", placement, setting.microbatches, ranks, setting.costs)
        try:
            check(order)
        except ValueError:
            return None
        return order


class Rival(NamedTuple):
    """What theirs takes; ``sets`` and ``seconds`` are known where it was run."""

    makespan: float | None = None
    sets: int | None = None
    seconds: float | None = None


def rival(setting: Setting, known: float | None, box: Theirs | None) -> Rival:
    """Theirs for a setting.

    Raises:
        RuntimeError: the scheduler does not make the stored makespan again.
    """
    if box is None:
        return Rival(known)
    started = time.perf_counter()
    order = box.order(setting)
    seconds = round(time.perf_counter() - started, 3)
    made = Rival(seconds=seconds)
    if order is not None and max(peak_sets(order.ranks)) <= setting.sets:
        makespan = float(simulate(order).makespan)
        made = Rival(makespan, max(peak_sets(order.ranks)), seconds)
    if known is not None and (made.makespan is None or abs(made.makespan - known) > 1e-6 * known):
        raise RuntimeError(f"{setting}: they take {made}, {STORED.name} has {known}")
    return made


def measure(setting: Setting, theirs: Rival) -> Row:
    """One row: ``v-cap``'s at no more sets than theirs takes, beside theirs and the lower bound."""
    sets = setting.sets if theirs.sets is None else max(theirs.sets, least_sets(setting.pp))
    spec = ScheduleSpec(
        "v-cap",
        setting.pp,
        setting.microbatches,
        costs=setting.costs,
        cap=ShareCap(Fraction(sets, 2 * setting.pp)),
    )
    started = time.perf_counter()
    order = select(spec).schedule
    seconds = time.perf_counter() - started
    check(order)
    peak = max(peak_sets(order.ranks))
    if peak > sets:
        raise RuntimeError(f"{setting}: v-cap holds {peak} sets, more than {sets}")
    bound = makespan_bound(order.placement, setting.microbatches, setting.costs, sets)
    return {
        **setting._asdict(),
        "limit": setting.sets,
        "sets": sets,
        "theirs": theirs.makespan,
        "ours": float(simulate(order).makespan),
        "bound": float(bound),
        "peak": peak,
        "seconds": round(seconds, 3),
        "their_seconds": theirs.seconds,
    }


def run(
    settings: Sequence[tuple[Setting, float | None]], box: Theirs | None, part: Path
) -> list[Row]:
    """All rows; ``part`` has those of an interrupted run, and grows by the others."""
    lines = part.read_text().splitlines() if part.exists() else []
    names = ["limit" if name == "sets" else name for name in Setting._fields]
    done = {tuple(row[name] for name in names): row for row in map(json.loads, lines)}
    rows = []
    for setting, known in settings:
        if setting not in done:
            done[setting] = measure(setting, rival(setting, known, box))
            with part.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[setting]) + "\n")
        rows.append(done[setting])
        print("    ", _line(rows[-1]), flush=True)
    return rows


def slower(row: Row) -> float:
    """By how many per cent ours is longer than theirs; less than 0 where it is shorter."""
    return float(100 * (row["ours"] / row["theirs"] - 1))


def gap(row: Row) -> float:
    """By how many per cent ours is above the lower bound at this cap."""
    return float(100 * (row["ours"] / row["bound"] - 1))


def _costs_text(row: Row) -> str:
    return ", ".join(row[x] for x in ("forward", "backward_input", "backward_weight"))


def _line(row: Row) -> str:
    than = "" if row["theirs"] is None else f", {slower(row):+.2f} % over theirs"
    return (
        f"p={row['pp']} m={row['microbatches']} sets={row['sets']} costs {_costs_text(row)} "
        f"hop {row['hop']}: {row['ours']:g}{than}, {gap(row):.2f} % over the bound, "
        f"{row['seconds']:.2f} s"
    )


def _table(rows: Sequence[Row]) -> list[str]:
    def longer(row: Row) -> str:
        if row["theirs"] is None:
            return ""
        text = f"{slower(row):+.2f} %"
        return f"**{text}**" if slower(row) > LOSS else text

    columns: pages.Columns = {
        "p": "{pp}",
        "m": "{microbatches}",
        "cap": lambda row: f"{row['sets']}/{2 * row['pp']}",
        "costs": _costs_text,
        "hop": "{hop}",
        "theirs": lambda row: "" if row["theirs"] is None else f"{row['theirs']:.6g}",
        "ours": "{ours:.6g}",
        "ours is longer by": longer,
        "above the bound": lambda row: f"{gap(row):.2f} %",
        "seconds": "{seconds:.2f}",
    }
    return pages.table(columns, rows)


def facts(rows: Sequence[Row]) -> list[str]:
    """What a group of rows shows, as the items of a list."""
    both = [row for row in rows if row["theirs"] is not None]
    times = sorted(row["seconds"] for row in rows)
    lines = []
    if both:
        by = [slower(row) for row in both]
        bound = [slower(row) for row in both if row["sets"] < 2 * row["pp"]]
        lost = [sum(x > limit for x in by) for limit in (LOSS, 0.5, 2)]
        lines.append(
            f"Of {len(both)} cells {lost[0]} are lost by more than {LOSS} % ({lost[1]} by more "
            f"than 0.5 %, {lost[2]} by more than 2 %), {sum(x < -LOSS for x in by)} won by more "
            f"than {LOSS} %; {sum(gap(row) < 1e-6 for row in both)} of ours are at the lower bound."
        )
        for what, some in (
            (
                "where memory binds (cap < 1)",
                bound,
            ),
            ("at all caps", by),
        ):
            if some:
                lines.append(
                    f"Ours is longer by {fmean(some):+.2f} % on average {what}; worst "
                    f"{max(some):+.2f} %, best {min(some):+.2f} %."
                )
        theirs = [row["their_seconds"] for row in both if row["their_seconds"] is not None]
        if theirs:
            lines.append(f"Theirs took {max(theirs):.2f} s at most to make.")
    lines.append(
        f"Above the lower bound by {fmean([gap(row) for row in rows]):.2f} % on average, "
        f"{max(map(gap, rows)):.2f} % at most. Ours took {times[len(times) // 2]:.2f} s to make "
        f"in the median, {times[-1]:.2f} s at most."
    )
    return [f"- {line}" for line in lines]


def _group(title: str, rows: Sequence[Row]) -> list[Any]:
    """A section: facts, the losses, all cells."""
    lost = [row for row in rows if row["theirs"] is not None and slower(row) > LOSS]
    worst = _table(sorted(lost, key=slower, reverse=True))
    losses = ["Lost cells, worst first:", worst, "Every cell:"] if lost else []
    return [f"## {title}", facts(rows), *losses, _table(rows)]


def body(data: Row) -> list[Any]:
    """The page."""
    again = (
        "Their scheduler was run for this page; it made every stored makespan again."
        if data["theirs_ran"]
        else "Their scheduler was not run for this page."
    )
    most = f" --most {data['most']}" if data["most"] else ""
    parts: list[Any] = [
        f"    python3 -m benchmarks.adaptive --random {data['count'] or 40} --seed {data['seed']}"
        f"{most} --theirs FILE",
        "*Theirs* is the scheduler of the authors of *Pipeline Parallelism with Controllable "
        "Memory* (arXiv 2405.15362) for any memory limit: `schedule` of `v_auto_schedule.py` in "
        "sail-sg/zero-bubble-pipeline-parallelism at 39f2c186, called as it is and not read; the "
        "stored makespans are in [results/adaptive-scheduler.json](results/adaptive-scheduler.json)"
        f". {again} *Ours* is `--pp-schedule v-cap` with a cap of as many activation sets as their "
        "order takes, counted from F's start to W's end, on every rank. Both are simulated alike, "
        "in units of F of a rank at cost 1, two passes a rank and microbatch, each half of it; a "
        "hop is the time of one transfer. *Cap* is in sets, of 1F1B's 2p. The bound is "
        "`makespan_bound`, at that cap; no order is shorter.",
        *_group("The stored cells", data["stored"]),
    ]
    rows = data["random"]
    if rows:
        title = f"Random cells: {len(rows)} of {data['count']} drawn with seed {data['seed']}"
        title += f", those with p m to {data['most']}" if data["most"] else ""
        parts += _group(title, rows)
        none = sum(row["theirs"] is None for row in rows)
        why = "their scheduler gave no valid order" if data["theirs_ran"] else "it was not run"
        parts.append(f"Without a number of theirs are {none}: {why}." if none else "")
    return parts


def report(data: Row) -> int:
    """Exit status 1 if a cell is lost."""
    rows = [row for row in data["stored"] + data["random"] if row["theirs"] is not None]
    lost = sum(slower(row) > LOSS for row in rows)
    print(f"{lost} of {len(rows)} cells are lost by more than {LOSS} %")
    return int(lost > 0)


def options(parser: argparse.ArgumentParser) -> None:
    """Those without a plain default."""
    theirs = os.environ.get("ADAPTIVE_SCHEDULER")
    parser.add_argument("--most", type=int, metavar="N", help="only cells with p x m to N")
    parser.add_argument(
        "--theirs",
        type=Path,
        default=Path(theirs) if theirs else None,
        metavar="FILE",
        help="v_auto_schedule.py of their checkout (default $ADAPTIVE_SCHEDULER)",
    )


def _data(args: argparse.Namespace) -> dict[str, Any]:
    """The results."""
    box = None if args.theirs is None else Theirs(args.theirs)
    part = args.output / "results" / f"{args.date}-adaptive.part"
    if not args.resume:
        part.unlink(missing_ok=True)
    cells: list[list[tuple[Setting, float | None]]] = [
        [(setting, known) for setting, known in stored()],
        [(setting, None) for setting in grid(args.random, args.seed)],
    ]
    groups = [
        run([x for x in group if args.most is None or x[0][0] * x[0][1] <= args.most], box, part)
        for group in cells
    ]
    part.unlink(missing_ok=True)
    return {
        "theirs_ran": box is not None,
        "count": args.random,
        "most": args.most,
        "seed": args.seed,
        "stored": groups[0],
        "random": groups[1],
    }


BENCHMARK = pages.Benchmark(
    "adaptive",
    __doc__,
    "`v-cap` and the authors' adaptive scheduler",
    lambda data: "simulated, nothing here was measured on a GPU",
    body,
    _data,
    {
        "random": (0, "random cells too"),
        "seed": 1,
        "resume": (False, "keep an interrupted run's rows"),
    },
    extend=options,
    report=report,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
