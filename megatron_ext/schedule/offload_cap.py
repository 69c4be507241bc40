"""A schedule and its offload together, so that what stays on the device keeps a memory cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from .costs import Costs
from .generators import GENERATORS, NAMES, Objective, generate
from .generators.auto import costs_for, simplest_first, time_taken
from .generators.cap import v_cap_limits
from .link import Link
from .memory_cap import cap_sets
from .passes.offload import OffloadPlan, offload
from .schedule import Schedule
from .simulate import simulate

Make = Callable[[int | None], Schedule]  # for a cap in activation sets, or None

NO_CAP: tuple[None] = (None,)  # the caps to try of a schedule that takes none


class CapNotKept(ValueError):
    """More stays on a device than the cap allows.

    Attributes:
        plan: what came closest.
        what: the numbers, as half a sentence.
        share: the cap that ``plan`` keeps, as a fraction of 1F1B's peak.
        needed: the same as text, rounded up to 1e-4.
    """

    def __init__(self, plan: OffloadPlan, wanted: str | int, cap: int) -> None:
        schedule, most = plan.schedule, max(plan.peak_sets)
        self.plan = plan
        self.what = (
            f"{schedule.name} at pp={schedule.pp} with offload {wanted} keeps {most} activation "
            f"sets on a device, but the cap is {cap}"
        )
        self.share = Fraction(most, schedule.pp * schedule.chunks)
        self.needed = f"{math.ceil(self.share * 10**4) / 10**4:g}"  # rounded down, it is too little
        super().__init__(
            f"{self.what}; raise the cap to {self.needed} of 1F1B's peak, or use another schedule"
        )


def caps_to_try(name: str, pp: int, cap: Fraction | None) -> Sequence[int | None]:
    """What ``name`` may be generated for, so that with offload it keeps ``cap``; rising.

    Args:
        name: a schedule's name; for ``auto`` there is ``auto_offloaded``.
        pp: pipeline ranks.
        cap: a fraction of 1F1B's peak; None: there is none.

    Returns:
        Caps in activation sets, up to 1F1B's peak; ``NO_CAP`` if none is to be given.

    Raises:
        ValueError: ``cap`` is less than one set.
    """
    if cap is None or not GENERATORS[name].takes_memory_cap:
        return NO_CAP
    least, most = v_cap_limits(pp)
    sets = cap_sets(cap, pp, GENERATORS[name].default_chunks)
    return range(min(max(sets, least), most), most + 1)


def generate_offloaded(
    make: Make,
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
        make: the schedule for one of ``caps``.
        link: the transfer times of every rank.
        wanted: which sets leave, as ``offload``'s ``chunks``.
        cap: the most that may stay on any device, as a fraction of 1F1B's peak; None: no limit.
        caps: what ``make`` is called with, rising, not empty; see ``caps_to_try``.

    Returns:
        The plan; its schedule's ``note`` tells what ``make`` and offload say.

    Raises:
        CapNotKept: more than ``cap`` stays even with the smallest of ``caps``.
        ValueError: of ``make``; or ``cap`` is less than one set of the schedule, or ``wanted`` is
            out of range.
    """
    tried: dict[int, OffloadPlan | ValueError] = {}

    def keeps(index: int) -> bool:
        if index not in tried:
            try:
                tried[index] = _within(make(caps[index]), link, wanted, cap)
            except ValueError as error:
                tried[index] = error
        return isinstance(tried[index], OffloadPlan)

    low, high = -1, len(caps)
    middle = high - 1  # often the largest will do
    while high - low > 1:
        low, high = (middle, high) if keeps(middle) else (low, middle)
        middle = (low + high) // 2
    # Now and then a larger one is easier to offload. There is no time to try all, but a few.
    best = next((i for i in range(min(low + _AHEAD, len(caps) - 1), low, -1) if keeps(i)), low)
    result = tried[max(best, 0)]
    if isinstance(result, ValueError):
        raise result
    return result


_AHEAD = 3  # caps


def family(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    cap: Fraction | None,
    objective: Objective = "makespan",
) -> tuple[Make, Sequence[int | None]]:
    """How ``auto_offloaded`` makes ``name``, and for what: caps, or sizes of its groups.

    Args:
        name, pp, microbatches, costs, objective: as ``generate``.
        chunks: if the family takes any number. Per-stage costs are for this many chunks; families
            with one chunk get the sums.
        cap: as ``generate_offloaded``.

    Returns:
        ``make`` and ``caps`` of ``generate_offloaded``.

    Raises:
        ValueError: ``cap`` is less than one set.
    """
    generator = GENERATORS[name]
    chunks = chunks if generator.any_chunks else generator.default_chunks
    own = costs_for(costs, pp * chunks) or costs
    made = partial(generate, name, pp, microbatches, chunks, own, objective=objective)
    if generator.takes_group_size:
        return (lambda size: made(group_size=size)), range(-(-pp // 2), pp + 1)
    return (lambda sets: made(memory_cap=sets)), caps_to_try(name, pp, cap)


def auto_offloaded(
    pp: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    link: Link,
    wanted: str | int = "auto",
    *,
    cap: Fraction,
    objective: Objective = "makespan",
    names: Sequence[str] = NAMES,
) -> OffloadPlan:
    """The fastest of ``names`` that offload brings under ``cap``; of equally fast, the simpler one.

    Not what ``auto`` takes under a larger cap: how far offload brings a schedule depends on its
    order, not on its memory alone.

    Args:
        pp, microbatches, costs, objective: as ``generate``.
        chunks: as ``family``.
        link, wanted, cap: as ``generate_offloaded``.
        names: of the families that it may choose from.

    Returns:
        The plan; its schedule's ``note`` tells the choice too.

    Raises:
        CapNotKept: none of them keeps it; of the one that needs least.
        ValueError: none of them exists for these numbers.
    """
    tried: list[tuple[Fraction, str, Make, Sequence[int | None]]] = []
    failed: list[ValueError] = []
    for name in simplest_first(names):
        try:
            make, caps = family(name, pp, microbatches, chunks, costs, cap, objective)
            time = time_taken(simulate(make(caps[-1])), objective)
        except ValueError as error:
            failed.append(error)
            continue
        tried.append((time, name, make, caps))
    best: tuple[Fraction, int, OffloadPlan] | None = None
    # Offload makes nothing faster: the first ones that keep the cap are all there is to plan.
    for time, name, make, caps in sorted(tried, key=lambda one: one[0]):
        place = NAMES.index(name)
        if best is not None and (time, place) > best[:2]:
            break
        try:
            plan = generate_offloaded(make, link, wanted, cap=cap, caps=caps)
        except ValueError as error:
            failed.append(error)
            continue
        key = time_taken(simulate(plan.schedule), objective), place
        if best is None or key < best[:2]:
            best = (*key, plan)
    missed = [error for error in failed if isinstance(error, CapNotKept)]
    if best is None:
        raise min(missed, key=lambda error: error.share, default=failed[-1])
    return _with_note(best[2], f"{_why(best[2], best[0], cap, objective, missed)}; {best[2].note}")


def _within(schedule: Schedule, link: Link, wanted: str | int, cap: Fraction | None) -> OffloadPlan:
    """``schedule`` offloaded; the cap counts in its own sets, whose size its chunks decide."""
    sets = None if cap is None else cap_sets(cap, schedule.pp, schedule.chunks)
    plan = offload(schedule, link, wanted, most_sets=sets)
    plan = _with_note(plan, "; ".join(filter(None, (schedule.note, plan.note))))
    if sets is not None and max(plan.peak_sets) > sets:
        raise CapNotKept(plan, wanted, sets)
    return plan


def _with_note(plan: OffloadPlan, note: str) -> OffloadPlan:
    return replace(plan, schedule=replace(plan.schedule, note=note))


def _why(
    plan: OffloadPlan, time: Fraction, cap: Fraction, objective: Objective, missed: list[CapNotKept]
) -> str:
    """Why auto takes ``plan``; ``missed`` are those that were looked at before."""
    name, pp = plan.schedule.name, plan.schedule.pp
    text = (
        f"{name} is the fastest that offload brings under {float(cap * pp):.4g} microbatches of "
        f"activations per rank: {objective} {float(time):.4g}"
    )
    if missed:
        least = (f"{e.plan.schedule.name} ({float(e.share * pp):.4g})" for e in missed)
        text += f"; too large even so: {', '.join(least)}"
    return text
