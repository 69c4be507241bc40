"""What ``compare`` and ``show`` ask of every schedule, and what each one gives."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction

from ..schedule import AUTO, ScheduleSpec, Selected, select
from ..schedule.costs import Costs
from ..schedule.generators import GENERATORS
from ..schedule.memory_cap import ShareCap
from ..schedule.named import CapExceeded, keeps
from ..schedule.schedule import Schedule
from .common import InputError, offload_of, offloads, sizes_of, spec_of
from .options import GROUPED


def files_of(args: argparse.Namespace) -> dict[str, Schedule]:
    """The files' schedules by path; sizes and costs that no option gives become those of files."""
    found = {}
    for path in args.files:
        # What shapes a schedule is for those that are made here.
        fixed = {"schedule": path, "chunks": None, "memory_cap": None, "group_size": None}
        alone = {"overlap": False, "offload": None}
        alone |= {"reorder_microbatches": False}
        asked = argparse.Namespace(**{**vars(args), **fixed, **alone})
        order = spec_of(asked).order
        if order is None:
            raise InputError(f"{path} is a schedule's name; all of them are compared, give files")
        found[path] = replace(order, name=path)
        args.pp, args.microbatches = order.pp, order.microbatches
    costs = {order.costs for order in found.values()}
    if len(costs) > 1:
        raise InputError(f"{', '.join(found)} have different costs; give --cost")
    args.costs = costs.pop() if costs else Costs()
    return found


def refuse_sizes(args: argparse.Namespace) -> None:
    """Refuse sizes for which no schedule can be compared, or none."""
    missing = [f"--{o}" for o in ("pp", "microbatches") if getattr(args, o) is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)}, or a file")
    if args.pp < 2:
        raise InputError(f"a pipeline needs at least 2 ranks, got --pp {args.pp}; give 2 or more")
    least = -(-args.pp // 2)
    if args.group_size is not None and not least <= args.group_size <= args.pp:
        raise InputError(
            f"--group-size {args.group_size} is for {GROUPED}, which at pp={args.pp} takes "
            f"{least} (p/2 rounded up) to {args.pp} (p); give one of those"
        )


def asked_of(args: argparse.Namespace) -> ScheduleSpec:
    """What the options ask of any schedule."""
    return replace(
        sizes_of(args, AUTO), offload=offload_of(args, args.pp) if offloads(args) else None
    )


def fitted(asked: ScheduleSpec, name: str, order: Schedule | None = None) -> tuple[Selected, bool]:
    """A schedule, even if more stays on a device than the cap allows, and whether that is so.

    Args:
        asked: of any schedule.
        name: a generated one, or any name of ``order``.
        order: of a file.

    Raises:
        ValueError: it does not exist for these sizes.
    """
    spec = asked.of(name) if order is None else replace(asked, name=name, order=order)
    if order is not None or not GENERATORS[name].takes_group_size:
        spec = replace(spec, group_size=None)
    cap = spec.cap
    if cap is not None and spec.offload is None:
        cap.sets(spec.placement, spec.splits_backward)  # refuses what no set fits in
        spec = spec.order_alone() if order is None else replace(spec, cap=None)
        if isinstance(spec.cap, ShareCap):  # 1F1B's peak is the largest cap there is
            spec = replace(spec, cap=ShareCap(min(spec.cap.share, Fraction(1))))
    try:
        found = select(spec)
    except CapExceeded as error:
        found = error.selected
    return found, cap is not None and not keeps(cap, found.schedule)
