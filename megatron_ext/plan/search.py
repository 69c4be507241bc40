"""The search: one queue of all that may be chosen, whichever of it the user has fixed.

What is searched is a division of the devices, a microbatch size, a kind of recompute, the
vocabulary in one piece or sharded, a schedule with its chunks, a split of the layers, slices, and
offload. It is looked at in three steps, each of which costs about ten times as much as the one
before: closed forms of a *case* (``cases.py``), the same schedule for equal costs with few
microbatches (a *candidate*), and the schedule itself (a *point*). The queue's first is what is
likely the fastest by all that is known of it. What cannot be faster than the best point is left
out by its lower bound; the search ends when nothing is left that is likely to be faster, or when
its work is used up. Work counts passes and not seconds, so the answer is the same on every machine.

Points that are there before (the user's own flags, stock schedules that fit) are candidates for
the answer too: it is never slower than they are, whatever the limit cuts. What takes longest to
make, orders at a cap or with offload, comes after all that, only where a bound lets it win.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ..schedule import GENERATORS, Costs, ScheduleSpec
from . import later
from .alone import without_pipeline
from .candidate import Candidate, Units, candidates_of
from .cases import Case, cases
from .model import PlanError
from .offers import offers
from .point import Point, evaluate
from .result import Result, division_text
from .space import SearchSpace
from .work import FOR_COSTLY, FOR_LAST, MOST, NEAR, Work, full
from .workload import Workload


@dataclass
class Seen:
    """What left the queue and was not simulated, or not yet.

    Attributes:
        never: cases whose states alone are too large.
        ready: candidates with a likely time; ``large``: of these what does not fit as it is.
        hopeless: far too large, and without a likely time.
        dear: too much work for the queue.
        twins: simulated in another division.
    """

    never: list[Case] = field(default_factory=list)
    ready: list[Candidate] = field(default_factory=list)
    large: list[Candidate] = field(default_factory=list)
    hopeless: list[Candidate] = field(default_factory=list)
    dear: list[Candidate] = field(default_factory=list)
    twins: list[Candidate] = field(default_factory=list)


class Search:
    """One search.

    Args:
        spaces: of every division that is searched.
        budget, host_budget: as ``Result``.
        effort: a factor on the work.
        progress: called with a line now and then.
        given: points that are there before, and may be the answer.
        units: shared with other searches.
        alone: no pipeline may be the answer, where a space has one rank.
    """

    def __init__(
        self,
        spaces: Sequence[SearchSpace],
        budget: int,
        host_budget: int | None = None,
        effort: float = 1.0,
        progress: Callable[[str], None] = lambda line: None,
        given: Iterable[Point] = (),
        units: Units | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self.spaces, self.progress, self.alone = spaces, progress, alone
        self.units = Units() if units is None else units
        self.work = Work(MOST * effort)
        self.result = Result(budget, host_budget, list(given))
        self.queue: list[tuple[float, int, Case | Candidate]] = []
        self._numbers = count()
        self.seen = Seen()

    def run(self) -> Result:
        """Search.

        Raises:
            PlanError: no schedule is possible for this model and these devices.
        """
        result = self.result
        # They need no search, and are no reason to leave out a pipeline.
        alone = [point for point in result.points if not point.is_pipeline]
        result.points = [point for point in result.points if point.is_pipeline]
        self._begin()
        for _ in range(_ROUNDS):
            self._fastest()
            before = self.best_us
            self._polish()
            if self.best_us <= before:
                break  # else the orders in full are too large, or slower
        later.costly(self)
        self._polish()
        alone += [result.alone] if self.alone and result.alone is not None else []
        for point in alone:
            if not any(p.key() == point.key() for p in result.points):
                result.points.append(point)
        if result.best is None:
            later.smallest(self)
            self._polish()
            # The least memory is that of an order that training makes.
            while result.points and (least := result.smallest).spec.effort < full():
                self._full(least)
        if not result.points:
            raise PlanError(_why_none(self.spaces))
        _count_left(self)
        return result

    @property
    def always_offload(self) -> bool:
        """Every point has to have some."""
        return any(space.always_offload for space in self.spaces)

    @property
    def best_us(self) -> float:
        """Of the fastest that fits; infinite without one."""
        best = self.result.best
        return float("inf") if best is None else float(best.iteration_us)

    def _begin(self) -> None:
        """Put every case into the queue."""
        failed: PlanError | None = None
        for space in self.spaces:
            try:
                if space.pp < 2:
                    self._alone(space)
                    continue
                found = cases(space, self.result.budget)
            except PlanError as error:
                failed = error
                continue
            self.result.cases += len(found)
            self.work.take(self.work.of_cases(len(found)))
            for case in found:
                if case.states <= self.result.budget:
                    self._put(case.likely_us * _OF_CASE, case)
                else:
                    self.seen.never.append(case)
        self.result.divisions = len(self.spaces)
        if failed is not None and not self.result.cases and self.result.alone is None:
            raise failed

    def _alone(self, space: SearchSpace) -> None:
        """Without a pipeline there is one order, so all points are made at once."""
        for job in (job for job, _ in space.jobs() if not job.cheap_recompute):
            point = without_pipeline(space, job)
            known = self.result.alone
            if self.result.fits(point) and (known is None or point.key() < known.key()):
                self.result.alone = point

    def _put(self, key: float, one: Case | Candidate) -> None:
        heapq.heappush(self.queue, (key, next(self._numbers), one))

    def _fastest(self) -> None:
        """Look at what is likely the fastest until nothing is."""
        budget = self.result.budget
        while self.queue and (
            self.work.more_than(FOR_COSTLY)
            or (self.result.best is None and self.work.more_than(_WITHOUT))
        ):
            key, _, one = heapq.heappop(self.queue)
            if key >= self.best_us:
                heapq.heappush(self.queue, (key, next(self._numbers), one))
                return
            if one.bound_us >= self.best_us:
                continue
            if isinstance(one, Case):
                self.expand(one)
            elif one.rough and _hopeless(self, one):
                self.seen.hopeless.append(one)
            elif one.rough:
                self.refine(one)
            elif _has_twin(self, one):
                self.seen.twins.append(one)
            elif _is_dear(self, one):
                self.seen.dear.append(one)
            elif one.bytes <= budget * NEAR or self.always_offload:
                self.add(one.spec, one.workload)

    def expand(self, case: Case) -> None:
        """Put a case's candidates into the queue, with rough times."""
        self.result.searched += 1
        known = len(self.units.orders)
        for one in candidates_of(case, self.units):
            new = len(self.units.orders) - known
            known += new
            self.work.take(self.work.of_rough(one.spec) + new * self.work.of_likely(one.spec))
            if case.space.always_offload:
                for offer in offers(one, case.space, self.units(one.spec)):
                    self._put(offer.hoped_us, offer)
            else:
                self._put(one.hoped_us, one)

    def refine(self, rough: Candidate) -> None:
        """Put it back with its likely time, or among the large ones."""
        one = rough.refined(self.units)
        self.work.take(self.work.of_likely(one.spec))
        self.result.candidates += 1
        if rough.spec.offload is not None:
            found = offers(one, rough.space, self.units(one.spec))
            one = next((o for o in found if o.offload == rough.offload), None) or one
        self.seen.ready.append(one)
        if one.bytes <= self.result.budget * NEAR:
            self._put(one.hoped_us, one)
            return
        self.seen.large.append(one)
        # What the link can carry is as fast; orders that use all of it take long to plan.
        for offer in offers(one, one.space, self.units(one.spec)) if not rough.offload else ():
            if offer.offload != "auto" and offer.bytes <= self.result.budget:
                self._put(offer.hoped_us, offer)
                return

    def add(self, spec: ScheduleSpec, work: Workload, *, quick: bool = True) -> Point | None:
        """Simulate a point; None if it is known, or nothing keeps a cap."""
        # Quick orders leave less of what offload could move.
        if quick and spec.offload is None and not GENERATORS[spec.name].fixed:
            spec = replace(spec, effort=0.0)
        if self.known(spec, work):
            return None
        self.work.make(spec)
        try:
            point = evaluate(spec, work)
        except ValueError:
            if spec.cap is None:
                raise
            return None
        self.result.points.append(point)
        self._tell(point)
        return point

    def _tell(self, point: Point) -> None:
        best, text = self.result.best, "none fits yet"
        if best is not None:
            text = f"best {self.best_us / 1e3:.1f} ms on {division_text(best.job)}, {best.name}"
            left = min((one.bound_us for _, _, one in self.queue), default=self.best_us)
            share = 1 - left / self.best_us
            if share > 0.0005:
                text += f"; {share:.1%} faster at most is possible"
        self.progress(f"{len(self.result.points)} simulated, {text}")

    def known(self, spec: ScheduleSpec, work: Workload) -> bool:
        plain = replace(spec, effort=0.0)
        return any(
            p.workload == work
            and p.spec.effort >= spec.effort
            and replace(p.spec, effort=0.0) == plain
            for p in self.result.points
        )

    def may_win(self, one: Candidate) -> bool:
        return one.bound_us < self.best_us

    def _polish(self) -> None:
        """Make the orders of the best in full, as training does, until the best one is."""
        limit = self.best_us * _CLOSE
        quick = [p for p in self.result.points if p.spec.effort < full() and self.result.fits(p)]
        near = sorted((p for p in quick if p.iteration_us <= limit), key=Point.key)[:_POLISHED]
        for point in near:
            if self.work.affords(replace(point.spec, effort=full()), 0.0):
                self._full(point)
        while (best := self.result.best) is not None and best.spec.effort < full():
            if not self.work.affords(replace(best.spec, effort=full()), -1.0):
                return  # training will; it takes longer than all of the search
            self._full(best)

    def _full(self, point: Point) -> None:
        """Replace a point by the one that training makes."""
        spec = replace(point.spec, effort=full())
        self.work.make(spec)
        self.result.points.remove(point)
        self.result.points.append(evaluate(spec, point.workload))
        self._tell(point)


def _hopeless(search: Search, one: Candidate) -> bool:
    """Even half of its activations do not fit by far."""
    if one.spec.offload is not None:
        return False
    return one.bytes - one.states > _HOPELESS * (search.result.budget - one.states)


def _has_twin(search: Search, one: Candidate) -> bool:
    """The same order with nearly the same passes was simulated on another division."""
    return any(
        p.job != one.workload.job
        and (p.name, p.spec.pp, p.spec.microbatches)
        == (one.spec.name, one.spec.pp, one.spec.microbatches)
        and (p.spec.chunks, p.offload) == (one.spec.chunks, one.offload)
        and p.workload.split == one.workload.split
        and _alike(p.workload.costs, one.workload.costs)
        for p in search.result.points
    )


def _is_dear(search: Search, one: Candidate) -> bool:
    """Too much work for what is left of it, or for one point."""
    if search.work.of_point(one.spec) > _ONE * search.work.most:
        return True
    if one.spec.offload:
        return not search.work.affords(one.spec, FOR_COSTLY)
    found = search.result.best is not None
    return found and not search.work.affords(replace(one.spec, effort=0.0), FOR_LAST)


def _why_none(spaces: Sequence[SearchSpace]) -> str:
    first = spaces[0]
    layers, pp = first.job.num_layers, first.pp
    if len(spaces) > 1:
        return (
            "no division of these devices has a schedule for this model; give --pp, "
            "--schedules or --chunks"
        )
    if first.always_offload and first.schedules:
        return (
            f"--offload {', '.join(first.offload)}: none of the schedules searched keeps an "
            "activation set that can be offloaded; give other --schedules, or --offload off"
        )
    fix = "give other --schedules or --chunks"
    if not first.balance and layers % pp:
        fix = "leave out --no-balance, with which Megatron's flags have to divide them"
    return (
        f"none of {', '.join(first.schedules)} is possible with {layers} layers on "
        f"{pp} ranks; {fix}"
    )


def _count_left(search: Search) -> None:
    """How much was skipped, and how fast it can be at most."""
    best = search.best_us
    left = [(key, one) for key, _, one in search.queue if one.bound_us < best]
    left += [(0.0, one) for one in search.seen.dear if one.bound_us < best]
    unlikely = (*search.seen.twins, *search.seen.hopeless)
    left += [(best, one) for one in unlikely if one.bound_us < best]
    search.result.skipped = len(left)
    search.result.unsearched = sum(isinstance(one, Case) for _, one in left)
    search.result.cut = sum(key < best for key, _ in left)
    search.result.least_us = min((one.bound_us for _, one in left), default=None)


def _alike(a: Costs, b: Costs) -> bool:
    """Every pass takes as long within half a per cent."""
    rows = zip(a.stages or (), b.stages or ())
    times = [pair for one, other in rows for pair in zip(one, other)]
    times += list(zip(a.vocabulary or (), b.vocabulary or ()))
    return all(200 * abs(x - y) <= x for x, y in times)


_OF_CASE = 0.97  # the likely time of a case by which its candidates' may be shorter
_WITHOUT = -0.5  # of the work is left as long as nothing fits
_CLOSE, _POLISHED = 1.015, 5  # points whose orders are made in full: so near the best, so many
_HOPELESS = 1.8  # times the room for activations
_ROUNDS = 3
_ONE = 0.2  # of the work, the most for one point of the queue
