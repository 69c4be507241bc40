"""A schedule and its offload together, so that what stays on the device keeps a memory cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from .generators import AUTO, GENERATORS
from .generators.cap import v_cap_limits
from .link import Link
from .memory_cap import cap_sets
from .offload import OffloadPlan, offload
from .schedule import Schedule

NO_CAP: tuple[None] = (None,)  # the caps to try of a schedule that takes none


class CapNotKept(ValueError):
    """More stays on a device than the cap allows.

    Attributes:
        plan: what came closest.
        what: the numbers, as half a sentence.
        needed: the cap that ``plan`` keeps, as a fraction of 1F1B's peak, rounded up to 1e-4.
    """

    def __init__(self, plan: OffloadPlan, wanted: str | int, cap: int) -> None:
        schedule, most = plan.schedule, max(plan.peak_sets)
        self.plan = plan
        self.what = (
            f"{schedule.name} at pp={schedule.pp} with offload {wanted} keeps {most} activation "
            f"sets on a device, but the cap is {cap}"
        )
        share = Fraction(most, schedule.pp * schedule.chunks)
        self.needed = f"{math.ceil(share * 10**4) / 10**4:g}"  # rounded down, it would not do
        super().__init__(
            f"{self.what}; raise the cap to {self.needed} of 1F1B's peak, or use another schedule"
        )


def caps_to_try(name: str, pp: int, chunks: int, cap: Fraction | None) -> Sequence[int | None]:
    """What ``name`` may be generated for, so that with offload it keeps ``cap``; rising.

    Args:
        name: a schedule's name, or ``auto``.
        pp: pipeline ranks.
        chunks: model chunks per rank; of ``auto``, those in whose sets it takes its cap.
        cap: a fraction of 1F1B's peak; None: there is none.

    Returns:
        Caps in activation sets, up to 1F1B's peak or, of ``auto``, ``cap`` if that is more;
        ``NO_CAP`` if none is to be given.

    Raises:
        ValueError: ``cap`` is less than one set.
    """
    if cap is None or (name != AUTO and not GENERATORS[name].takes_memory_cap):
        return NO_CAP
    sets = cap_sets(cap, pp, chunks)
    if name == AUTO:
        return range(sets, max(sets, pp * chunks) + 1)
    least, most = v_cap_limits(pp)
    return range(min(max(sets, least), most), most + 1)


def generate_offloaded(
    make: Callable[[int | None], Schedule],
    link: Link,
    wanted: str | int = "auto",
    *,
    cap: Fraction | None = None,
    caps: Sequence[int | None] = NO_CAP,
) -> OffloadPlan:
    """A schedule offloaded so that what stays on the device keeps ``cap``.

    More memory makes a schedule faster. So one that takes a cap is made for the largest of ``caps``
    at which offload still brings it under ``cap``.

    Args:
        make: the schedule for a cap in activation sets, or for None; ValueError if there is none.
        link: the transfer times of every rank.
        wanted: which sets leave, as ``offload``'s ``chunks``.
        cap: the most that may stay on any device, as a fraction of 1F1B's peak; None: no limit.
        caps: what ``make`` is called with, rising; see ``caps_to_try``.

    Returns:
        The plan; its schedule's ``note`` tells what ``make`` and offload say.

    Raises:
        CapNotKept: more than ``cap`` stays, whatever ``make`` is called with.
        ValueError: ``make`` has no schedule for any of ``caps``, ``cap`` is less than one set of
            the schedule, or ``wanted`` is out of range.
    """
    best: OffloadPlan | None = None
    too_small: ValueError | None = None
    too_large: ValueError | None = None
    low, high = 0, len(caps) - 1
    while low <= high:
        middle = (low + high + 1) // 2
        try:
            schedule = make(caps[middle])
        except ValueError as error:
            too_small, low = error, middle + 1
            continue
        try:
            best, low = _within(schedule, link, wanted, cap), middle + 1
        except ValueError as error:
            too_large, high = error, middle - 1
    if best is not None:
        return best
    # The last one too large is the smallest that can be made.
    raise too_large or too_small or ValueError("no caps to try")


def _within(schedule: Schedule, link: Link, wanted: str | int, cap: Fraction | None) -> OffloadPlan:
    """``schedule`` offloaded; the cap counts in its own sets, whose size its chunks decide."""
    sets = None if cap is None else cap_sets(cap, schedule.pp, schedule.chunks)
    plan = offload(schedule, link, wanted, most_sets=sets)
    note = "; ".join(filter(None, (schedule.note, plan.note)))
    plan = replace(plan, schedule=replace(plan.schedule, note=note))
    if sets is not None and max(plan.peak_sets) > sets:
        raise CapNotKept(plan, wanted, sets)
    return plan
