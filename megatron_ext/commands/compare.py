"""``compare``: every schedule side by side for one pipeline, its costs and a memory cap."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..schedule.costs import Costs, number_to_json
from ..schedule.generators import GENERATORS, generate
from ..schedule.generators.auto import costs_for
from ..schedule.generators.registry import takers
from ..schedule.link import Link
from ..schedule.memory_cap import cap_sets
from ..schedule.offload_cap import CapNotKept, caps_to_try, generate_offloaded
from ..schedule.schedule import Schedule
from ..schedule.simulate import Simulation, simulate
from .common import (
    InputError,
    Parser,
    add_offload_options,
    add_shape_options,
    add_size_options,
    cost_json,
    costs_of,
    costs_text,
    memory_cap,
    offload_link,
    offloads,
    refuse_large,
    short,
    simulation_json,
)


@dataclass(frozen=True)
class _Row:
    """One schedule that exists for these sizes.

    Attributes:
        simulation: of the schedule, with offload if that was asked for.
        seconds: to make it and to plan its offload.
        over_cap: more stays on the device than the cap allows.
        before: the highest peak without offload, in microbatches; None if none was asked for.
    """

    simulation: Simulation
    seconds: float
    over_cap: bool
    before: Fraction | None


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("compare", help="every schedule side by side")
    group = parser.add_argument_group("pipeline")
    add_size_options(group, required=True)
    add_shape_options(
        group,
        "what a schedule is made for where it takes a cap; marked where it exceeds it; with "
        "--offload of what stays on the device",
        f"for {_GROUPED}",
    )
    add_offload_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_compare)


_GROUPED = " and ".join(takers("takes_group_size"))


def _compare(args: argparse.Namespace) -> None:
    if args.pp < 2:
        raise InputError(f"a pipeline needs at least 2 ranks, got --pp {args.pp}; give 2 or more")
    least = -(-args.pp // 2)
    if args.group_size is not None and not least <= args.group_size <= args.pp:
        raise InputError(
            f"--group-size {args.group_size} is for {_GROUPED}, which at pp={args.pp} takes "
            f"{least} (p/2 rounded up) to {args.pp} (p); give one of those"
        )
    costs, cap = costs_of(args, Costs()), memory_cap(args)
    link = offload_link(args, args.pp) if offloads(args) else None
    rows: list[_Row] = []
    impossible: dict[str, str] = {}
    for name in GENERATORS:
        started = time.perf_counter()
        try:
            schedule, limit = _generated(name, args, costs, cap, link)
        except ValueError as error:
            impossible[name] = str(error)
            continue
        seconds = time.perf_counter() - started
        refuse_large(schedule)
        rows.append(_row(schedule, seconds, limit, link is not None))
    if not rows:
        name, reason = next(iter(impossible.items()))
        raise InputError(f"no schedule is possible here; {name}, for one: {reason}")
    span = args.objective == "span"
    rows.sort(  # stable: ties stay simplest first
        key=lambda row: row.simulation.span_bubble if span else row.simulation.makespan
    )
    if args.json:
        print(json.dumps(_json(args, costs, cap, rows, impossible)))
    else:
        print(_table(args, costs, cap, rows, impossible))


def _row(schedule: Schedule, seconds: float, limit: int | None, offloaded: bool) -> _Row:
    simulation = simulate(schedule)
    over = limit is not None and max(simulation.peak_sets) > limit
    before = max(simulate(schedule.compute()).peak_activation) if offloaded else None
    return _Row(simulation, seconds, over, before)


def _generated(
    name: str, args: argparse.Namespace, costs: Costs, cap: Fraction | None, link: Link | None
) -> tuple[Schedule, int | None]:
    """``name`` for these sizes, offloaded if there is a link, and the cap in its activation sets.

    Raises:
        ValueError: it does not exist for them.
    """
    generator = GENERATORS[name]
    chunks = args.chunks if generator.any_chunks and args.chunks else generator.default_chunks
    sets = None if cap is None else cap_sets(cap, args.pp, chunks)
    make = _maker(name, args, costs, chunks)
    if link is None:
        wanted = None
        if generator.takes_memory_cap and sets is not None:
            wanted = min(sets, args.pp * chunks)  # 1F1B's peak is the largest cap there is
        return make(wanted), sets
    caps = caps_to_try(name, args.pp, cap)
    try:
        plan = generate_offloaded(make, link, args.offload, cap=cap, caps=caps)
    except CapNotKept as error:
        plan = error.plan  # a row all the same, marked
    return plan.schedule, sets


def _maker(
    name: str, args: argparse.Namespace, costs: Costs, chunks: int
) -> Callable[[int | None], Schedule]:
    """What generates ``name`` for a cap in activation sets, or None."""
    generator = GENERATORS[name]
    # Stages of one chunk a rank are two of the V's: their costs are summed, where that can be.
    costs = costs_for(costs, args.pp * chunks) or costs
    return lambda memory_cap: generate(
        name,
        args.pp,
        args.microbatches,
        chunks,
        costs,
        group_size=args.group_size if generator.takes_group_size else None,
        memory_cap=memory_cap,
        objective=args.objective or "makespan",
    )


def _json(
    args: argparse.Namespace,
    costs: Costs,
    cap: Fraction | None,
    rows: list[_Row],
    impossible: dict[str, str],
) -> dict[str, Any]:
    """``schedules`` fastest first, fields as of ``simulate``; with a cap also ``over_cap``.

    With offload also ``peak_activation_without_offload``, of the worst rank in microbatches.
    ``memory_cap``, ``group_size``, ``objective`` and the offload options are there if given.
    """
    schedules = []
    for row in rows:
        fields = simulation_json(row.simulation, row.seconds, offloads(args))
        if row.before is not None:
            fields["peak_activation_without_offload"] = number_to_json(row.before)
        if cap is not None:
            fields["over_cap"] = row.over_cap
        schedules.append(fields)
    head: dict[str, Any] = {
        "pp": args.pp,
        "microbatches": args.microbatches,
        "cost": cost_json(costs),
    }
    if cap is not None:
        head["memory_cap"] = float(cap)
    for option in ("group_size", "objective", *(_OFFLOAD if offloads(args) else ())):
        if getattr(args, option) is not None:
            head[option] = getattr(args, option)
    reasons = [{"schedule": name, "reason": reason} for name, reason in impossible.items()]
    return {**head, "schedules": schedules, "impossible": reasons}


_OFFLOAD = ("offload", "offload_time", "offload_transfer")
_HEADS = ("schedule", "chunks", "bubble", "span bubble", "makespan", "peak", "of 1F1B's", "made in")
_OFFLOAD_HEADS = ("without", "host peak", "sets away", "stall")


def _table(
    args: argparse.Namespace,
    costs: Costs,
    cap: Fraction | None,
    rows: list[_Row],
    impossible: dict[str, str],
) -> str:
    limit = "" if cap is None else f"; memory cap {short(100 * cap)} % of 1F1B's peak"
    if args.group_size is not None:
        limit += f"; {_GROUPED} in groups of {args.group_size}"
    if args.objective is not None:
        limit += f"; objective {args.objective}"
    heads: tuple[str, ...] = _HEADS
    if offloads(args):
        limit += f"; offload {args.offload}, {args.offload_time} of F+B+W a way"
        if args.offload_transfer is not None:
            limit += f", {args.offload_transfer}"
        heads = (*_HEADS[:-1], *_OFFLOAD_HEADS, _HEADS[-1])
    cells = [heads, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [f"pp {args.pp}, microbatches {args.microbatches}; {costs_text(costs)}{limit}", ""]
    for line, over in zip(cells, [False, *(row.over_cap for row in rows)]):
        padded = [line[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        lines.append("  ".join(padded) + ("  over the cap" if over else ""))
    lines += [
        "",
        "peak: activations on the worst rank, in microbatches; 1F1B's is the number of ranks",
    ]
    if offloads(args):
        lines += [
            "without: the same without offload; host peak: likewise, on the host",
            "sets away: activation sets that leave, on all ranks; stall: the makespan's part of it",
        ]
    if impossible:
        lines += ["not possible here:"]
        lines += [
            f"  {reason}" if reason.startswith(name) else f"  {name}: {reason}"
            for name, reason in impossible.items()
        ]
    return "\n".join(lines)


def _cells(row: _Row) -> tuple[str, ...]:
    run = row.simulation
    peak = max(run.peak_activation)
    return (
        run.schedule.name,
        str(run.schedule.chunks),
        f"{float(100 * run.bubble):.2f} %",
        f"{float(100 * run.span_bubble):.2f} %",
        short(run.makespan),
        short(peak),
        f"{float(100 * peak / run.schedule.pp):.1f} %",
        *_offload_cells(row),
        f"{row.seconds:.3f} s",
    )


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
