"""The selector: from a request to a schedule, with its offload, and the reason for it.

The command line, training, the planner and re-planning for measured costs all call ``select``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property

from .costs import Costs, merged
from .effects import peak_sets
from .generators import (
    GENERATORS,
    NAMES,
    Objective,
    add_pairs,
    check_sizes,
    default_effort,
    generate,
)
from .generators.cap import LEAST_CAP, v_cap_limits
from .generators.vocabulary import add_vocabulary
from .jitter import jitter
from .link import Link
from .memory_cap import Cap, ShareCap, cap_sets, number_text
from .passes.offload import OffloadPlan, offload
from .placement import Placement
from .schedule import Schedule
from .simulate import Simulation, simulate

AUTO = "auto"  # not a schedule of its own: the fastest that fits

_EQUAL = Costs()

# What a model is placed for: one chunk a rank, or any number of them in Megatron's own order.
ONE_CHUNK: tuple[str, ...] = tuple(
    name
    for name, made in GENERATORS.items()
    if made.placement == "loop" and made.default_chunks == 1 and not made.any_chunks
)
ANY_CHUNKS: tuple[str, ...] = tuple(name for name, made in GENERATORS.items() if made.any_chunks)


@dataclass(frozen=True)
class OffloadSpec:
    """Which activation sets leave the device, and how.

    Attributes:
        wanted: as ``offload``'s ``chunks``.
        link: transfer times of every rank or stage.
    """

    wanted: str | int
    link: Link


@dataclass(frozen=True)
class ScheduleSpec:
    """A request for a schedule.

    Attributes:
        name: a schedule's, or ``auto``: the fastest of ``names`` that keeps ``cap``; of those
            equally fast the first in the registry, or by ``jitter``.
        pp: pipeline ranks, >= 2.
        microbatches: of one iteration, >= 1.
        chunks: model chunks a rank, for ``auto`` of the schedules that take any number (default
            2); None: the schedule's own.
        costs: that the order is made for. Per-stage costs given for more stages than a schedule
            has are summed.
        cap: on every rank. Without offload only ``auto`` and schedules at any cap take one; with
            offload it is on what stays on the device. None: none, for ``auto`` 1F1B's peak.
        group_size: of ``gis``.
        offload: None: nothing leaves the device.
        objective, effort: as ``generate``; at effort 0 passes do not run in pairs.
        names: that ``auto`` may choose from.
        order: what to offload, in place of a generated order (a schedule file).
        times: costs of the passes as they will run, if the order is not made for those.
        overlap: forward and backward passes run in pairs where that is faster (``add_pairs``), by
            the communication that the costs have; in the memory of the cap, else with one set more
            than without pairs. Not of a schedule file, which has its own.
        barriers: of a vocabulary that is sharded over all ranks (``vocabulary``), whose passes'
            times the costs have; 0: it is not sharded. The cap is of the whole schedule.
        jitter: for ``auto``: of schedules equally fast the one with the least mean makespan under
            random pass times of this relative standard deviation (``jitter``); 0: not asked for.
    """

    name: str
    pp: int
    microbatches: int
    chunks: int | None = None
    costs: Costs = _EQUAL
    cap: Cap | None = None
    group_size: int | None = None
    offload: OffloadSpec | None = None
    objective: Objective = "makespan"
    names: tuple[str, ...] = NAMES
    order: Schedule | None = None
    times: Costs | None = None
    effort: float = field(default_factory=default_effort)
    jitter: Fraction = Fraction(0)
    barriers: int = 0
    overlap: bool = False

    @property
    def placement(self) -> Placement:
        """Where the stages of the schedule named lie."""
        if self.order is not None:
            return self.order.placement
        chunks = self.chunks or GENERATORS[self.name].default_chunks
        vee = GENERATORS[self.name].placement == "vee"
        return Placement.vee(self.pp) if vee else Placement.loop(self.pp, chunks)

    @property
    def splits_backward(self) -> bool:
        """True if the schedule named has B and W passes of their own."""
        if self.order is not None:
            return self.order.splits_backward
        return GENERATORS[self.name].split_backward

    def order_alone(self) -> ScheduleSpec:
        """The same without offload, and without a cap that only offload could keep."""
        capped = self.order is None and GENERATORS[self.name].takes_memory_cap
        return replace(self, offload=None, cap=self.cap if capped else None)


@dataclass(frozen=True)
class Selected:
    """The answer to a request.

    Attributes:
        schedule: compute and offload actions; its ``note`` is the reason.
        spec: the request by name, with the options used, also for other numbers of microbatches.
        plan: of the offload; None without.
    """

    schedule: Schedule
    spec: ScheduleSpec
    plan: OffloadPlan | None = None

    @cached_property
    def time(self) -> Fraction:
        """Makespan, or longest span of a rank, in the units of the costs."""
        return time_taken(simulate(self.schedule), self.spec.objective)

    @property
    def place(self) -> tuple[Fraction, int]:
        """Lower is better: the time, then the position in the registry."""
        return self.time, NAMES.index(self.schedule.name)


class CapExceeded(ValueError):
    """A rank would hold more than the cap.

    Attributes:
        what: the numbers, as half a sentence.
        enough: a cap that is enough, as a user gives it.
        selected: what comes closest.
    """

    def __init__(self, what: str, selected: Selected, cap: Cap) -> None:
        self.what, self.selected = what, selected
        self.enough = cap.enough(selected.schedule)
        super().__init__(f"{what}; raise the cap to {self.enough}, or use another schedule")


def select(spec: ScheduleSpec) -> Selected:
    """The schedule that ``spec`` asks for.

    Raises:
        CapExceeded: no schedule that is asked for keeps the cap.
        ValueError: unknown name, or numbers that no schedule exists for.
    """
    if spec.order is None:
        check_sizes(spec.name, spec.pp, spec.microbatches, spec.chunks, spec.objective, (AUTO,))
    if spec.overlap and (spec.offload is not None or spec.barriers):
        what = "a sharded vocabulary" if spec.offload is None else "offload"
        raise ValueError(f"passes do not run in pairs beside {what}; leave out one of them")
    if spec.name == AUTO:
        return _auto(spec, spec.cap or ShareCap(Fraction(1)))
    found = _named(spec)
    if spec.cap is None or isinstance(spec.cap, ShareCap):
        return found
    notes = found.schedule.note, spec.cap.detail(found.schedule)
    return replace(found, schedule=replace(found.schedule, note="; ".join(filter(None, notes))))


def time_taken(run: Simulation, objective: Objective) -> Fraction:
    """What ``objective`` makes short, in the units of the costs."""
    if objective == "makespan":
        return run.makespan
    return Fraction(max(e[-1] - s[0] for s, e in zip(run.start, run.end) if s), run.scale)


def keeps(cap: Cap, schedule: Schedule) -> bool:
    """True if ``schedule`` keeps ``cap``; under offload every cap counts in whole sets."""
    if not schedule.has_offload:
        return cap.fits(schedule)
    return max(peak_sets(schedule.ranks)) <= cap.sets(schedule.placement, schedule.splits_backward)


def placed_alike(spec: ScheduleSpec) -> tuple[str, ...]:
    """The schedules for which a model that is placed for ``spec`` need not change."""
    own = GENERATORS[spec.name]
    return tuple(
        name
        for name, made in GENERATORS.items()
        if (made.placement, made.split_backward) == (own.placement, own.split_backward)
        and by_name(spec, name).placement.chunks == spec.placement.chunks
    )


def by_name(spec: ScheduleSpec, name: str) -> ScheduleSpec:
    """``spec`` for one schedule, with the chunks and the costs of that schedule's stages."""
    made = GENERATORS[name]
    chunks = (spec.chunks or made.default_chunks) if made.any_chunks else made.default_chunks
    costs = merged(spec.costs, spec.pp * chunks) or spec.costs
    return replace(spec, name=name, chunks=chunks, costs=costs)


def _named(spec: ScheduleSpec, *, chosen: bool = True) -> Selected:
    """The schedule of this name, as large as the cap allows: more memory makes it faster.

    Args:
        spec: the request.
        chosen: the user named it; else it is one of those that ``auto`` tries.
    """
    options = _options(spec, chosen)

    @cache
    def attempt(
        index: int, microbatches: int, effort: float = spec.effort
    ) -> Selected | ValueError:
        try:
            each = replace(spec, microbatches=microbatches, effort=effort)
            return _made(each, options[index])
        except ValueError as error:
            return error

    largest = len(options) - 1
    if largest and not spec.effort:
        largest = -1  # the smallest nearly always keeps the cap
    elif largest:
        # Few microbatches have the peaks of many; an offload plan is another with each.
        few = spec.microbatches if spec.offload else min(spec.microbatches, 2 * spec.pp)
        largest = _last(len(options), lambda index: isinstance(attempt(index, few), Selected))
    # Now and then a larger one is easier to offload, or holds fewer bytes with more microbatches.
    # There is no time to try all, but a few.
    tried = range(min(max(largest, 0) + _AHEAD, len(options) - 1), -1, -1)
    plain: list[Selected] = []
    for index in tried if spec.effort else reversed(tried):
        found = attempt(index, spec.microbatches)
        if isinstance(found, Selected):
            return min([found, *plain], key=lambda one: one.time) if plain else found
        failed = found
        if spec.offload is not None and spec.effort and spec.order is None:
            # Fewer sets may leave the device in a searched order than in one that repeats a block.
            quick = attempt(index, spec.microbatches, 0)
            plain += [quick] if isinstance(quick, Selected) else []
    if plain:
        return min(plain, key=lambda one: one.time)
    raise failed


_AHEAD = 3  # options


def _last(count: int, fits: Callable[[int], bool]) -> int:
    """The last of rising options that fits, or -1; the largest comes first, which often does."""
    low, high = -1, count
    middle = high - 1
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    return low


def _options(spec: ScheduleSpec, chosen: bool) -> list[dict[str, int | None]]:
    """Options of ``generate`` with which the schedule may keep the cap, smallest memory first."""
    if spec.order is not None:
        return [{}]
    generator, pp, cap = GENERATORS[spec.name], spec.pp, spec.cap
    if chosen and cap is not None and not (generator.takes_memory_cap or spec.offload):
        raise ValueError(
            f"the memory of {spec.name} is fixed and takes no memory cap, got {cap.amount(pp)}; "
            "use v-cap or auto for a cap, or offload"
        )
    if generator.takes_group_size and cap is not None and spec.group_size is None:
        least = -(-pp // 2) + (not chosen)  # the least of all is gis-h, which auto tries too
        return [{"group_size": size} for size in range(least, pp + 1)]
    if not generator.takes_memory_cap or cap is None:
        return [{"group_size": spec.group_size}]
    low, high = v_cap_limits(pp)
    if spec.offload is None and not spec.barriers:
        low = LEAST_CAP  # slow, but all that fits there
    most = cap.most_sets(spec.placement)
    if chosen and spec.offload is None and isinstance(cap, ShareCap) and cap.growth == 1:
        return [{"memory_cap": most}]  # as the user gives it, or an error
    try:
        least = cap.sets(spec.placement, generator.split_backward)
    except ValueError:
        least = low
    # An order need not hold its cap on every rank, so one more set may fit.
    least, most = (min(max(sets, low), high) for sets in (least, most + 1))
    return [{"memory_cap": x} for x in range(least, (high if spec.offload else most) + 1)]


def _generated(spec: ScheduleSpec, option: dict[str, int | None]) -> Schedule:
    """The order with these options, for the costs."""
    cap, growth = option.get("memory_cap"), None
    if spec.barriers and cap is not None:
        # Vocabulary passes take what is between the generator's cap and the one asked for.
        base = max(v_cap_limits(spec.pp)[0], cap - spec.placement.chunks * spec.barriers)
        cap, growth = base, cap - base
    schedule = generate(
        spec.name,
        spec.pp,
        spec.microbatches,
        spec.chunks,
        spec.costs,
        group_size=option.get("group_size"),
        memory_cap=cap,
        objective=spec.objective,
        effort=spec.effort,
        sets_grow=spec.cap is not None and spec.cap.sets_grow,
    )
    if spec.overlap and spec.effort:
        schedule = add_pairs(schedule, _pair_sets(spec, schedule, cap))
    if not spec.barriers:
        return schedule
    return add_vocabulary(schedule, spec.barriers, growth, quick=not spec.effort)


def _pair_sets(spec: ScheduleSpec, schedule: Schedule, cap: int | None) -> int | None:
    """Most activation sets of an order with pairs; None: what such an order takes by default."""
    if cap is not None or spec.cap is None:
        return cap
    held = max(peak_sets(schedule.ranks))
    return max(held, min(held + 1, spec.cap.most_sets(schedule.placement)))


def _made(spec: ScheduleSpec, option: dict[str, int | None]) -> Selected:
    """The schedule with these options, and with its offload.

    Raises:
        CapExceeded: it does not keep the cap.
        ValueError: it does not exist.
    """
    name, cap = spec.name, spec.cap
    schedule = spec.order or _generated(spec, option)
    if spec.times is not None:
        schedule = replace(schedule, costs=spec.times)
    if spec.offload is None:
        sets, own_cap = option.get("memory_cap"), None
        if sets is not None and cap is not None:
            share = Fraction(sets, schedule.placement.num_stages)
            own_cap = ShareCap(share, in_bytes=cap.sets_grow)
        own = replace(spec, group_size=option.get("group_size"), cap=own_cap)
        made = Selected(schedule, own)
        if cap is not None and spec.order is None and not cap.fits(schedule):
            what = f"{name} at pp={spec.pp} with {spec.microbatches} microbatches"
            what += f" does not fit in {cap.amount(spec.pp)}: it takes {cap.taken(schedule)}"
            what += cap.binding(schedule)
            raise CapExceeded(what, made, cap)
        return made
    wanted = spec.offload.wanted
    most = None if cap is None else cap.sets(schedule.placement, schedule.splits_backward)
    plan = offload(schedule, spec.offload.link, wanted, most_sets=most)
    note = "; ".join(filter(None, (schedule.note, plan.note)))
    made = Selected(replace(plan.schedule, note=note), spec, plan)
    if cap is not None and most is not None and max(plan.peak_sets) > most:
        raise CapExceeded(
            f"{schedule.name} at pp={spec.pp} with offload {wanted} keeps {max(plan.peak_sets)} "
            f"activation sets on a device, but the cap is {most}",
            made,
            cap,
        )
    return made


def _auto(spec: ScheduleSpec, cap: Cap) -> Selected:
    """The fastest of ``spec.names`` that keeps ``cap``."""
    if spec.group_size is not None:
        raise ValueError(f"auto chooses the group size itself, got {spec.group_size}; leave it out")
    if spec.chunks is not None and spec.chunks < 1:
        raise ValueError(f"auto needs at least 1 chunk per rank, got {spec.chunks}")
    if isinstance(cap, ShareCap) and spec.offload is None:
        cap_sets(cap.share, spec.pp, spec.chunks or 2)  # refuses what no set fits in
    spec = replace(spec, cap=cap)
    found: list[Selected] = []
    missed: list[CapExceeded] = []
    failed: list[ValueError] = []
    for bound, name in _by_bound(spec, failed):
        if found and (bound, NAMES.index(name)) > min(one.place for one in found):
            break
        try:
            found.append(_named(by_name(spec, name), chosen=False))
        except CapExceeded as error:
            missed.append(error)
        except ValueError as error:
            failed.append(error)
    if not found:
        if not missed:
            raise failed[-1]
        least = min(missed, key=lambda error: cap.needed(error.selected.schedule))
        if spec.offload is not None:
            raise least
        which = "no schedule" if len(spec.names) == len(NAMES) else f"none of {_list(spec)}"
        smallest = least.selected.schedule
        raise CapExceeded(
            f"{which} at pp={spec.pp} with {spec.microbatches} microbatches fits a cap of "
            f"{cap.amount(spec.pp)}; the least of all is {cap.taken(smallest)} "
            f"({smallest.name}){cap.binding(smallest)}",
            least.selected,
            cap,
        )
    best = _steadiest(spec, sorted(found, key=lambda one: one.place))
    return replace(best, schedule=replace(best.schedule, note=_why(spec, cap, best, found, missed)))


def _steadiest(spec: ScheduleSpec, found: Sequence[Selected]) -> Selected:
    """The first of ``found``, by place, or of those as fast the best under jitter."""
    equal = [one for one in found if one.time == found[0].time]
    if len(equal) == 1 or not spec.jitter:
        return found[0]
    return min(equal, key=lambda one: jitter(one.schedule, spec.jitter).mean)


def _by_bound(spec: ScheduleSpec, failed: list[ValueError]) -> list[tuple[Fraction, str]]:
    """``spec.names`` with lower bounds of their times, least first, in the registry's order.

    Offload makes no schedule faster, and plans take long: the first ones that keep the cap are all
    there is to plan. Without offload there is no bound.
    """
    names = sorted(spec.names, key=NAMES.index)
    if spec.offload is None:
        return [(Fraction(0), name) for name in names]
    bounds = []
    for name in names:
        own = by_name(spec, name)
        try:
            option = _options(own, False)[-1]
            bounds.append((_made(replace(own, offload=None, cap=None), option).time, name))
        except ValueError as error:
            failed.append(error)
    return sorted(bounds, key=lambda one: one[0])


def _why(
    spec: ScheduleSpec,
    cap: Cap,
    best: Selected,
    found: Sequence[Selected],
    missed: Sequence[CapExceeded],
) -> str:
    """Why auto takes ``best``; ``found`` keep the cap, ``missed`` do not."""
    schedule, amount = best.schedule, cap.amount(spec.pp)
    if spec.offload is None:
        of = str(len(found)) if len(spec.names) == len(NAMES) else _list(spec)
        parts = [f"{schedule.name} is the fastest of {of} that fit in {amount}"]
    else:
        parts = [f"{schedule.name} is the fastest that offload brings under {amount}"]
    parts[0] += f": {spec.objective} {number_text(best.time)}, {cap.detail(schedule)}"
    others = [one for one in found if one is not best]
    if others and spec.offload is None:
        second = min(others, key=lambda one: one.time)
        more = second.time / best.time - 1
        equal = "as fast, but less robust" if spec.jitter else "as fast, but less simple"
        how = equal if not more else f"{float(more):.1%} slower"
        parts.append(f"next is {second.schedule.name}, {how}")
    if missed:
        even = "" if spec.offload is None else " even so"
        each = (error.selected.schedule for error in missed)
        sizes = ", ".join(f"{one.name} ({cap.taken(one)})" for one in each)
        parts.append(f"too large{even}: {sizes}")
    return "; ".join([*parts, *filter(None, [schedule.note])])


def _list(spec: ScheduleSpec) -> str:
    return ", ".join(spec.names)
