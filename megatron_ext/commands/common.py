"""Shared by the commands: schedule options, input errors, formats of numbers."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from .._input import MOST_BYTES, flag_of, meant, shown
from ..schedule import (
    AUTO,
    NAMES,
    CheckReport,
    Costs,
    Link,
    OffloadSpec,
    Schedule,
    ScheduleError,
    ScheduleSpec,
    check,
    select,
)
from ..schedule.costs import with_stage_file
from ..schedule.generators import default_effort
from ..schedule.generators.registry import takers
from ..schedule.io import load as load_file
from ..schedule.io import read as read_schedule
from ..schedule.link import DEFAULT_POLICY, POLICIES
from ..schedule.memory_cap import ShareCap, parse_cap
from ..schedule.named import CapExceeded
from .parser import Parser as Parser
from .parser import effort as effort_of
from .parser import positive as positive
from .parser import seconds as seconds
from .units import UNIT_OPTIONS as UNIT_OPTIONS
from .units import add_unit_options, units_asked


class InputError(Exception):
    """What the user gave cannot be used; the text is the whole message."""


@contextmanager
def user_input(path: str | None = None) -> Iterator[None]:
    """Around whatever judges the user's input, or a file's: its errors are messages."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: {error}" if path else str(error)) from None


# Which schedule: options shared by the commands that make or read one.


def add_schedule_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Which schedule: ``--schedule``, its sizes and costs, and what shapes it."""
    group = parser.add_argument_group("schedule")
    group.add_argument(
        "--schedule",
        required=required,
        metavar="NAME|FILE",
        help=f"{', '.join(_KNOWN)} (the fastest that fits the cap), or a schedule file",
    )
    add_size_options(group)
    add_shape_options(
        group,
        f"for {taking('takes_memory_cap')}; with --offload for all, of what stays on the device",
        f"for {taking('takes_group_size')}",
    )
    add_offload_options(parser)


def add_size_options(group: argparse._ActionsContainer, *, required: bool = False) -> None:
    """Ranks, microbatches and chunks, and what the passes cost."""
    group.add_argument("--pp", type=positive, required=required, metavar="P", help="pipeline ranks")
    group.add_argument(
        "--microbatches",
        type=positive,
        required=required,
        metavar="M",
        help="microbatches of one iteration",
    )
    group.add_argument("--chunks", type=positive, metavar="V", help="model chunks per rank")
    add_unit_options(group)
    group.add_argument(
        "--cost", metavar="F,B,W[,HOP]", help="times per rank and microbatch (default 1,1,1,0)"
    )
    group.add_argument("--hop", metavar="T", help="latency of one transfer between ranks")
    group.add_argument(
        "--stage-cost",
        metavar="FILE",
        help='pass times of every stage, as JSON {"stages": [[F, B, W], ...]}; '
        '"exchange": [[F, B], ...] adds the all-to-alls of experts in these',
    )
    group.add_argument(
        "--exchange",
        metavar="F,B",
        help="part of F's and of B's time that is spent in all-to-alls of experts, with only "
        "the network busy",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="run forward and backward passes in pairs that hide --exchange, as training does with "
        "--overlap-moe-expert-parallel-comm",
    )
    group.add_argument(
        "--vocabulary",
        metavar="S,T,E,G[,T]",
        help="shard the vocabulary over all ranks: times of a rank's part of the output layer (S, "
        "T) and embedding (E, G) per microbatch, and the latency of a collective; the other costs "
        "are then those without vocabulary layers",
    )
    group.add_argument(
        "--vocabulary-barriers",
        type=int,
        choices=(1, 2),
        help="collectives between the last stage's F and B: 1 (default) computes the input "
        "gradient in S, 2 in T",
    )


def add_shape_options(group: argparse._ActionsContainer, cap_use: str, group_use: str) -> None:
    """What shapes a generated schedule: memory cap, group size, objective, effort.

    Args:
        cap_use, group_use: what the command uses the cap and the group size for.
    """
    group.add_argument(
        "--memory-cap",
        metavar="X",
        help=f"most activation memory, as a fraction of 1F1B's peak; {cap_use}",
    )
    group.add_argument(
        "--group-size",
        type=positive,
        metavar="G",
        help=f"microbatches per group, ceil(P/2) to P (default P); {group_use}",
    )
    group.add_argument(
        "--objective",
        type=lambda text: "span" if text == "rank-span" else text,
        choices=("makespan", "span"),
        metavar="{makespan,rank-span}",
        help="minimize the iteration time (makespan, default), or the longest span of a rank, for "
        "optimizer post-validation; for generated schedules",
    )
    group.add_argument(
        "--effort",
        type=effort_of,
        metavar="SECONDS",
        help="approximate search time of a V schedule at unequal costs, on one core (default 1); "
        "counted in passes tried, so every machine finds the same order",
    )


def add_offload_options(parser: argparse.ArgumentParser) -> None:
    """Which activation sets leave the device, and how."""
    group = parser.add_argument_group("offload of activations to the host")
    group.add_argument(
        "--offload",
        metavar="WHAT",
        help="chunks of each rank to offload, longest lifespan first: half, full (all) or N; auto: "
        "what the link carries without a stall; off",
    )
    group.add_argument(
        "--offload-time",
        metavar="T[,T2]",
        help="transfer time of one activation set to the host, and back (default the same), as a "
        "fraction of its chunk's F+B+W (PipeOffload's k is T + T2); a list, such as 0.25x7:1.5, "
        "has one number per rank or stage (xN: N equal ones)",
    )
    group.add_argument(
        "--offload-transfer",
        choices=POLICIES,
        help=f"single: one copy stream; dual: one per direction; paired: two neighbours that share "
        f"a switch never copy in the same direction at once (default {DEFAULT_POLICY})",
    )


def offloads(args: argparse.Namespace) -> bool:
    """True if ``--offload`` asks for it.

    Raises:
        InputError: its options are incomplete, or are there without it.
    """
    asked = args.offload not in (None, "off")
    if asked and args.offload_time is None:
        raise InputError(
            f"--offload {args.offload} needs --offload-time T too, the time of one activation set "
            "to the host as a fraction of its chunk's F+B+W, such as 0.25"
        )
    for option in ("offload_time", "offload_transfer"):
        if getattr(args, option) is not None and not asked:
            raise InputError(
                f"{flag_of(option)} {getattr(args, option)} is for --offload; give both"
            )
    return asked


_KNOWN = (*NAMES, AUTO)


def taking(option: str) -> str:
    """The schedules that have an option of ``Generator``'s ``takes_...``, in words."""
    return " and ".join([*takers(option), *([AUTO] if option == "takes_memory_cap" else [])])


def is_file(name: str) -> bool:
    """True if ``--schedule`` names a file, not a generator."""
    return name not in _KNOWN and (
        name == "-" or name.endswith((".json", ".csv")) or os.sep in name or Path(name).is_file()
    )


def costs_of(args: argparse.Namespace, base: Costs) -> Costs:
    """``base`` with the costs that options give in its place."""
    with user_input():
        if args.cost is not None:
            given = Costs.parse(args.cost, args.hop)
            base = replace(given, vocabulary=base.vocabulary, exchange=base.exchange)
        elif args.hop is not None:
            base = replace(base, hop=Costs.of(hop=args.hop).hop)
        if args.stage_cost is not None:
            base = with_stage_file(base, args.stage_cost)
        if args.exchange is not None:
            base = base.with_exchange([args.exchange.split(",")])
        elif args.overlap and base.exchange is None:
            raise InputError("--overlap hides the communication of --exchange F,B; give both")
        if args.vocabulary is None:
            if args.vocabulary_barriers is not None:
                raise InputError("--vocabulary-barriers is for --vocabulary; give both")
            return base
        return base.with_vocabulary(args.vocabulary.split(","))


def load(path: str) -> Schedule:
    """The schedule in a file, not yet checked; ``-`` is JSON on standard input."""
    with user_input():
        return load_file(path) if path != "-" else read_schedule(sys.stdin.read(MOST_BYTES), path)


def verify(schedule: Schedule) -> CheckReport:
    """``check`` of what a file holds; one without a single backward pass is for evaluation."""
    schedule.costs.durations(schedule.placement)  # per-stage costs must fit the number of stages
    return check(schedule, forward_only=schedule.is_forward_only)


def schedule_of(args: argparse.Namespace) -> Schedule:
    """The schedule that ``--schedule``, a name or a file, and its options ask for."""
    spec = spec_of(args)
    if spec.order is not None and args.offload == "off":
        spec = replace(spec, order=spec.order.compute())
    with user_input():
        try:
            schedule = select(spec).schedule
        except CapExceeded as error:
            raise InputError(
                f"{error.what}; raise --memory-cap to {error.enough}, or give another --schedule"
            ) from None
    refuse_large(schedule)
    return schedule


def spec_of(args: argparse.Namespace) -> ScheduleSpec:
    """What ``--schedule`` and the options ask the selector for."""
    asked = offloads(args)
    if is_file(args.schedule):
        order = _from_file(args.schedule, args)
        spec = ScheduleSpec(args.schedule, order.pp, order.microbatches, order=order)
    else:
        _check_name(args, asked)
        spec = sizes_of(args, args.schedule)
    return replace(spec, offload=offload_of(args, spec.pp)) if asked else spec


def sizes_of(args: argparse.Namespace, name: str) -> ScheduleSpec:
    """``name`` with the sizes, costs, cap and objective that the options have."""
    with user_input():
        effort = default_effort() if args.effort is None else args.effort
        slices, shares = units_asked(args, args.microbatches)
    return ScheduleSpec(
        name,
        args.pp,
        args.microbatches,
        args.chunks,
        replace(costs_of(args, getattr(args, "costs", Costs())), units=shares),
        memory_cap(args),
        args.group_size,
        objective=args.objective or "makespan",
        effort=effort,
        jitter=getattr(args, "jitter", None) or Fraction(0),
        barriers=0 if args.vocabulary is None else args.vocabulary_barriers or 1,
        overlap=args.overlap,
        slices=slices,
        joined=args.slice_weights == "joined",
        reorder=args.reorder_microbatches,
    )


def offload_of(args: argparse.Namespace, pp: int) -> OffloadSpec:
    """The request of ``--offload``, ``--offload-time`` and ``--offload-transfer``."""
    policy = args.offload_transfer or DEFAULT_POLICY
    try:
        return OffloadSpec(args.offload, Link.parse(pp, args.offload_time, policy))
    except ValueError as error:
        raise InputError(f"--offload-time {shown(args.offload_time)}: {error}") from None


def refuse_others(args: argparse.Namespace, what: str, taken: Collection[str]) -> None:
    """Refuse every option of the command that ``what``, one of its modes, does not take.

    Args:
        args: as the command's parser gives them.
        what: the mode, as the user asks for it.
        taken: names of its options' values.
    """
    for name, option in args.declared.items():
        value = getattr(args, name)
        if name not in taken and value != option.default:
            given = option.flag if value is True else f"{option.flag} {value}"
            raise InputError(f"{given} is not for {what}; leave {option.flag} out")


def refuse_large(schedule: Schedule) -> None:
    """Costs beyond what floats show are an error."""
    costs = schedule.costs
    if max(costs.hop, *costs.per_rank_work(schedule.placement)) > _LARGEST_COST:
        raise InputError(
            f"F+B+W of a microbatch and the hop must not exceed {_LARGEST_COST:.0e}; "
            "give the costs in another unit"
        )


_LARGEST_COST = 10**12  # beyond, times no longer fit the floats that they are printed as


def _check_name(args: argparse.Namespace, offload: bool) -> None:
    """Refuse a schedule that is not known, lacks its sizes, or does not take an option."""
    if args.schedule not in _KNOWN:
        raise InputError(
            f"unknown schedule {args.schedule!r}; give one of {', '.join(_KNOWN)}, or a file"
            + meant(args.schedule, _KNOWN)
        )
    missing = [f"--{o}" for o in ("pp", "microbatches") if getattr(args, o) is None]
    if missing:
        raise InputError(f"--schedule {args.schedule} needs {' and '.join(missing)} too")
    for option in ("memory_cap", "group_size"):
        if option == "memory_cap" and (offload or args.schedule == AUTO):
            continue  # every schedule has one with offload
        if getattr(args, option) is not None and args.schedule not in takers(f"takes_{option}"):
            flag, some = flag_of(option), taking(f"takes_{option}")
            raise InputError(
                f"{flag} {getattr(args, option)} is for {some}, and {args.schedule} has none; "
                f"leave {flag} out, or give another --schedule"
            )


def hint(args: argparse.Namespace) -> str:
    """What the user may have wanted to give as well; empty: nothing."""
    capped = args.schedule in takers("takes_memory_cap")
    if not capped or args.memory_cap is not None or offloads(args):
        return ""
    return (
        f"without --memory-cap {args.schedule} may take all of 1F1B's peak, as v-zb does; "
        "--memory-cap 0.6, for one, saves memory"
    )


def memory_cap(args: argparse.Namespace) -> ShareCap | None:
    """``--memory-cap``, a fraction of 1F1B's peak."""
    with user_input():
        return None if args.memory_cap is None else ShareCap(parse_cap(args.memory_cap))


def _from_file(path: str, args: argparse.Namespace) -> Schedule:
    """A valid schedule read from a file, with the file's costs unless options give others."""
    schedule = load(path)
    for option in ("pp", "microbatches", "chunks"):
        given, holds = getattr(args, option), getattr(schedule, option)
        if given not in (None, holds):
            raise InputError(
                f"--{option} {given} contradicts {path}, which is for {option}={holds}; "
                f"leave --{option} out"
            )
    for option in ("overlap", "reorder_microbatches"):
        if getattr(args, option):
            raise InputError(f"the order in {path} is fixed; leave {flag_of(option)} out")
    for option in ("memory_cap", "group_size", "objective"):
        if getattr(args, option) is not None:
            raise InputError(
                f"{flag_of(option)} {getattr(args, option)} shapes a generated schedule, but the "
                f"order in {path} is fixed; leave {flag_of(option)} out"
            )
    costs = costs_of(args, schedule.costs)
    with user_input(path):
        asked = units_asked(args, schedule.microbatches, schedule.slices)
        if asked.shares is not None:
            costs = replace(costs, units=asked.shares)
            if schedule.arrangement is not None:
                unknown = schedule.arrangement._replace(saved=None)
                schedule = replace(schedule, arrangement=unknown)
        if asked.slices != schedule.slices:
            raise ScheduleError("the order is of whole microbatches; leave --slices out")
        schedule = replace(schedule, costs=costs)
        verify(schedule)
    return schedule


@contextmanager
def output(path: str) -> Iterator[str]:
    """Around writing ``path``: what the system refuses is a message.

    Gives the name to write to. It becomes ``path`` once all is written, so that a full disk leaves
    neither half a file nor none where one was.
    """
    final = Path(path).resolve()
    part = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        mode = final.stat().st_mode if final.exists() else None
        if (mode is not None and not stat.S_ISREG(mode)) or not os.access(final.parent, os.W_OK):
            yield path
            return
        yield str(part)
        if part.exists():
            if mode is not None:
                part.chmod(stat.S_IMODE(mode))
            part.replace(final)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
