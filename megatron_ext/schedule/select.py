"""The selector: from a request to a schedule, with its offload, and the reason for it.

The command line, training, the planner and re-planning for measured costs all call ``select``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from .generators import GENERATORS, NAMES, check_sizes
from .generators.blocks import PERIODIC
from .generators.lengths import arrangements
from .memory_cap import Cap, ShareCap, cap_sets, number_text
from .named import CapExceeded, Selected, least_time, named
from .schedule import Arrangement, whole_only
from .spec import AUTO, ScheduleSpec

# What a model is placed for: one chunk a rank, or any number of them in Megatron's own order.
ONE_CHUNK: tuple[str, ...] = tuple(
    name
    for name, made in GENERATORS.items()
    if made.placement == "loop" and made.default_chunks == 1 and not made.any_chunks
)
ANY_CHUNKS: tuple[str, ...] = tuple(name for name, made in GENERATORS.items() if made.any_chunks)
# Schedules without a block: of dualpipev, whose passes run in pairs; they have no slices.
IN_PAIRS = tuple(n for n in GENERATORS if n not in PERIODIC and not GENERATORS[n].takes_memory_cap)


def suiting(chunks: int | None, vee: bool, equal: bool = True) -> tuple[str, ...]:
    """The schedules for a model of so many chunks a rank, the simplest first.

    Args:
        chunks: None: as many as a schedule wants.
        vee: they can be placed as a V, if they are two.
        equal: microbatches are, as schedules in pairs need them.
    """
    vees = {name for name, made in GENERATORS.items() if made.placement == "vee"}
    found: Sequence[str] = ONE_CHUNK
    if chunks is None:
        found = [name for name in GENERATORS if vee or name not in vees]
    elif chunks != 1:
        found = [*ANY_CHUNKS, *(n for n in GENERATORS if vee and chunks == 2 and n in vees)]
    return tuple(name for name in found if equal or name not in IN_PAIRS)


def select(spec: ScheduleSpec) -> Selected:
    """The schedule that ``spec`` asks for.

    Raises:
        CapExceeded: no schedule that is asked for keeps the cap.
        ValueError: unknown name, or numbers that no schedule exists for.
    """
    if spec.order is None:
        check_sizes(spec.name, spec.pp, spec.microbatches, spec.chunks, (AUTO,))
    if spec.overlap and (spec.offload is not None or spec.barriers):
        what = "a sharded vocabulary" if spec.offload is None else "offload"
        raise ValueError(f"passes do not run in pairs beside {what}; leave out one of them")
    if spec.has_units:
        _refuse_beside_units(spec)
    if spec.reorder:
        return _rearranged(spec)
    if spec.name == AUTO:
        return _auto(spec, spec.cap or ShareCap(Fraction(1)))
    found = named(spec)
    if spec.cap is None or isinstance(spec.cap, ShareCap):
        return found
    notes = found.schedule.note, spec.cap.detail(found.schedule)
    return replace(found, schedule=replace(found.schedule, note="; ".join(filter(None, notes))))


def _refuse_beside_units(spec: ScheduleSpec) -> None:
    exchange = spec.costs.exchange is not None
    if spec.overlap or exchange:
        units = sum(spec.slices) or spec.microbatches
        what = "communication of experts in the costs"
        raise whole_only(what, spec.name, units, spec.microbatches)


def _rearranged(spec: ScheduleSpec) -> Selected:
    """The fastest over a few orders of the microbatches, the one given among them."""
    shares = spec.costs.units
    if shares is None or spec.order is not None:
        raise ValueError(
            f"{spec.name}: an order of the microbatches is chosen by the cost of each; give those, "
            "or keep the order given"
        )
    rows = iter(shares)
    counts = spec.slices or (1,) * spec.microbatches
    units = [tuple(next(rows) for _ in range(count)) for count in counts]
    found: list[tuple[list[int], Selected]] = []
    failed: list[ValueError] = []
    works = [sum((sum(row) for row in own), Fraction(0)) for own in units]
    for order in arrangements(works):
        costs = replace(spec.costs, units=tuple(row for j in order for row in units[j]))
        slices = tuple(spec.slices[j] for j in order if spec.slices)
        each = replace(spec, costs=costs, slices=slices, reorder=False)
        try:
            found.append((order, select(each)))
        except ValueError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    order, best = min(found, key=lambda one: one[1].time)
    as_given = next((one.time for tried, one in found if tried == sorted(tried)), None)
    saved = None if as_given is None else 1 - best.time / as_given
    arrangement = Arrangement(tuple(order), saved)
    return replace(best, schedule=replace(best.schedule, arrangement=arrangement))


def placed_alike(spec: ScheduleSpec) -> tuple[str, ...]:
    """The schedules for which a model that is placed for ``spec`` need not change."""
    own = GENERATORS[spec.name]
    return tuple(
        name
        for name, made in GENERATORS.items()
        if (made.placement, made.split_backward) == (own.placement, own.split_backward)
        and spec.of(name).placement.chunks == spec.placement.chunks
    )


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
            found.append(named(spec.of(name), chosen=False))
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
    best = min(found, key=lambda one: one.place)
    return replace(best, schedule=replace(best.schedule, note=_why(spec, cap, best, found, missed)))


def _by_bound(spec: ScheduleSpec, failed: list[ValueError]) -> list[tuple[Fraction, str]]:
    """``spec.names`` with lower bounds of their times, least first, in the registry's order.

    Offload makes no order faster, and plans take long: the first ones that keep the cap are all
    there is to plan. Without offload there is no bound.
    """
    names = sorted(spec.names, key=NAMES.index)
    if spec.offload is None:
        return [(Fraction(0), name) for name in names]
    bounds = []
    for name in names:
        try:
            bounds.append((least_time(spec.of(name)), name))
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
    parts[0] += f": makespan {number_text(best.time)}, {cap.detail(schedule)}"
    others = [one for one in found if one is not best]
    if others and spec.offload is None:
        second = min(others, key=lambda one: one.time)
        more = second.time / best.time - 1
        how = "as fast, but less simple" if not more else f"{float(more):.1%} slower"
        parts.append(f"next is {second.schedule.name}, {how}")
    if missed:
        even = "" if spec.offload is None else " even so"
        each = (error.selected.schedule for error in missed)
        sizes = ", ".join(f"{one.name} ({cap.taken(one)})" for one in each)
        parts.append(f"too large{even}: {sizes}")
    return "; ".join([*parts, *filter(None, [schedule.note])])


def _list(spec: ScheduleSpec) -> str:
    return ", ".join(spec.names)
