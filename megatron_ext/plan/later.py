"""What a search does after its queue: costly orders, and the least memory where nothing fits.

Orders at a cap and offload that uses the whole link take longest to make; they are only made where
a bound lets them win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..schedule import GENERATORS
from ..schedule.bounds import makespan_bound
from .budget import Budget
from .candidate import Candidate, candidates_of
from .cases import ROUNDING, Case
from .in_slices import try_slices
from .offers import large_sets, offers
from .work import FOR_SMALL, full
from .workload import Workload

if TYPE_CHECKING:
    from .search import Search


def costly(search: Search) -> None:
    """Orders at the largest cap that fits, offload of what is too large, and slices."""
    for one in sorted(search.seen.hopeless, key=lambda one: one.likely_us)[:_ROUGH]:
        # Its ``auto`` or full offload may be fast still; V orders at a cap, too.
        if one.hoped_us < search.best_us and search.work.more_than(FOR_SMALL):
            search.seen.hopeless.remove(one)
            search.refine(one)
    likely = sorted(search.seen.ready, key=lambda one: (one.likely_us, one.bytes))
    if not search.always_offload:
        _capped(search, likely)
        _offload(search, sorted(search.seen.large, key=lambda one: (one.likely_us, one.bytes)))
        for one in [*search.seen.dear]:
            late = one.hoped_us >= search.best_us
            if not late and search.may_win(one) and search.work.affords(one.spec, FOR_SMALL):
                search.seen.dear.remove(one)
                search.add(one.spec, one.workload)
        try_slices(search)


def _capped(search: Search, likely: Sequence[Candidate]) -> None:
    """V placement at the largest cap that fits, where 1F1B's memory does not."""
    seen: list[Workload] = []
    tried = 0
    for one in likely:
        space, work = one.space, one.workload
        names = [name for name in space.schedules if GENERATORS[name].takes_memory_cap]
        placement = one.spec.placement
        if tried == _CAPS or not placement.is_vee() or work in seen or not names:
            continue
        seen.append(work)
        large, small = (
            work.peak(search.units(replace(one.spec, name=name, chunks=2)))
            for name in ("v-zb", "v-min")
        )
        if not small <= search.result.budget < large or not search.work.more_than(FOR_SMALL):
            continue
        cap = _cap(work, search.result.budget)
        # The selector tries one more: an order need not hold its cap on every rank.
        sets, costs = 1 + cap.most_sets(placement), work.costs.computation()
        bound = makespan_bound(placement, work.microbatches, costs, sets)
        if float(bound) * ROUNDING + one.beside_us >= search.best_us:
            continue
        # With all the memory it would like, it is about as fast as V-ZB.
        free = replace(one, spec=replace(one.spec, name="v-zb")).refined(search.units)
        if free.hoped_us >= search.best_us:
            continue
        tried += 1
        for name in names:
            spec = replace(one.spec, name=name, cap=cap, effort=_CAP_EFFORT * full())
            if search.work.affords(spec, FOR_SMALL):
                search.add(spec, work, quick=False)


def _cap(work: Workload, size: int) -> Budget:
    """``size`` bytes a rank as a cap on schedules of ``work``."""
    return Budget(work.job, size, lambda _: work.split)


def _offload(search: Search, large: Sequence[Candidate]) -> None:
    """Simulate what is too large on the device but may be fast, until it fits."""
    for one in large:
        if one.states >= search.result.budget:
            continue
        for offer in offers(one, one.space, search.units(one.spec)):
            late = offer.hoped_us >= search.best_us
            if late or not search.may_win(one) or offer.bytes > search.result.budget:
                continue
            if not search.work.affords(offer.spec, FOR_SMALL):
                continue
            point = search.add(offer.spec, offer.workload)
            if point is not None and search.result.fits(point):
                break


def smallest(search: Search) -> None:
    """Nothing fits: the smallest there is, with and without offload."""
    left = [*search.seen.never, *(one for _, _, one in search.queue if isinstance(one, Case))]
    for case in sorted(left, key=lambda one: (one.least, one.likely_us))[:_CASES]:
        for rough in candidates_of(case, search.units):
            search.seen.ready.append(rough.refined(search.units))
    search.result.candidates = max(search.result.candidates, len(search.seen.ready))
    if search.always_offload:
        found = [o for one in search.seen.ready for o in _with_offload(search, one)]
        for one in sorted(found, key=lambda one: (one.bytes, one.bound_us))[:_SMALLEST]:
            search.add(one.spec, one.workload)
        return
    for one in sorted(search.seen.ready, key=lambda one: (one.bytes, one.bound_us))[:_SMALLEST]:
        search.add(one.spec, one.workload)
    found = [o for one in large_sets(search.seen.ready) for o in _with_offload(search, one)[-1:]]
    seen: set[tuple[str, bool]] = set()
    for offer in sorted(found, key=lambda one: (one.bytes, one.bound_us)):
        kind = offer.spec.name, offer.workload.split.even  # estimates of one kind err alike
        if kind not in seen and len(seen) <= _SMALLEST:
            seen.add(kind)
            search.add(offer.spec, offer.workload)


def _with_offload(search: Search, one: Candidate) -> list[Candidate]:
    if one.spec.offload is not None:
        return [one]
    return offers(one, one.space, search.units(one.spec))


_CAPS, _CAP_EFFORT = 2, 0.1  # workloads for which an order at a cap is made, with what effort
_SMALLEST = 3  # points, each with and without offload
_CASES, _ROUGH = 4, 24  # cases, and candidates, that are looked at late
