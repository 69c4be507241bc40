"""The search: which points can be best or on the front, and only those are generated.

Every candidate has a lower bound of its time (``makespan_bound``), and a likely time and likely
bytes, from the same schedule for equal costs and few microbatches. First come those that may be the
fastest: the likely fastest first, and none whose bound is no better than what was found. Then those
that may be on the front, unless a point that is there is as fast and as small as they likely are.
What the search may cost is counted in passes, not in seconds, so that its result does not depend on
the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from ..schedule.bounds import makespan_bound
from ..schedule.costs import Costs
from ..schedule.effects import peak_sets
from ..schedule.generators import GENERATORS
from ..schedule.generators.cap import v_cap_limits
from ..schedule.passes.offload import wanted_chunks
from ..schedule.schedule import Schedule
from ..schedule.simulate import run_times
from .cases import Space
from .layout import Split
from .memory import message_bytes, rank_bytes
from .model import Job, PlanError
from .point import Away, Case, Point, Shape, evaluate, front

EFFORT = 2_200_000  # weighted passes; about half a minute of one core
# Of a pass, beside ``Generator.effort``: offload plans take longest.
_OFFLOAD_WEIGHT, _AUTO_WEIGHT = 6.0, 24.0
# Offload gets what is left, and this share of all for itself if something is too large without.
_FOR_OFFLOAD = 0.4


@dataclass(frozen=True)
class Candidate:
    """What might be generated.

    Attributes:
        shape, case: what it is.
        bound_us: no order is faster.
        likely_us, bytes: what the order for equal costs takes, and holds on the fullest rank.
        states: of these, what stays without any activation.
    """

    shape: Shape
    case: Case
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
        skipped: candidates that were left because the effort was spent.
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
        effort: a factor on what the search may cost.
        progress: called with a line now and then.
    """

    def __init__(
        self,
        space: Space,
        budget: int,
        host_budget: int | None = None,
        effort: float = 1.0,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.space, self.progress = space, progress
        self.left = self.all = EFFORT * effort
        self.result = Result(budget, host_budget)
        self.units: dict[tuple[Shape, int], Schedule] = {}

    def run(self) -> Result:
        """Search.

        Raises:
            PlanError: no schedule is possible for this model and number of ranks.
        """
        candidates = self._candidates()
        if not candidates:
            raise PlanError(
                f"none of {', '.join(self.space.schedules)} is possible with "
                f"{self.space.job.num_layers} layers on {self.space.pp} ranks; give other "
                "--schedules or --chunks"
            )
        self.result.candidates = len(candidates)
        budget = self.result.budget
        fitting = [one for one in candidates if one.bytes <= budget * _NEAR]
        large = [one for one in candidates if one.bytes > budget and one.states < budget]
        keep = self.all * _FOR_OFFLOAD if large and self.space.offload else 0.0
        self._simulate(fitting, keep)
        self._caps(candidates)
        if self.space.offload:
            self._offload([one for one in large if self._may_win(one)])
            if self.result.best is not None:
                self._offload_more()
        if self.result.best is None:
            self._smallest(candidates)
        return self.result

    def _candidates(self) -> list[Candidate]:
        found: list[Candidate] = []
        jobs = self.space.jobs()
        for shape in self.space.shapes():
            placement = shape.placement(self.space.pp)
            if placement.num_stages > max(self.space.job.num_layers, 1) + 2:
                continue
            for job, microbatches in jobs:
                for split in self._splits(job, shape, microbatches):
                    found.append(self._candidate(shape, job, microbatches, split))
        found.sort(key=lambda one: (one.likely_us, one.bytes))
        self.progress(f"{len(found)} candidates")
        return found

    def _splits(self, job: Job, shape: Shape, microbatches: int) -> Iterable[Split]:
        """Megatron's own, and balanced ones that differ."""
        placement = shape.placement(self.space.pp)
        seen: set[tuple[int, ...]] = set()
        order = self._unit(shape, microbatches)
        for split in (
            self.space.even(job, placement.num_stages),
            self.space.balanced_in_time(job, placement),
            self.space.balanced_in_bytes(job, order, peak_sets(order.ranks)),
        ):
            if split is not None and split.counts not in seen:
                seen.add(split.counts)
                yield split

    def _candidate(self, shape: Shape, job: Job, microbatches: int, split: Split) -> Candidate:
        case = self.space.case(job, microbatches, split)
        order = self._unit(shape, microbatches)
        size = max(r.total for r in rank_bytes(order, case.stages, message_bytes(job)))
        bound = makespan_bound(order.placement, microbatches, case.costs)
        least = self.space.least_states(case, order.placement)
        return Candidate(shape, case, bound, self._likely(order, case), size, least)

    def _likely(self, order: Schedule, case: Case) -> Fraction:
        """Its time for few microbatches, and every further one on the rank with most work."""
        durations = case.costs.durations(order.placement)
        last = max(row[-1] for row in run_times(order, durations)[1])
        more = case.microbatches - order.microbatches
        return Fraction(last, durations.scale) + more * max(
            case.costs.per_rank_work(order.placement)
        )

    def _unit(self, shape: Shape, microbatches: int) -> Schedule:
        """The schedule at equal costs, with as many microbatches as its peak needs."""
        few = min(microbatches, 2 * self.space.pp)
        key = shape, few
        if key not in self.units:
            self.units[key] = shape.make(self.space.pp, few, Costs())
        return self.units[key]

    def _spend(self, shape: Shape, case: Case, away: Away | None, keep: float = 0.0) -> bool:
        """True if one more may be generated; then it is paid for."""
        passes = 3 * self.space.pp * shape.chunks * case.microbatches
        weight = GENERATORS[shape.name].effort
        if away is not None:
            weight += _AUTO_WEIGHT if away.what == "auto" else _OFFLOAD_WEIGHT
        # The first few are free: there is always an answer.
        if passes * weight > self.left - keep and len(self.result.points) >= _ALWAYS:
            return False
        self.left -= passes * weight
        return True

    def _add(self, shape: Shape, case: Case, away: Away | None) -> Point:
        point = evaluate(shape, case, away, self.space.pp)
        self.result.points.append(point)
        best = self.result.best
        fastest = f"best {float(best.makespan_us) / 1e3:.1f} ms" if best else "none fits yet"
        self.progress(f"{len(self.result.points)} simulated, {fastest}")
        return point

    def _beaten(self, one: Candidate) -> bool:
        return any(
            p.makespan_us <= one.likely_us and p.worst.total <= one.bytes and not p.host_bytes
            for p in self.result.points
        )

    def _may_win(self, one: Candidate) -> bool:
        best = self.result.best
        return best is None or one.bound_us < best.makespan_us

    def _simulate(self, candidates: list[Candidate], keep: float) -> None:
        """What may win first, then what may be on the front."""
        rest = []
        for one in candidates:
            best = self.result.best
            far = best is not None and one.likely_us > best.makespan_us * _FAR
            if far or not self._may_win(one):
                rest.append(one)
            elif self._spend(one.shape, one.case, None):
                self._add(one.shape, one.case, None)
            else:
                self.result.skipped += 1
        # Smallest first: it ends the front on the other side, and beats what lies between.
        for one in sorted(rest, key=lambda one: (one.bytes, one.likely_us)):
            if self._beaten(one):
                continue
            if self._spend(one.shape, one.case, None, keep):
                self._add(one.shape, one.case, None)
            else:
                self.result.skipped += 1

    def _caps(self, candidates: list[Candidate]) -> None:
        """V placement at the largest cap that fits, where v-zb is too large."""
        capped = [name for name in self.space.schedules if GENERATORS[name].takes_memory_cap]
        if not capped:
            return
        pp, budget = self.space.pp, self.result.budget
        low, high = v_cap_limits(pp)
        tried = 0
        seen: set[tuple[Job, tuple[int, ...]]] = set()
        for one in candidates:
            key = one.case.job, one.case.split.counts
            if not one.shape.placement(pp).is_vee() or key in seen or tried >= _CAPS:
                continue
            seen.add(key)
            large = self._sized(one, Shape("v-zb", 2))
            small = self._sized(one, Shape("v-min", 2))
            if large <= budget or small > budget:
                continue
            for name in capped:
                tried += self._climb(name, one, (low, small), (high, large))

    def _climb(self, name: str, one: Candidate, low: tuple[int, int], high: tuple[int, int]) -> int:
        """Look for the largest cap that fits, between two (cap, bytes); 1 if any was tried."""
        placement, budget = one.shape.placement(self.space.pp), self.result.budget
        case = one.case
        for tries in range(_CLIMBS):
            share = Fraction(budget - low[1], high[1] - low[1])
            cap = low[0] + int(share * (high[0] - low[0]))
            bound = makespan_bound(placement, case.microbatches, case.costs, cap)
            best = self.result.best
            if (cap == low[0] and tries) or (best is not None and bound >= best.makespan_us):
                return int(tries > 0)
            shape = Shape(name, 2, memory_cap=cap)
            if not self._spend(shape, case, None):
                self.result.skipped += 1
                return int(tries > 0)
            point = self._add(shape, case, None)
            size = point.worst.total
            if size <= budget:
                low = cap, size
            elif cap == low[0]:
                return 1  # the least there is
            else:
                high = cap, size
        return 1

    def _sized(self, one: Candidate, shape: Shape) -> int:
        order = self._unit(shape, one.case.microbatches)
        message = message_bytes(one.case.job)
        return max(r.total for r in rank_bytes(order, one.case.stages, message))

    def _offload(self, candidates: list[Candidate]) -> None:
        """What is too large on the device but fast: offload may bring it under the budget."""
        for one in candidates:
            for away in self._offers(one):
                if not self._may_win(one) or self._offloaded_bytes(one, away) > self.result.budget:
                    continue
                if not self._spend(one.shape, one.case, away):
                    self.result.skipped += 1
                elif self.result.fits(self._add(one.shape, one.case, away)):
                    break

    def _offers(self, one: Candidate) -> list[Away]:
        """Kinds of offload that its link can carry; what takes longest to plan only if need be."""
        placement = one.shape.placement(self.space.pp)
        out: list[Away] = []
        if one.shape.memory_cap is not None:
            return out  # with offload a cap is of what stays on the device: another point
        for what in self.space.offload:
            away = self.space.away(one.case, placement, what)
            if away is None:
                continue
            if what != "auto" and self._load(one.shape, away) > _CROWDED:
                continue
            if what == "auto" and out:
                continue
            out.append(away)
        return out

    def _load(self, shape: Shape, away: Away) -> Fraction:
        """Share of its time that a rank's link would need for what it is asked to move."""
        chunks = wanted_chunks(away.what, shape.chunks)
        moved = Fraction(away.time) * (0 if chunks is None else chunks) / shape.chunks
        return moved if away.policy == "dual" else 2 * moved

    def _offloaded_bytes(self, one: Candidate, away: Away) -> int:
        """Likely bytes of the fullest rank: two sets on their way or in use, of those that leave.

        PipeOffload, section 3 (between two and three sets stay under full offload). ``auto`` sends
        what the link carries, the longest kept first, so what stays falls with the square.
        """
        placement = one.shape.placement(self.space.pp)
        wanted = wanted_chunks(away.what, one.shape.chunks)
        count = one.shape.chunks if wanted is None else int(wanted)
        stages = list(one.case.stages)
        for row in placement.stages:
            for stage in row[:count]:
                sets = stages[stage].sets
                gone = sets._replace(until_b=0, until_w=0, layer=sets.layer + 2 * sets.until_b)
                stages[stage] = stages[stage]._replace(sets=gone)
        order = self._unit(one.shape, one.case.microbatches)
        least = max(r.total for r in rank_bytes(order, stages, message_bytes(one.case.job)))
        if wanted is not None:
            return least
        both = Fraction(away.time) * (1 if away.policy == "dual" else 2)
        stays = 1 - min(Fraction(1), 1 / both)
        return least + int(max(0, one.bytes - least) * stays**2)

    def _offload_more(self) -> None:
        """The best point with less on the device: one more point of the front, if it is free."""
        best = self.result.best
        if best is None or best.away is not None:
            return
        one = Candidate(best.shape, best.case, best.makespan_us, best.makespan_us, 0, 0)
        for away in self._offers(one)[-1:]:
            free = self._load(best.shape, away) <= 1 or away.what == "auto"
            if free and self._spend(best.shape, best.case, away):
                self._add(best.shape, best.case, away)

    def _smallest(self, candidates: list[Candidate]) -> None:
        """Nothing fits: the smallest there is, with and without offload."""
        ordered = sorted(candidates, key=lambda one: (one.bytes, one.bound_us))
        for one in ordered[:_SMALLEST]:
            self._add(one.shape, one.case, None)
        if not self.space.offload:
            return
        offers = [
            (self._offloaded_bytes(one, away), one.bound_us, number, one, away)
            for number, one in enumerate(candidates)
            for away in self._offers(one)[-1:]
        ]
        seen: set[tuple[str, bool]] = set()
        for *_, one, away in sorted(offers, key=lambda offer: offer[:3]):
            kind = one.shape.name, one.case.split.even  # estimates of one kind err alike
            if kind not in seen and len(seen) < _SMALLEST + 1 and not self._has(one, away):
                seen.add(kind)
                self._add(one.shape, one.case, away)

    def _has(self, one: Candidate, away: Away) -> bool:
        wanted = one.shape, one.case.job, one.case.split, away
        return any(
            (p.shape, p.case.job, p.case.split, p.away) == wanted for p in self.result.points
        )


_ALWAYS = 3  # points
_FAR = Fraction(21, 20)  # orders for equal costs are seldom so much slower than those for the costs
_NEAR = 1.03  # likely bytes were up to 3 % too many, seldom
_CAPS = 2  # cases for which an order at a cap is generated
_CLIMBS = 3  # caps that are generated for each of them
_CROWDED = Fraction(9, 8)  # beyond, a link that is asked for more only makes compute wait
_SMALLEST = 3  # points, each with and without offload
