"""The search: enumerate candidates, bound their times, simulate what may be of use.

Every candidate has a lower bound of its time (``makespan_bound``), and a likely time and likely
bytes, from the same schedule for equal costs and few microbatches. Four steps: what may be the
fastest of those that fit, the likely fastest first and none whose bound is no better than what was
found; schedules at the largest cap that fits; what is too large but may be the fastest with
offload; and what may be on the front besides, with offload or without. Where offload is asked for,
every candidate has it from the start. A search makes orders of at most so many passes; that
counts the same on every machine, so the result does not depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..schedule import GENERATORS, Costs, OffloadSpec, Schedule, ScheduleSpec, select, simulate
from ..schedule.bounds import makespan_bound
from ..schedule.effects import peak_sets
from ..schedule.passes.offload import wanted_chunks
from .layout import Split
from .memory import message_bytes, rank_bytes
from .model import Job, PlanError
from .point import Point, evaluate, front
from .space import SearchSpace, Workload

# Passes of all orders of a search; about half a minute of one core. Offload plans and orders at a
# cap are searched for, which takes so many times as long.
MOST_PASSES = 2_000_000
_OFFLOAD, _CAP = 10, 25


@dataclass(frozen=True)
class Candidate:
    """What may be simulated.

    Attributes:
        spec, workload: what it is.
        bound_us: no order is faster.
        likely_us, bytes: what the order for equal costs takes, and holds on the fullest rank; with
            offload about.
        states: of these, what stays without any activation.
    """

    spec: ScheduleSpec
    workload: Workload
    bound_us: Fraction
    likely_us: Fraction
    bytes: int
    states: int


@dataclass
class Result:
    """What was found.

    Attributes:
        points: all that were simulated.
        budget, host_budget: bytes per rank, of the device and of the host (None: no limit).
        skipped: candidates that were left out because the search had made all its passes.
        candidates: how many there were.
    """

    budget: int
    host_budget: int | None
    points: list[Point] = field(default_factory=list)
    skipped: int = 0
    candidates: int = 0

    def fits(self, point: Point) -> bool:
        """True if it keeps both budgets."""
        host = self.host_budget is None or point.host_bytes <= self.host_budget
        return host and point.worst.total <= self.budget

    @property
    def front(self) -> list[Point]:
        """The points that fit and that no other one beats."""
        return front([point for point in self.points if self.fits(point)])

    @property
    def best(self) -> Point | None:
        """The fastest that fits; of equally fast ones what needs least of the host, then least."""
        fitting = [point for point in self.points if self.fits(point)]
        return min(
            fitting,
            key=lambda point: (point.makespan_us, point.host_bytes, point.worst.total),
            default=None,
        )

    @property
    def smallest(self) -> Point:
        """The point with fewest bytes on its fullest rank, of those that keep the host's budget."""
        usable = [
            p for p in self.points if self.host_budget is None or p.host_bytes <= self.host_budget
        ]
        return min(usable, key=lambda point: (point.worst.total, point.makespan_us))


class Search:
    """One search.

    Args:
        space: what may be chosen.
        budget, host_budget: as ``Result``.
        effort: a factor on ``MOST_PASSES``.
        progress: called with a line now and then.
    """

    def __init__(
        self,
        space: SearchSpace,
        budget: int,
        host_budget: int | None = None,
        effort: float = 1.0,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.space, self.progress = space, progress
        self.passes_left = MOST_PASSES * effort
        self.result = Result(budget, host_budget)
        self._units: dict[ScheduleSpec, Schedule] = {}

    def run(self) -> Result:
        """Search.

        Raises:
            PlanError: no schedule is possible for this model and number of ranks.
        """
        candidates = self.candidates()
        if self.space.always_offload:
            candidates = self._all_offloaded(candidates)
        budget = self.result.budget
        fitting = [one for one in candidates if one.bytes <= budget * _NEAR]
        for one in fitting:
            if self._is_near(one):
                self._add(one.spec, one.workload)
        if not self.space.always_offload:
            self._capped(candidates)
            self._offload([o for o in candidates if o.bytes > budget and o.states < budget])
        # Smallest first: it ends the front on the other side, and beats what lies between.
        for one in sorted(fitting, key=lambda one: (one.bytes, one.likely_us)):
            if not self._known(one.spec, one.workload) and not self._beaten(one):
                self._add(one.spec, one.workload)
        if self.result.best is None:
            self._smallest(candidates)
        elif not self.space.always_offload:
            self._less(candidates)
        return self.result

    def candidates(self) -> list[Candidate]:
        """All of them but schedules at a cap and offload, the likely fastest first.

        Raises:
            PlanError: there is none.
        """
        found: list[Candidate] = []
        for spec in self.space.specs():
            if spec.placement.num_stages > max(self.space.job.num_layers, 1) + 2:
                continue
            for job, microbatches in self.space.jobs():
                sized = replace(spec, microbatches=microbatches)
                for split in self._splits(job, sized):
                    found.append(self._candidate(sized, job, split))
        if not found:
            raise PlanError(
                f"none of {', '.join(self.space.schedules)} is possible with "
                f"{self.space.job.num_layers} layers on {self.space.pp} ranks; give other "
                "--schedules or --chunks"
            )
        found.sort(key=lambda one: (one.likely_us, one.bytes))
        self.result.candidates = len(found)
        self.progress(f"{len(found)} candidates")
        return found

    def _splits(self, job: Job, spec: ScheduleSpec) -> Iterable[Split]:
        """Megatron's own, and balanced ones that differ."""
        placement, order = spec.placement, self._unit(spec)
        seen: set[tuple[int, ...]] = set()
        for split in (
            self.space.even(job, placement.num_stages),
            self.space.balanced_in_time(job, placement),
            self.space.balanced_in_bytes(job, order, peak_sets(order.ranks)),
        ):
            if split is not None and split.counts not in seen:
                seen.add(split.counts)
                yield split

    def _candidate(self, spec: ScheduleSpec, job: Job, split: Split) -> Candidate:
        work = self.space.workload(job, spec.microbatches, split)
        order, costs = self._unit(spec), work.costs
        # Few microbatches, and every further one on the rank with most work.
        more = spec.microbatches - order.microbatches
        most = max(costs.per_rank_work(order.placement))
        ranks = work.ranks(order)
        return Candidate(
            replace(spec, costs=costs),
            work,
            makespan_bound(order.placement, spec.microbatches, costs),
            simulate(order, costs).makespan + more * most,
            max(rank.total for rank in ranks),
            max(rank.states.total for rank in ranks),
        )

    def _unit(self, spec: ScheduleSpec) -> Schedule:
        """The schedule at equal costs, with as many microbatches as its peak needs."""
        few = min(spec.microbatches, 2 * spec.pp)
        key = replace(spec, microbatches=few, costs=Costs(), cap=None, offload=None)
        if key not in self._units:
            self._units[key] = select(key).schedule
        return self._units[key]

    def _add(self, spec: ScheduleSpec, work: Workload) -> Point | None:
        """Simulate a point; None if the search has made all its passes, or nothing keeps a cap."""
        passes = 3 * spec.placement.num_stages * spec.microbatches
        passes *= _CAP if spec.cap is not None else _OFFLOAD if spec.offload is not None else 1
        # The first few are free: there is always an answer.
        if passes > self.passes_left and len(self.result.points) >= _ALWAYS:
            self.result.skipped += 1
            return None
        self.passes_left -= passes
        try:
            point = evaluate(spec, work)
        except ValueError:
            if spec.cap is None:
                raise
            return None
        self.result.points.append(point)
        best = self.result.best
        fastest = f"best {float(best.makespan_us) / 1e3:.1f} ms" if best else "none fits yet"
        self.progress(f"{len(self.result.points)} simulated, {fastest}")
        return point

    def _known(self, spec: ScheduleSpec, work: Workload) -> bool:
        return any((p.spec, p.workload) == (spec, work) for p in self.result.points)

    def _beaten(self, one: Candidate) -> bool:
        host = one.spec.offload is not None
        return any(
            p.makespan_us <= one.likely_us
            and p.worst.total <= one.bytes
            and (host or not p.host_bytes)
            for p in self.result.points
        )

    def _may_win(self, bound_us: Fraction) -> bool:
        best = self.result.best
        return best is None or bound_us < best.makespan_us

    def _is_near(self, one: Candidate) -> bool:
        """It may be the fastest, and is likely to be about as fast."""
        best = self.result.best
        far = best is not None and one.likely_us > best.makespan_us * _FAR
        return self._may_win(one.bound_us) and not far

    def _capped(self, candidates: list[Candidate]) -> None:
        """V placement at the largest cap that fits, where 1F1B's memory does not."""
        names = [name for name in self.space.schedules if GENERATORS[name].takes_memory_cap]
        seen: list[Workload] = []
        tried, size = 0, self.result.budget
        for one in candidates:
            work = one.workload
            if tried == _CAPS or not one.spec.placement.is_vee() or work in seen:
                continue
            seen.append(work)
            large, small = (
                work.peak(self._unit(replace(one.spec, name=name))) for name in ("v-zb", "v-min")
            )
            if not small <= size < large:
                continue
            tried += 1
            cap, placement = self.space.budget(work, size), one.spec.placement
            sets = max(1, cap.most_sets(placement))
            bound = makespan_bound(placement, work.microbatches, work.costs, sets)
            for name in names:
                if self._may_win(bound):
                    self._add(replace(one.spec, name=name, cap=cap), work)

    def _offload(self, large: Sequence[Candidate]) -> None:
        """Simulate what is too large on the device but may be fast, until it fits."""
        for one in large:
            for offer in self._offers(one):
                if not self._may_win(one.bound_us) or offer.bytes > self.result.budget:
                    continue
                point = self._add(offer.spec, offer.workload)
                if point is not None and self.result.fits(point):
                    break

    def _less(self, candidates: Sequence[Candidate]) -> None:
        """Simulate what offload may bring under the memory of everything as fast."""
        room, best = self.result.budget, self.result.best
        assert best is not None
        offers = [
            offer
            for one in candidates
            if one.states < room
            for offer in self._offers(one)[-1:]
            if offer.bytes <= room and offer.likely_us <= best.makespan_us * _SLOW
        ]
        # The best one's own first, then the smallest; estimates of one kind err alike.
        first = best.spec, best.workload
        tried: set[tuple[str, int | None, int | None]] = set()
        for offer in sorted(
            offers,
            key=lambda o: (
                (replace(o.spec, offload=None), o.workload) != first,
                o.bytes,
                o.likely_us,
            ),
        ):
            spec = offer.spec
            kind = spec.name, spec.chunks, spec.group_size
            new = kind not in tried and not self._known(spec, offer.workload)
            if len(tried) < _LESS and new and not self._beaten(offer):
                tried.add(kind)
                self._add(spec, offer.workload)

    def _all_offloaded(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with the offload that is asked for, however slow the link.

        Raises:
            PlanError: no schedule can be combined with it.
        """
        found = [offer for one in candidates for offer in self._offers(one)]
        if not found:
            raise PlanError(
                f"--offload {', '.join(self.space.offload)}: none of the schedules searched keeps "
                "an activation set that can be offloaded; give other --schedules, or --offload off"
            )
        return sorted(found, key=lambda one: (one.likely_us, one.bytes))

    def _offers(self, one: Candidate) -> list[Candidate]:
        """``one`` with the kinds of offload that its link can carry, or that are asked for; what
        takes longest to plan only if need be."""
        out: list[Candidate] = []
        if one.spec.cap is not None:
            return out  # with offload a cap is of what stays on the device: another point
        link = self.space.link(one.workload, one.spec.placement)
        for wanted in self.space.offload:
            offload = OffloadSpec(wanted, link)
            load = self._load(one, offload)
            if not self.space.always_offload and (out if wanted == "auto" else load > _CROWDED):
                continue
            over = max(Fraction(0), load - 1) if wanted != "auto" else Fraction(0)
            likely = one.likely_us * (1 + over / 2)  # what it cannot carry in time stays
            size = self._offloaded_bytes(one, offload)
            spec = replace(one.spec, offload=offload)
            out.append(replace(one, spec=spec, likely_us=likely, bytes=size))
        return out

    def _offloaded(self, one: Candidate, offload: OffloadSpec) -> list[list[int]]:
        """Per rank, the stages of which sets are to be offloaded.

        The last stage's are not: its B follows its F at once.
        """
        placement = one.spec.placement
        wanted = wanted_chunks(str(offload.wanted), placement.chunks)
        count = placement.chunks if wanted is None else int(wanted)
        last = placement.num_stages - 1
        return [[s for s in row[:count] if s != last] for row in placement.stages]

    def _load(self, one: Candidate, offload: OffloadSpec) -> Fraction:
        """Share of its time that the busiest link needs for what it is asked to move."""
        placement, costs = one.spec.placement, one.workload.costs
        times = offload.link.times(placement, costs.durations(placement))
        busiest = 0
        for stages in self._offloaded(one, offload):
            ways = [sum(way[s] for s in stages) for way in (times.to_host, times.to_device)]
            busiest = max(busiest, max(ways) if offload.link.policy == "dual" else sum(ways))
        most = max(costs.per_rank_work(placement))
        return Fraction(busiest, times.durations.scale) / most

    def _offloaded_bytes(self, one: Candidate, offload: OffloadSpec) -> int:
        """Likely bytes of the fullest rank: two sets on their way or in use, of those that leave.

        PipeOffload, section 3 (between two and three sets stay under full offload). ``auto`` sends
        what the link carries, the longest kept first, so what stays falls with the square.
        """
        stages = list(one.workload.stages)
        for stage in itertools.chain.from_iterable(self._offloaded(one, offload)):
            sets = stages[stage].sets
            offloaded = sets._replace(
                bytes_f_to_b=0, bytes_b_to_w=0, layer=sets.layer + 2 * sets.bytes_f_to_b
            )
            stages[stage] = stages[stage]._replace(sets=offloaded)
        message = message_bytes(one.workload.job)
        least = max(r.total for r in rank_bytes(self._unit(one.spec), stages, message))
        if offload.wanted != "auto":
            return least
        stays = 1 - 1 / max(Fraction(1), self._load(one, offload))
        return least + int(max(0, one.bytes - least) * stays**2)

    def _smallest(self, candidates: list[Candidate]) -> None:
        """Nothing fits: the smallest there is, with and without offload."""
        for one in sorted(candidates, key=lambda one: (one.bytes, one.bound_us))[:_SMALLEST]:
            if not self._known(one.spec, one.workload):
                self._add(one.spec, one.workload)
        if self.space.always_offload:
            return
        offers = [offer for one in candidates for offer in self._offers(one)[-1:]]
        seen: set[tuple[str, bool]] = set()
        for offer in sorted(offers, key=lambda one: (one.bytes, one.bound_us)):
            spec, work = offer.spec, offer.workload
            kind = spec.name, work.split.even  # estimates of one kind err alike
            if kind not in seen and len(seen) <= _SMALLEST and not self._known(spec, work):
                seen.add(kind)
                self._add(spec, work)


_ALWAYS = 3  # points
_FAR = Fraction(21, 20)  # orders for equal costs are seldom so much slower than those for the costs
_NEAR = 1.03  # likely bytes were up to 3 % too many, seldom
_CAPS = 2  # workloads for which an order at a cap is made
_CROWDED = Fraction(9, 8)  # beyond, a link that is asked for more only makes compute wait
_SMALLEST = 3  # points, each with and without offload
_LESS, _SLOW = 4, Fraction(5, 4)  # points with less on the device, slower than the best by so much
