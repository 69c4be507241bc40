"""Points of a search whose sequences are cut into slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .candidate import Candidate
from .slices import sliced, worth_it
from .vocabulary import rank_work
from .work import FOR_LAST

if TYPE_CHECKING:
    from .search import Search


def try_slices(search: Search) -> None:
    """Sequences in slices, with the likely fastest schedules, where that is worth it."""
    # A slice's set is small: what is far too large may fit in slices.
    every = [one for _, _, one in search.queue if isinstance(one, Candidate)]
    every += [*search.seen.ready, *search.seen.hopeless]
    tried: set[tuple[str, int | None, int]] = set()
    for one in sorted(every, key=lambda one: one.likely_us):
        spec, job = one.spec, one.workload.job
        kind = spec.name, spec.chunks, spec.barriers
        if len(tried) == _SLICED or kind in tried or not worth_it(spec, job):
            continue
        # Slices shorten what ranks wait for, and make no pass of a microbatch faster.
        busy = max(rank_work(one.workload.costs, spec.placement)) * spec.microbatches
        if not one.space.slices or float(busy) + one.beside_us >= search.best_us:
            continue
        for number in one.space.slices:
            cut = sliced(spec, job, number)
            if search.work.affords(cut, FOR_LAST):
                tried.add(kind)
                search.add(cut, one.workload)


_SLICED = 4  # schedules that are tried with slices
