"""What a search does after its queue: costly orders, less memory, what the best is compared with.

Orders at a cap and offload that uses the whole link take longest to make; they are only made where
a bound lets them win. Points with less memory end the front on its other side.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from ..schedule import GENERATORS
from ..schedule.bounds import makespan_bound
from .budget import Budget
from .candidate import Candidate, candidates_of
from .cases import ROUNDING, Case, cases
from .in_slices import try_slices
from .offers import large_sets, offers
from .result import sizes_of
from .space import SearchSpace
from .work import FOR_LAST, FOR_SMALL, NEAR, full
from .workload import Workload

if TYPE_CHECKING:
    from .search import Search

T = TypeVar("T", Case, Candidate)


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
        cap = _cap(space, work, search.result.budget)
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


def _cap(space: SearchSpace, work: Workload, size: int) -> Budget:
    """``size`` bytes a rank as a cap on schedules of ``work``."""
    return Budget(work.job, size, lambda _: work.split, space.profile(work.job))


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


def small(search: Search) -> None:
    """What has less memory than all as fast: of the candidates, then with offload."""
    best = search.result.best
    if best is None:
        return
    wide = search.result.slower is not None
    slower = _SLOWER if search.result.slower is None else 1 + search.result.slower
    limit = search.best_us * float(slower)
    if len(search.spaces) == 1 and not wide:
        limit = float("inf")
    _more_candidates(search, limit)
    # Smallest first: it ends the front on the other side, and beats what lies between.
    for one in sorted(search.seen.ready, key=lambda one: (one.bytes, one.likely_us)):
        fits = one.bytes <= search.result.budget * NEAR
        if not fits or one.likely_us > limit or _beaten(search, one):
            continue
        if search.work.affords(one.spec, FOR_LAST):
            search.add(one.spec, one.workload)
    if not search.always_offload:
        _less(search, limit, wide)


def _more_candidates(search: Search, limit: float) -> None:
    """Likely times of cases with less memory than any point, and not much slower."""
    left = [one for _, _, one in search.queue if isinstance(one, Case)]
    smallest = min((p.worst.total for p in search.result.points), default=0)
    found = [one for one in left if one.least < smallest and one.bound_us < limit]
    few = None if len(search.spaces) == 1 else _CASES
    _look(search, sorted(found, key=lambda one: (one.least, one.likely_us))[:few], search.expand)
    rough = [one for _, _, one in search.queue if isinstance(one, Candidate) and one.rough]
    rough = [one for one in rough if one.likely_us <= limit and not _beaten(search, one)]
    _look(search, sorted(rough, key=lambda one: (one.bytes, one.likely_us))[:_ROUGH], search.refine)


def _look(search: Search, found: Sequence[T], look: Callable[[T], None]) -> None:
    """Look at what is found while there is work, and take it out of the queue."""
    for one in found:
        if not search.work.more_than(FOR_LAST):
            break
        look(one)
        search.queue = [row for row in search.queue if row[2] is not one]
    heapq.heapify(search.queue)


def _beaten(search: Search, one: Candidate) -> bool:
    host = one.spec.offload is not None
    return any(
        p.iteration_us <= one.likely_us
        and p.worst.total <= one.bytes
        and (host or not p.host_bytes)
        for p in search.result.points
    )


def _less(search: Search, limit: float, wide: bool) -> None:
    """Simulate what offload may bring under the memory of everything as fast.

    ``auto`` for the best one only: it takes much longer to plan, and frees less.
    """
    room, best = search.result.budget, search.result.best
    assert best is not None
    found: list[tuple[bool, int, float, Candidate]] = []
    likely = sorted(search.seen.ready, key=lambda one: (one.likely_us, one.bytes))[:_OFFERS]
    for one in likely:
        plain = replace(one.spec, effort=best.spec.effort)
        other = (plain, one.workload) != (best.spec, best.workload)
        free = one.states < room and one.spec.offload is None
        for offer in offers(one, one.space, search.units(one.spec))[-1:] if free else ():
            fits = offer.bytes <= room and offer.likely_us <= limit
            if fits and not (other and offer.offload == "auto"):
                found.append((other, offer.bytes, offer.likely_us, offer))
    # The best one's own first, then the smallest; estimates of one kind err alike.
    tried: set[tuple[str, int | None, int | None]] = set()
    for *_, offer in sorted(found, key=lambda row: row[:3]):
        spec = offer.spec
        kind = spec.name, spec.chunks, spec.group_size
        if len(tried) == _LESS:
            return
        known = kind in tried or search.known(spec, offer.workload)
        if not known and not _beaten(search, offer) and search.work.affords(spec, 0.0):
            tried.add(kind)
            search.add(spec, offer.workload)


def whole_vocabulary(search: Search) -> None:
    """Of a best point with a sharded vocabulary, what it is compared with: the likely fastest
    without it at the same sizes."""
    best = search.result.fastest
    if best is None or not best.job.vocab_parallel:
        return
    same = [s for s in search.spaces if s.vocabulary and sizes_of(s.job) == sizes_of(best.job)]
    for space in same[:1]:
        plain = replace(space, vocabulary=False, micro_batch_sizes=(best.job.micro_batch_size,))
        likely = sorted(cases(plain, search.result.budget), key=lambda one: one.likely_us)
        every = [one for case in likely[:_OTHERS] for one in candidates_of(case, search.units)]
        fits = [one for one in every if one.bytes <= search.result.budget] or every
        found = [
            one.refined(search.units)
            for one in sorted(fits, key=lambda one: one.likely_us)[:_COMPARED]
        ]
        key = lambda one: (one.bytes > search.result.budget, one.likely_us)  # noqa: E731
        for one in sorted(found, key=key)[:1]:
            search.add(one.spec, one.workload)


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


_SLOWER = Fraction(5, 4)  # than the best: of interest for its memory
_CAPS, _CAP_EFFORT = 2, 0.1  # workloads for which an order at a cap is made, with what effort
_SMALLEST = 3  # points, each with and without offload
_LESS, _OFFERS = 4, 60  # points with less memory by offload, of so many likely ones
_CASES, _ROUGH = 4, 24  # cases, and candidates, that are looked at for their memory
_OTHERS, _COMPARED = 16, 8  # cases, and candidates, of which one is compared with the best
