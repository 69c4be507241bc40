"""``compare``: every schedule side by side for one pipeline, its costs and a memory cap."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from .._terminal import Progress, paint
from ..schedule import AUTO, GENERATORS, ScheduleSpec, Selected, Simulation, select, simulate
from ..schedule.costs import number_to_json
from ..schedule.memory_cap import ShareCap
from ..schedule.named import CapExceeded, keeps
from ..view.table import columns
from .common import (
    InputError,
    Parser,
    add_offload_options,
    add_shape_options,
    add_size_options,
    memory_cap,
    offload_of,
    offloads,
    refuse_large,
    sizes_of,
    taking,
)
from .network import add_network_options, network_json, network_of, network_text
from .quality import Quality, add_jitter_options, jitter_of, percent, simulated
from .results import cost_json, costs_text, short, simulation_json, units_text


@dataclass(frozen=True)
class _Row:
    """One schedule that exists for these sizes.

    Attributes:
        simulation: of the schedule, with offload if that was asked for.
        seconds: to make it and to plan its offload.
        over_cap: more stays on the device than the cap allows.
        before: the highest peak without offload, in microbatches; None if none was asked for.
        quality: beside the bound, and under random pass times.
    """

    simulation: Simulation
    seconds: float
    over_cap: bool
    before: Fraction | None
    quality: Quality


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("compare", help="compare every schedule")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_compare)


def add_options(parser: Parser) -> None:
    """What is asked of all schedules."""
    group = parser.add_argument_group("pipeline")
    add_size_options(group, required=True)
    add_shape_options(
        group,
        "what a schedule is made for where it takes a cap; marked where it exceeds it; with "
        "--offload of what stays on the device",
        f"for {_GROUPED}",
    )
    add_offload_options(parser)
    add_network_options(parser)
    add_jitter_options(parser)


_GROUPED = taking("takes_group_size")


def _compare(args: argparse.Namespace) -> None:
    refuse_sizes(args)
    cuts = _cuts(args)
    asked = asked_of(cuts[0])
    network, noise = network_of(args), jitter_of(args)
    rows: list[_Row] = []
    impossible: dict[str, str] = {}

    def row_of(asked: ScheduleSpec, name: str) -> _Row:
        started = time.perf_counter()
        found, over_cap = fitted(asked, name)
        seconds = time.perf_counter() - started
        refuse_large(found.schedule)
        before = None
        if asked.offload is not None:
            before = max(simulate(found.schedule.compute()).peak_activation)
        run, quality = simulated(found.schedule, args, network, noise)
        return _Row(run, seconds, over_cap, before, quality)

    with Progress("compare") as progress:
        ways = [(cut, name) for name in GENERATORS for cut in cuts]
        for number, (cut, name) in enumerate(ways):
            progress(f"{name}, {number + 1} of {len(ways)} schedules")
            try:
                rows.append(row_of(asked_of(cut), name))
            except ValueError as error:
                impossible[name] = str(error)
                continue
            run = rows[-1].simulation
            peak = short(max(run.peak_activation))
            text = f"{name}{units_text(run.schedule)}: bubble {percent(run.bubble)}"
            progress.line(f"{text}, peak {peak} microbatches")
    if not rows:
        name, reason = next(iter(impossible.items()))
        raise InputError(f"no schedule is possible here; {name}, for one: {reason}")
    span = args.objective == "span"
    rows.sort(key=lambda row: _place(row, span))  # stable: ties stay simplest first
    if args.json:
        print(json.dumps(_json(args, asked, rows, impossible)))
    else:
        print(_table(args, asked, rows, impossible))


def _cuts(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The options for each number of slices: here a list is rows, not one number a microbatch."""
    if args.slices is None:
        return [args]
    return [argparse.Namespace(**{**vars(args), "slices": one}) for one in args.slices.split(",")]


def _place(row: _Row, span: bool) -> tuple[bool, Fraction, Fraction]:
    """What fits the cap first, by time, then by the mean under jitter where that was asked for."""
    run, spread = row.simulation, row.quality.spread
    time = run.span_bubble if span else run.makespan
    return row.over_cap, time, spread.mean if spread else Fraction(0)


def refuse_sizes(args: argparse.Namespace) -> None:
    """Refuse sizes for which no schedule can be compared."""
    if args.pp < 2:
        raise InputError(f"a pipeline needs at least 2 ranks, got --pp {args.pp}; give 2 or more")
    least = -(-args.pp // 2)
    if args.group_size is not None and not least <= args.group_size <= args.pp:
        raise InputError(
            f"--group-size {args.group_size} is for {_GROUPED}, which at pp={args.pp} takes "
            f"{least} (p/2 rounded up) to {args.pp} (p); give one of those"
        )


def asked_of(args: argparse.Namespace) -> ScheduleSpec:
    """What the options ask of any schedule."""
    return replace(
        sizes_of(args, AUTO), offload=offload_of(args, args.pp) if offloads(args) else None
    )


def fitted(asked: ScheduleSpec, name: str) -> tuple[Selected, bool]:
    """A schedule, even if more stays on a device than the cap allows, and whether that is so.

    Raises:
        ValueError: it does not exist for these sizes.
    """
    spec = asked.of(name)
    if not GENERATORS[name].takes_group_size:
        spec = replace(spec, group_size=None)
    cap = spec.cap
    if cap is not None and spec.offload is None:
        cap.sets(spec.placement, spec.splits_backward)  # refuses what no set fits in
        spec = spec.order_alone()
        if isinstance(spec.cap, ShareCap):  # 1F1B's peak is the largest cap there is
            spec = replace(spec, cap=ShareCap(min(spec.cap.share, Fraction(1))))
    try:
        found = select(spec)
    except CapExceeded as error:
        found = error.selected
    return found, cap is not None and not keeps(cap, found.schedule)


def _json(
    args: argparse.Namespace, asked: ScheduleSpec, rows: list[_Row], impossible: dict[str, str]
) -> dict[str, Any]:
    """``schedules``: what fits the cap first, fastest first, fields as of ``simulate``; with a cap
    also ``over_cap``. ``slices`` of the whole are those asked for; a schedule's row has its own.

    With offload also ``peak_activation_without_offload``, of the worst rank in microbatches.
    ``memory_cap``, ``group_size``, ``objective`` and the offload options are there if given.
    """
    schedules = []
    for row in rows:
        fields = simulation_json(row.simulation, row.seconds, row.quality.json, offloads(args))
        if row.before is not None:
            fields["peak_activation_without_offload"] = number_to_json(row.before)
        if asked.cap is not None:
            fields["over_cap"] = row.over_cap
        schedules.append(fields)
    head: dict[str, Any] = {
        "pp": args.pp,
        "microbatches": args.microbatches,
        **({} if args.slices is None else {"slices": [int(n) for n in args.slices.split(",")]}),
        "cost": cost_json(asked.costs),
    }
    head |= network_json(network_of(args))
    cap = memory_cap(args)
    if cap is not None:
        head["memory_cap"] = float(cap.share)
    for option in ("group_size", "objective", *(_OFFLOAD if offloads(args) else ())):
        if getattr(args, option) is not None:
            head[option] = getattr(args, option)
    reasons = [{"schedule": name, "reason": reason} for name, reason in impossible.items()]
    return {**head, "schedules": schedules, "impossible": reasons}


_OFFLOAD = ("offload", "offload_time", "offload_transfer")
_HEADS = ("schedule", "chunks", "bubble")
_TIME_HEADS = ("makespan", "above bound")
_MEMORY_HEADS = ("peak", "of 1F1B's")
_OFFLOAD_HEADS = ("without", "host peak", "offloaded", "stall")


def _table(
    args: argparse.Namespace, asked: ScheduleSpec, rows: list[_Row], impossible: dict[str, str]
) -> str:
    cap = memory_cap(args)
    limit = "" if cap is None else f"; memory cap {short(100 * cap.share)} % of 1F1B's peak"
    if args.group_size is not None:
        limit += f"; {_GROUPED} in groups of {args.group_size}"
    if args.objective is not None:
        limit += f"; objective {args.objective}"
    if args.microbatch_cost is not None:
        limit += "; a cost for every microbatch"
    limit += network_text(network_of(args))
    noise = jitter_of(args)
    span = args.objective == "span"
    heads = (*_HEADS[:2], *(("slices",) if args.slices else ()), *_HEADS[2:])
    free = args.reorder_microbatches
    heads = (*heads, *(("span bubble",) if span else ()), *_TIME_HEADS)
    heads += ("by order",) if free else ()
    heads += (*(() if noise is None else ("with jitter",)), *_MEMORY_HEADS)
    if noise is not None:
        limit += f"; pass times +- {percent(noise.spread)}, {noise.runs} runs, seed {noise.seed}"
    if offloads(args):
        limit += f"; offload {args.offload}, {args.offload_time} of F+B+W a way"
        if args.offload_transfer is not None:
            limit += f", {args.offload_transfer}"
        heads += _OFFLOAD_HEADS
    heads += ("hidden",) if asked.costs.exchange else ()
    cells = [heads, *(_cells(row, span, bool(args.slices)) for row in rows)]
    lines = [
        f"pp {args.pp}, microbatches {args.microbatches}; {costs_text(asked.costs)}{limit}",
        "",
    ]
    for number, line in enumerate(columns(cells)):
        over = number > 0 and rows[number - 1].over_cap
        text = f"{line}  over the cap" if over else line
        best = number == 1 and not over
        lines.append(paint(f"{text}  best", "1;32") if best else text)
    lines += [
        "",
        f"above bound: {_what(args)} over the least of any order at that placement and memory; "
        "a longer search gains at most that",
        "peak: activations on the worst rank, in microbatches, and as a share of the number of "
        "ranks, which is 1F1B's peak where a step has as many microbatches or more",
    ]
    if span:
        lines.append("span bubble: idle share of the longest rank's span, first to last pass")
    if noise is not None:
        lines.append("with jitter: the mean makespan under random pass times")
    if asked.costs.exchange:
        lines.append("hidden: of the exchange behind computation")
    if free:
        lines.append("by order: what the order of the microbatches saves of the time as given")
        lines += [f"  best, microbatches {rows[0].simulation.schedule.arrangement}"]
    if offloads(args):
        lines += [
            "without: the same without offload; host peak: likewise, on the host",
            "offloaded: activation sets, of all ranks; stall: the makespan's part of it",
        ]
    if impossible:
        lines += ["not possible here:"]
        lines += [
            f"  {reason}" if reason.startswith(name) else f"  {name}: {reason}"
            for name, reason in impossible.items()
        ]
    return "\n".join(lines)


def _what(args: argparse.Namespace) -> str:
    return "the longest rank's span" if args.objective == "span" else "the makespan"


def _cells(row: _Row, span: bool, slices: bool) -> tuple[str, ...]:
    run, (gap, _, spread) = row.simulation, row.quality
    peak = max(run.peak_activation)
    return (
        run.schedule.name,
        str(run.schedule.chunks),
        *((str(max(run.schedule.slices, default=1)),) if slices else ()),
        f"{float(100 * run.bubble):.2f} %",
        *((f"{float(100 * run.span_bubble):.2f} %",) if span else ()),
        short(run.makespan),
        "-" if gap is None else f"{float(100 * gap.above):.2f} %",
        *_order_cells(run),
        *(() if spread is None else (short(spread.mean),)),
        short(peak),
        f"{float(100 * peak / run.schedule.pp):.1f} %",
        *_offload_cells(row),
        *(() if run.hidden_exchange is None else (percent(run.hidden_exchange),)),
    )


def _order_cells(run: Simulation) -> tuple[str, ...]:
    found = run.schedule.arrangement
    if found is None:
        return ()
    return ("-" if found.saved is None else percent(found.saved),)


def _offload_cells(row: _Row) -> tuple[str, ...]:
    if row.before is None:
        return ()
    transfers = row.simulation.transfers
    return (
        short(row.before),
        short(max(row.simulation.peak_host_activation)),
        str(transfers.sets if transfers else 0),
        short(transfers.stall if transfers else Fraction(0)),
    )
