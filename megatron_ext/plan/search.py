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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..schedule import GENERATORS, ScheduleSpec
from ..schedule.bounds import makespan_bound
from ..schedule.effects import peak_sets
from .candidate import Candidate, first_of_kinds, likely, offers, pairs_of
from .layout import Split
from .model import Job, PlanError
from .point import Point, evaluate, front
from .rivals import Rivals
from .space import SearchSpace, Workload
from .vocabulary import BARRIERS, NOT_WITH, rank_work

# Passes of all orders of a search; about half a minute of one core. Offload plans and orders at a
# cap are searched for, which takes so many times as long.
MOST_PASSES = 2_000_000
_OFFLOAD, _CAP = 10, 25
_VOCABULARY = 4  # several orders with its passes are made for one
_OVERLAP = 30  # and many with pairs


@dataclass
class Result:
    """What was found.

    Attributes:
        budget, host_budget: bytes per rank, of the device and of the host (None: no limit).
        skipped: candidates that were left out because the search had made all its passes.
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
        return front(filter(self.fits, self.points), Point.key)

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
        budget, host_budget: as ``Result``.
        effort: a factor on ``MOST_PASSES``.
        progress: called with a line now and then.
        rivals: of other divisions; None: there are none.
    """

    def __init__(
        self,
        space: SearchSpace,
        budget: int,
        host_budget: int | None = None,
        effort: float = 1.0,
        progress: Callable[[str], None] = lambda line: None,
        rivals: Rivals | None = None,
    ) -> None:
        self.space, self.progress = space, progress
        self.passes_left = MOST_PASSES * effort
        self.result = Result(budget, host_budget)
        self.rivals = rivals or Rivals()

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
        self._pairs(fitting)
        whole = [one for one in fitting if self.space.vocabulary and not one.spec.barriers]
        if whole and not self._known(whole[0].spec, whole[0].workload):
            self._add(whole[0].spec, whole[0].workload)  # what the others are compared with
        if not self.space.always_offload:
            self._capped(candidates)
            self._offload([o for o in candidates if o.bytes > budget and o.states < budget])
        # Smallest first: it ends the front on the other side, and beats what lies between.
        for one in sorted(fitting, key=lambda one: (one.bytes, one.likely_us)):
            if not self._known(one.spec, one.workload) and not self._beaten(one):
                self._add(one.spec, one.workload)
        best = self.result.best
        if best is None and not self.rivals.points:
            self._smallest(candidates)
        elif best is not None and not self.space.always_offload:
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
                if job.vocab_parallel and spec.name in NOT_WITH:
                    continue
                barriers = BARRIERS * job.vocab_parallel
                pairs = bool(job.overlap_moe_expert_parallel_comm)
                sized = replace(spec, microbatches=microbatches, barriers=barriers, overlap=pairs)
                order = self.rivals.unit(sized)
                splits = self.space.splits(job, order, peak_sets(order.ranks))
                each = (self._candidate(sized, job, split) for split in splits)
                found += [one for one in each if one is not None]
        if not found and not self.rivals.points:
            layers, pp = self.space.job.num_layers, self.space.pp
            fix = "give other --schedules or --chunks"
            if not self.space.balance and layers % pp:
                fix = "leave out --no-balance, with which Megatron's flags have to divide them"
            raise PlanError(
                f"none of {', '.join(self.space.schedules)} is possible with {layers} layers on "
                f"{pp} ranks; {fix}"
            )
        found.sort(key=lambda one: (one.likely_us, one.bytes))
        self.result.candidates = len(found)
        self.progress(f"{len(found)} candidates")
        return found

    def _candidate(self, spec: ScheduleSpec, job: Job, split: Split) -> Candidate | None:
        """None for what is of no interest beside ``rivals``."""
        work = self.space.workload(job, spec.microbatches, split)
        order, costs = self.rivals.unit(spec), work.costs.computation()
        bound = makespan_bound(order.placement, spec.microbatches, costs)
        bound = max(bound, spec.microbatches * max(rank_work(costs, order.placement)))
        if self.rivals.points and self.rivals.leave_out(order.placement, work, bound):
            return None
        self.rivals.made += 3 * order.placement.num_stages * order.microbatches
        return likely(replace(spec, costs=work.costs), work, order, bound)

    def _add(self, spec: ScheduleSpec, work: Workload) -> Point | None:
        """Simulate a point; None if the search has made all its passes, or nothing keeps a cap."""
        passes = 3 * spec.placement.num_stages * spec.microbatches
        passes *= _CAP if spec.cap is not None else _OFFLOAD if spec.offload is not None else 1
        passes *= _VOCABULARY if spec.barriers else _OVERLAP if spec.overlap else 1
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
        return self.rivals.beat(one.likely_us, one.bytes) or any(
            p.makespan_us <= one.likely_us
            and p.worst.total <= one.bytes
            and (host or not p.host_bytes)
            for p in self.result.points
        )

    def _may_win(self, bound_us: Fraction) -> bool:
        best = self.result.best
        return bound_us < self.rivals.fastest and (best is None or bound_us < best.makespan_us)

    def _is_near(self, one: Candidate) -> bool:
        """It may be the fastest, and is likely to be about as fast."""
        best = self.result.best
        near = _NEAR_SHARDED if one.spec.barriers else _FAR
        far = best is not None and one.likely_us > best.makespan_us * near
        return not far and self._may_win(one.bound_us)

    def _pairs(self, candidates: Sequence[Candidate]) -> None:
        """Passes in pairs with the likely fastest schedules, where that is left open."""
        room = self.result.budget * _NEAR
        found = [self._candidate(*one) for one in pairs_of(candidates, self.space.job)]
        for one in first_of_kinds([o for o in found if o is not None and o.bytes <= room])[:_PAIRS]:
            if self._is_near(one):
                self._add(one.spec, one.workload)

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
                work.peak(self.rivals.unit(replace(one.spec, name=name)))
                for name in ("v-zb", "v-min")
            )
            if not small <= size < large:
                continue
            tried += 1
            cap, placement = self.space.budget(work, size), one.spec.placement
            # The selector tries one more: an order need not hold its cap on every rank.
            sets = 1 + cap.most_sets(placement)
            costs = work.costs.computation()
            bound = makespan_bound(placement, work.microbatches, costs, sets)
            for name in names:
                if self._may_win(bound):
                    self._add(replace(one.spec, name=name, cap=cap), work)

    def _offload(self, large: Sequence[Candidate]) -> None:
        """Simulate what is too large on the device but may be fast, until it fits."""
        for one in large:
            for offer in self._offers(one):
                best = self.result.best
                # Likely times of these are near, and their orders take longer to make.
                late = one.spec.barriers and best and offer.likely_us > best.makespan_us
                if late or not self._may_win(one.bound_us) or offer.bytes > self.result.budget:
                    continue
                point = self._add(offer.spec, offer.workload)
                if point is not None and self.result.fits(point):
                    break

    def _less(self, candidates: Sequence[Candidate]) -> None:
        """Simulate what offload may bring under the memory of everything as fast.

        ``auto`` for the best one only: it takes much longer to plan, and frees less.
        """
        room, best = self.result.budget, self.result.best
        assert best is not None
        found: list[tuple[bool, int, Fraction, Candidate]] = []
        for one in candidates:
            other = (one.spec, one.workload) != (best.spec, best.workload)
            for offer in self._offers(one)[-1:] if one.states < room else ():
                wanted = offer.spec.offload and offer.spec.offload.wanted
                fits = offer.bytes <= room and offer.likely_us <= best.makespan_us * _SLOW
                if fits and not (other and wanted == "auto"):
                    found.append((other, offer.bytes, offer.likely_us, offer))
        # The best one's own first, then the smallest; estimates of one kind err alike.
        tried: set[tuple[str, int | None, int | None]] = set()
        for *_, offer in sorted(found, key=lambda row: row[:3]):
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
        return offers(one, self.space, self.rivals.unit(one.spec))

    def _smallest(self, candidates: list[Candidate]) -> None:
        """Nothing fits: the smallest there is, with and without offload."""
        for one in sorted(candidates, key=lambda one: (one.bytes, one.bound_us))[:_SMALLEST]:
            if not self._known(one.spec, one.workload):
                self._add(one.spec, one.workload)
        if self.space.always_offload:
            return
        found = [offer for one in candidates for offer in self._offers(one)[-1:]]
        seen: set[tuple[str, bool]] = set()
        for offer in sorted(found, key=lambda one: (one.bytes, one.bound_us)):
            spec, work = offer.spec, offer.workload
            kind = spec.name, work.split.even  # estimates of one kind err alike
            if kind not in seen and len(seen) <= _SMALLEST and not self._known(spec, work):
                seen.add(kind)
                self._add(spec, work)


_ALWAYS = 3  # points
_FAR = Fraction(21, 20)  # orders for equal costs are seldom so much slower than those for the costs
_NEAR_SHARDED = Fraction(51, 50)  # orders with passes of the vocabulary start from those
_NEAR = 1.03  # likely bytes were up to 3 % too many, seldom
_CAPS = 2  # workloads for which an order at a cap is made
_PAIRS = 4  # schedules that are tried with pairs, where both is possible
_SMALLEST = 3  # points, each with and without offload
_LESS, _SLOW = 3, Fraction(5, 4)  # points with less on the device, slower than the best by so much
