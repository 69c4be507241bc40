"""Shared by the commands: what the options of schedules ask for, input errors, output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from .._input import MOST_BYTES, flag_of, meant, shown
from ..schedule import (
    AUTO,
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
from ..schedule.io import load as load_file
from ..schedule.io import read as read_schedule
from ..schedule.memory_cap import ShareCap, parse_cap
from ..schedule.named import CapExceeded
from .options import KNOWN, takers, taking
from .parser import JSON as JSON
from .parser import InputError as InputError
from .parser import InvalidSchedule
from .parser import Options as Options
from .parser import Parser as Parser
from .parser import positive as positive
from .units import units_asked


@contextmanager
def user_input(path: str | None = None) -> Iterator[None]:
    """Around whatever judges the user's input, or a file's: its errors are messages."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: {error}" if path else str(error)) from None


def offloads(args: argparse.Namespace) -> bool:
    """True if ``--offload`` asks for it.

    Raises:
        InputError: its options are incomplete.
    """
    asked = args.offload not in (None, "off")
    if asked and args.offload_time is None:
        raise InputError(
            f"--offload {args.offload} needs --offload-time T too, the time of one activation set "
            "to the host as a fraction of its chunk's F+B+W, such as 0.25"
        )
    return asked


def is_file(name: str) -> bool:
    """True if ``--schedule`` names a file, not a generator."""
    return name not in KNOWN and (
        name == "-" or name.endswith(".json") or os.sep in name or Path(name).is_file()
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
        return base if args.vocabulary is None else base.with_vocabulary(args.vocabulary.split(","))


def load(path: str) -> Schedule:
    """The schedule in a file, not yet checked; ``-`` is JSON on standard input."""
    with user_input():
        return load_file(path) if path != "-" else read_schedule(sys.stdin.read(MOST_BYTES), path)


def verify(schedule: Schedule) -> CheckReport:
    """The check of what a file holds; one without a single backward pass is for evaluation."""
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
    """``name`` with the sizes, costs and cap that the options have."""
    with user_input():
        slices, shares = units_asked(args, args.microbatches)
    return ScheduleSpec(
        name,
        args.pp,
        args.microbatches,
        args.chunks,
        replace(costs_of(args, getattr(args, "costs", Costs())), units=shares),
        memory_cap(args),
        args.group_size,
        barriers=int(args.vocabulary is not None),
        overlap=args.overlap,
        slices=slices,
        reorder=args.reorder_microbatches,
    )


def offload_of(args: argparse.Namespace, pp: int) -> OffloadSpec:
    """The request of ``--offload`` and ``--offload-time``."""
    try:
        return OffloadSpec(args.offload, Link.parse(pp, args.offload_time))
    except ValueError as error:
        raise InputError(f"--offload-time {shown(args.offload_time)}: {error}") from None


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
    if args.schedule not in KNOWN:
        raise InputError(
            f"unknown schedule {args.schedule!r}; give one of {', '.join(KNOWN)}, or a file"
            + meant(args.schedule, KNOWN)
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
    for option in ("memory_cap", "group_size"):
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
            raise InputError(f"{path}: the order is of whole microbatches; leave --slices out")
        schedule = replace(schedule, costs=costs)
        try:
            verify(schedule)
        except ScheduleError as error:
            raise InvalidSchedule(f"{path}: {error}") from None
    return schedule


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Around writing ``path``: what the system refuses is a message."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
