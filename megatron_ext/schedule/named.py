"""The schedule of one name, as large as a cap allows, with its offload.

``select`` asks here for the name that a request has, or for each that ``auto`` tries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

from .costs import Costs
from .effects import peak_sets
from .generators import GENERATORS, NAMES, generate, generated_by
from .generators.cap import LEAST_CAP, loosened, v_cap_limits
from .generators.request import Request
from .generators.vocabulary import add_vocabulary
from .memory_cap import Cap, ShareCap, number_text
from .passes.join import join
from .passes.offload import OffloadPlan, offload
from .schedule import Schedule
from .simulate import simulate
from .spec import ScheduleSpec


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
        """Makespan in the units of the costs."""
        with generated_by(self.schedule.name):
            return simulate(self.schedule).makespan

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


def keeps(cap: Cap, schedule: Schedule) -> bool:
    """True if ``schedule`` keeps ``cap``; under offload every cap counts in whole sets."""
    if not schedule.has_offload:
        return cap.fits(schedule)
    return held_sets(schedule) <= cap.sets(schedule.placement, schedule.splits_backward)


def held_sets(schedule: Schedule) -> Fraction:
    """The most sets of a rank; slices count as their shares."""
    return max(schedule.peak_activation()) * schedule.chunks


def named(spec: ScheduleSpec, *, chosen: bool = True) -> Selected:
    """The schedule of this name, as large as the cap allows, with its offload: more memory makes it
    faster.

    Args:
        spec: the request.
        chosen: the user named it; else it is one of those that ``auto`` tries.
    """
    found: list[Selected] = []
    failed = None
    try:
        found.append(_as_large(spec, chosen))
    except ValueError as error:
        failed = error
    found += _loosened(spec)
    if not found:
        assert failed is not None
        raise failed
    return _fastest(found)


def _loosened(spec: ScheduleSpec) -> list[Selected]:
    """The fastest of the ``loosened`` orders that offload brings under the cap, if one is."""
    takes = spec.order is None and GENERATORS[spec.name].takes_memory_cap
    if not takes or spec.offload is None or spec.cap is None or not spec.effort:
        return []
    if spec.barriers or spec.has_units:
        return []
    placement, m, costs = spec.placement, spec.microbatches, spec.costs
    order = Schedule(spec.name, placement, m, (), costs)
    request = Request(placement, m, costs.durations(placement).reduced(), effort=0)
    for ranks in loosened(request):
        try:
            made = _made(replace(spec, order=order.with_ranks(ranks)), _Option())
        except ValueError:
            continue
        return [replace(made, spec=spec)]
    return []


def _as_large(spec: ScheduleSpec, chosen: bool) -> Selected:
    """The largest order of the name that keeps the cap."""
    options = _options(spec, chosen)
    # Every order of such a name keeps its block's memory, so its block says whether it fits.
    looks = spec.has_units and not (spec.offload or spec.cap is None or spec.order)
    looks = looks and not GENERATORS[spec.name].takes_memory_cap

    @cache
    def attempt(
        index: int, microbatches: int, effort: float = spec.effort, published: bool = False
    ) -> Selected | ValueError:
        if looks and effort:
            block = attempt(index, microbatches, 0)
            if isinstance(block, CapExceeded):
                return block
        try:
            each = replace(spec, microbatches=microbatches, effort=effort)
            if published:
                each = replace(each, costs=Costs(), times=spec.times or spec.costs)
            return _made(each, options[index])
        except ValueError as error:
            return error

    largest = len(options) - 1
    if largest and not spec.effort:
        largest = -1  # the smallest nearly always keeps the cap
    elif largest:
        # Few microbatches have the peaks of many; an offload plan is another with each.
        whole = spec.offload is not None or spec.has_units
        few = spec.microbatches if whole else min(spec.microbatches, 2 * spec.pp)
        tried_for = 0 if looks else spec.effort
        largest = _last(
            len(options), lambda index: isinstance(attempt(index, few, tried_for), Selected)
        )
    # Now and then a larger one is easier to offload.
    # There is no time to try all, but a few.
    tried = range(min(max(largest, 0) + _AHEAD, len(options) - 1), -1, -1)
    plain: list[Selected] = []
    for index in tried if spec.effort else reversed(tried):
        found = attempt(index, spec.microbatches)
        if isinstance(found, Selected):
            return _fastest([found, *plain])
        failed = found
        if spec.offload and not (spec.order or spec.barriers or spec.has_units):
            # Fewer sets may leave the device in a searched order than in the published one.
            known = attempt(index, spec.microbatches, published=True)
            plain += [replace(known, spec=spec)] if isinstance(known, Selected) else []
    if plain:
        return _fastest(plain)
    raise failed


def _fastest(found: Sequence[Selected]) -> Selected:
    """The first of the fastest; a single one is not simulated."""
    return found[0] if len(found) == 1 else min(found, key=lambda one: one.time)


_AHEAD = 3  # options


def _last(count: int, fits: Callable[[int], bool]) -> int:
    """The last of rising options that fits, or -1; the largest comes first, which often does."""
    low, high = -1, count
    middle = high - 1
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    return low


class _Option(NamedTuple):
    """Of ``generate``."""

    group_size: int | None = None
    memory_cap: int | Fraction | None = None


def _options(spec: ScheduleSpec, chosen: bool) -> list[_Option]:
    """Options of ``generate`` with which the schedule may keep the cap, smallest memory first."""
    if spec.order is not None:
        return [_Option()]
    generator, pp, cap = GENERATORS[spec.name], spec.pp, spec.cap
    if chosen and cap is not None and not (generator.takes_memory_cap or spec.offload):
        raise ValueError(
            f"the memory of {spec.name} is fixed and takes no memory cap, got {cap.amount(pp)}; "
            "use v-cap or auto for a cap, or offload"
        )
    if generator.takes_group_size and cap is not None and spec.group_size is None:
        least = -(-pp // 2) + (not chosen)  # the least of all is gis-h, which auto tries too
        return [_Option(size) for size in range(least, pp + 1)]
    if not generator.takes_memory_cap or cap is None:
        return [_Option(spec.group_size)]
    low, high = v_cap_limits(pp)
    if spec.offload is None and not spec.barriers:
        low = LEAST_CAP  # slow, but all that fits there
    if spec.has_units and isinstance(cap, ShareCap):
        share = cap.share if chosen else min(cap.share, Fraction(1))
        first = share * spec.placement.num_stages
        if spec.offload is not None:
            more = max(0, int(high - first))
            return [_Option(memory_cap=first + sets) for sets in range(more + 1)]
        return [_Option(memory_cap=first / cap.growth)]
    most = cap.most_sets(spec.placement)
    if chosen and spec.offload is None and isinstance(cap, ShareCap):
        # As the user gives it, or an error.
        return [_Option(memory_cap=cap.sets(spec.placement, generator.split_backward))]
    try:
        least = cap.sets(spec.placement, generator.split_backward)
    except ValueError:
        least = low
    if spec.offload is None and isinstance(cap, ShareCap):
        return [_Option(memory_cap=min(max(least, low), high))]
    # An order need not hold its cap on every rank, so one more set may fit.
    least, most = (min(max(sets, low), high) for sets in (least, most + 1))
    return [_Option(memory_cap=x) for x in range(least, (high if spec.offload else most) + 1)]


def _generated(spec: ScheduleSpec, option: _Option) -> Schedule:
    """The order with these options, for the costs."""
    cap, growth = option.memory_cap, None
    if spec.barriers and cap is not None:
        # Vocabulary passes take what is between the generator's cap and the one asked for.
        more = Fraction(spec.placement.chunks, min(spec.slices or (1,)))
        least = Fraction(v_cap_limits(spec.pp)[0])
        base = max(least, cap - more)
        cap, growth = base, cap - base
    schedule = generate(
        spec.name,
        spec.pp,
        spec.microbatches,
        spec.chunks,
        spec.costs,
        group_size=option.group_size,
        memory_cap=cap,
        effort=spec.effort,
        slices=spec.slices or 1,
        joined=spec.joined,
    )
    if spec.overlap:
        schedule = join(schedule, _joint_sets(spec, schedule, cap))
    if not spec.barriers:
        return schedule
    return add_vocabulary(schedule, growth, quick=not spec.effort)


def _joint_sets(spec: ScheduleSpec, schedule: Schedule, cap: int | Fraction | None) -> int | None:
    """Most activation sets of an order with joint passes; None: one more than ``schedule``."""
    if cap is not None:
        return int(cap)
    if spec.cap is None:
        return None
    held = max(peak_sets(schedule.ranks))
    return max(held, min(held + 1, spec.cap.most_sets(schedule.placement)))


def _made(spec: ScheduleSpec, option: _Option) -> Selected:
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
        sets, own_cap = option.memory_cap, None
        if sets is not None and cap is not None:
            share = Fraction(sets, schedule.placement.num_stages)
            own_cap = ShareCap(share)
        own = replace(spec, group_size=option.group_size, cap=own_cap)
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
    held = held_sets(plan.schedule)
    if cap is not None and most is not None and held > most:
        raise CapExceeded(
            f"{schedule.name} at pp={spec.pp} with offload {wanted} keeps {number_text(held)} "
            f"activation sets on a device, but the cap is {most}",
            made,
            cap,
        )
    return made


def least_time(spec: ScheduleSpec) -> Fraction:
    """The time of the largest order of this name: offload makes none faster.

    Raises:
        ValueError: there is none.
    """
    option = _options(spec, False)[-1]
    return _made(replace(spec, offload=None, cap=None), option).time
