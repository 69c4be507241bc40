"""The search over tensor, pipeline, data, context and expert parallel sizes.

For every division, microbatch size and kind of recompute there is a closed form: no order is faster
than a rank's share of the work plus what the iteration does beside its passes, and no rank has
fewer bytes than its share of the states. The likely fastest of them is searched first, as ``plan``
searches one division (``search.py``); what cannot be faster than a point that was found is left
out before any schedule is made for it. The number of passes of all orders is limited, which counts
the same on every machine, so the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from ..schedule import Schedule, ScheduleSpec
from .activations import SetBytes, stage_set, with_shard
from .collectives import ATTENTION, Links, Overhead, Overlap, overhead
from .layout import Split, Stage
from .memory import StageBytes
from .model import Job, PlanError
from .parameters import Count, StateBytes, shard_parameters, stage_parameters, state_bytes
from .point import Key, Point, front
from .rivals import Rivals
from .search import MOST_PASSES, Result, Search
from .space import SearchSpace
from .times import least_times, vocabulary_times


@dataclass(frozen=True)
class Placed:
    """A simulated point of one division.

    Attributes:
        point: its passes.
        overhead: of an iteration beside them.
    """

    point: Point
    overhead: Overhead

    @property
    def job(self) -> Job:
        """With the division."""
        return self.point.workload.job

    @property
    def iteration_us(self) -> Fraction:
        """Passes, then what is beside them, in microseconds."""
        return self.point.makespan_us + round(self.overhead.total * 1e6)

    def key(self) -> Key:
        """What the front compares."""
        return self.iteration_us, self.point.worst.total, self.point.host_bytes


class Case(NamedTuple):
    """One division with a microbatch size and a kind of recompute, by closed forms.

    Attributes:
        job: with all of them.
        microbatches: of one iteration on one data-parallel rank.
        bound_us: no order is faster, with what is beside the passes.
        likely_us: with the idle time of the schedules that fit, roughly.
        beside_us: least beside the passes.
        states: a rank's share of parameters, gradients and optimizer states, in bytes.
        least: states, and the activations of a schedule with little memory, roughly.
    """

    job: Job
    microbatches: int
    bound_us: float
    likely_us: float
    beside_us: float
    states: int
    least: int

    def preference(self, budget: int) -> tuple[bool, float, int]:
        """The likely fastest of those that fit first."""
        return self.least > budget, self.likely_us, self.least


@dataclass
class GridResult:
    """What was found.

    Attributes:
        budget: bytes a rank.
        searches: division by division, in the order in which they were searched.
        divisions: how many are possible, with microbatch sizes and recompute ``cases``.
        searched: cases for which schedules were made.
        skipped: cases left out as unlikely, or because the search had made all its passes.
        alone: without a pipeline: the fastest case that fits (``likely_us`` is then its time).
    """

    budget: int
    points: list[Placed] = field(default_factory=list)
    searches: list[tuple[SearchSpace, Result]] = field(default_factory=list)
    divisions: int = 0
    cases: int = 0
    searched: int = 0
    skipped: int = 0
    alone: Case | None = None

    @property
    def pruned(self) -> int:
        """Cases that cannot be faster than the best point, or do not fit, by closed forms."""
        return self.cases - self.searched - self.skipped

    def fits(self, placed: Placed) -> bool:
        """True if it keeps the budgets."""
        return self.searches[0][1].fits(placed.point)

    @property
    def front(self) -> list[Placed]:
        """The points that fit and that no other one beats; fastest first."""
        return front(filter(self.fits, self.points), Placed.key)

    @property
    def best(self) -> Placed | None:
        """The fastest that fits."""
        return min(
            filter(self.fits, self.points),
            key=lambda one: (one.iteration_us, one.point.host_bytes, one.point.worst.total),
            default=None,
        )

    @property
    def smallest(self) -> Placed:
        """The point with fewest bytes on its fullest rank."""
        return min(self.points, key=lambda one: (one.point.worst.total, one.iteration_us))

    def search_of(self, placed: Placed) -> tuple[SearchSpace, Result]:
        """The search that found a point, and its space."""
        return next(s for s in self.searches if any(p is placed.point for p in s[1].points))


_NO_OVERLAP = Overlap()


class Grid:
    """One search over divisions.

    Args:
        jobs: every division, as ``divisions`` lists them.
        space_of: the search space of a division, a microbatch size and a kind of recompute.
        variants: microbatch sizes and kinds of recompute of a division, as jobs.
        gpu, node: the device, and how many a node has.
        budget, host_budget: bytes a rank, as ``Search``.
        effort: a factor on the passes.
        overlap: which data-parallel exchange passes hide.
        progress: called with a line now and then.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        space_of: Callable[[Job], SearchSpace],
        variants: Callable[[Job], Iterable[Job]],
        links: Links,
        budget: int,
        host_budget: int | None = None,
        effort: float = 1.0,
        overlap: Overlap = _NO_OVERLAP,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.jobs, self.space_of, self.variants, self.links = jobs, space_of, variants, links
        self.host_budget, self.effort, self.overlap = host_budget, effort, overlap
        self.progress, self.passes_left = progress, _PASSES * effort
        self.result = GridResult(budget)
        self._units: dict[int, dict[ScheduleSpec, Schedule]] = {}

    def run(self) -> GridResult:
        """Search.

        Raises:
            PlanError: no division has a schedule.
        """
        result = self.result
        cases = self._cases()
        fitting = [case for case in cases if case.states <= result.budget]
        left = sorted(fitting, key=lambda case: case.preference(result.budget))
        others, unlikely = self._fastest(left)
        searched = self._small([*others, *unlikely])
        result.skipped = sum(case not in searched for case in unlikely)
        if not result.points:
            for case in sorted(cases, key=lambda case: (case.least, case.likely_us))[:_LEAST]:
                self._search(case)
        if not result.points:
            raise PlanError(
                "no division of these devices has a schedule for this model; give --pp, "
                "--schedules or --chunks"
            )
        return result

    def _fastest(self, cases: list[Case]) -> tuple[list[Case], list[Case]]:
        """Search what may be the fastest; what cannot be, not much slower, and what is unlikely."""
        others, unlikely = [], []
        for number, case in enumerate(cases):
            best = self.result.best
            if best is not None and case.bound_us >= best.iteration_us:
                if case.bound_us < best.iteration_us * _SLOWER:
                    others.append(case)
            elif self.passes_left <= 0 or (
                best is not None and case.likely_us > best.iteration_us * _UNLIKELY
            ):
                unlikely.append(case)
            else:
                self._search(case, f"{number + 1} of {len(cases)}")
        return others, unlikely

    def _small(self, cases: list[Case]) -> list[Case]:
        """Search divisions with less memory than any point, and not much slower; which."""
        searched: list[Case] = []
        for case in sorted(cases, key=lambda case: (case.least, case.likely_us))[:_LEAST]:
            smallest = min((p.point.worst.total for p in self.result.points), default=None)
            if self.passes_left > 0 and (smallest is None or case.least < smallest):
                self._search(case, "small")
                searched.append(case)
        return searched

    def _cases(self) -> list[Case]:
        cases, alone = [], []
        for number, job in enumerate(self.jobs):
            self.progress(f"closed forms of {number} of {len(self.jobs)} divisions")
            for variant in self.variants(job):
                case = self.case(variant)
                if case is not None and job.pipeline_model_parallel_size > 1:
                    cases.append(case)
                elif case is not None and case.least <= self.result.budget:
                    alone.append(case)
        self.result.divisions, self.result.cases = len(self.jobs), len(cases)
        self.result.alone = min(alone, key=lambda case: case.likely_us, default=None)
        return cases

    def case(self, job: Job) -> Case | None:
        """Closed forms; None if the microbatches do not divide the batch."""
        try:
            m = job.microbatches()
        except PlanError:
            return None
        pp, layers = job.pipeline_model_parallel_size, job.num_layers
        # Without a pipeline the loss's F and B follow each other; it has no more of either.
        split = Split((layers,)) if pp == 1 else Split((0, layers, 0))
        times = least_times(job, split, self.links.gpu)
        shard = sum((vocabulary_times(job, self.links.gpu) or (0.0,) * 5)[:4])
        parts = _pieces(job)
        work = sum(map(sum, times)) / pp + shard
        if pp > 1:
            # Neither a layer nor an end of the model can be divided.
            work = max(work, sum(times[0]), sum(times[-1]))
            if len(set(job.layers)) == 1:
                work = max(work, sum(times[1]) * -(-layers // pp) / layers + shard)
        count, states = _share(parts, pp)
        forward = sum(time.forward for time in times) / pp
        passes = [(forward, work - forward)]
        one = [StageBytes(count, states, parts[0][1].sets)]
        attention = sum(any(kind in ATTENTION for kind in kinds) for kinds in job.layers)
        beside = overhead(job, self.links, [one], passes, [attention // pp], m, self.overlap)
        sets = sum(number * part.sets.bytes_f_to_b for number, part in parts)
        passing = max(part.sets.recompute_bytes + part.sets.layer for _, part in parts)
        room = (self.result.budget - states.total - passing) / max(1, sets)
        idle = next((idle for least, idle in _IDLE if room >= least), _NO_ROOM) * (pp - 1)
        bound = (m * work + beside.total) * 1e6
        return Case(
            *(job, m, bound * _ROUNDING, bound + idle * forward * 1e6, beside.total * 1e6),
            states.total,
            states.total + passing + sets * (pp + 4) // (3 * pp) if pp > 1 else
            states.total + passing + sets + parts[-1][1].sets.logits,
        )  # fmt: skip

    def _search(self, case: Case, which: str = "") -> None:
        """The points of one case that may be on the front."""
        space = self.space_of(case.job)
        beside = Fraction(round(case.beside_us * _ROUNDING))
        points = [
            (placed.iteration_us - beside, placed.point.worst.total)
            for placed in self.result.front
            if not placed.point.host_bytes
        ]
        rivals = Rivals(points, self._units.setdefault(space.pp, {}))
        effort = max(0.0, min(self.passes_left, _PASSES * self.effort * _SHARE)) / MOST_PASSES
        search = Search(
            space,
            self.result.budget,
            self.host_budget,
            effort,
            lambda line: None,
            rivals,
        )
        self.result.searched += 1
        try:
            found = search.run()
        except PlanError:
            return  # no schedule has so many stages, or so few microbatches
        if not found.points and self.result.searches:
            self.passes_left -= rivals.made
            return
        self.result.searches.append((space, found))
        self.passes_left -= rivals.made + MOST_PASSES * effort - search.passes_left
        self.result.points += [self.placed(point) for point in found.points]
        best = self.result.best
        fastest = f"best {float(best.iteration_us) / 1e3:.1f} ms" if best else "none fits yet"
        self.progress(f"{text(case.job)}, {which}: {len(self.result.points)} simulated, {fastest}")

    def placed(self, point: Point) -> Placed:
        """With what an iteration does beside its passes."""
        work, placement = point.workload, point.spec.placement
        rows = [[work.stages[s] for s in row] for row in placement.stages]
        costs = work.costs.stages or ()
        passes = [
            (
                float(sum(costs[s][0] for s in row)) / 1e6,
                float(sum(costs[s][1] + costs[s][2] for s in row)) / 1e6,
            )
            for row in placement.stages
        ]
        layers = work.job.layers
        stages = work.split.stages
        attention = [
            sum(any(k in ATTENTION for k in layers[n]) for s in row for n in stages[s].layers)
            for row in placement.stages
        ]
        beside = overhead(
            work.job, self.links, rows, passes, attention, work.microbatches, self.overlap
        )
        return Placed(point, beside)


def text(job: Job) -> str:
    """A division for people."""
    sizes = [
        ("TP", job.tensor_model_parallel_size),
        ("PP", job.pipeline_model_parallel_size),
        ("DP", job.data_parallel_size),
        ("CP", job.context_parallel_size),
        ("EP", job.expert_model_parallel_size),
    ]
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one device"


def variants(job: Job, sizes: Sequence[int], cheap: Sequence[bool], *, full: bool) -> Iterable[Job]:
    """A division with every microbatch size and kind of recompute.

    Args:
        sizes: of microbatches, in samples.
        cheap: which of with and without cheap recompute.
        full: full recompute may be chosen.
    """
    for size in sizes:
        for each in cheap:
            yield job.with_(micro_batch_size=size, cheap_recompute=each)
        if full:
            yield replace(
                job,
                micro_batch_size=size,
                cheap_recompute=False,
                recompute_granularity="full",
                recompute_method="uniform",
                recompute_modules=(),
            )


def _pieces(job: Job) -> list[tuple[int, StageBytes]]:
    """How many of each: the embedding, a layer of every kind, the end with the loss, shards."""
    stages = [(1, Stage(range(0), first=True))]
    for kinds in sorted(set(job.layers)):
        number = job.layers.index(kinds)
        stages.append((job.layers.count(kinds), Stage(range(number, number + 1))))
    stages.append((1, Stage(range(0), last=True, predicts=True)))
    out = []
    if job.vocab_parallel:
        count = shard_parameters(job)
        sets = with_shard(job, SetBytes(0, 0))
        own = StageBytes(count, state_bytes(job, count), sets)
        out.append((job.pipeline_model_parallel_size, own))
    for number, stage in stages:
        count = stage_parameters(job, stage)
        out.append((number, StageBytes(count, state_bytes(job, count), stage_set(job, stage))))
    return out


def _share(parts: Sequence[tuple[int, StageBytes]], pp: int) -> tuple[Count, StateBytes]:
    """An equal part of all of them for every pipeline rank."""
    total, states = Count(), StateBytes()
    for number, (count, each, _) in parts:
        total += Count(number * count.dense, number * count.expert, number * count.other)
        states += StateBytes(
            number * each.parameters, number * each.gradients, number * each.optimizer
        )
    return (
        Count(total.dense // pp, total.expert // pp, total.other // pp),
        StateBytes(states.parameters // pp, states.gradients // pp, states.optimizer // pp),
    )


# Idle time of a schedule, in forward passes of a rank for each pipeline rank but one, where it has
# room for this share of 1F1B's activations: V-ZB, V-Half, V-Min (arXiv 2405.15362, table 1).
_IDLE = ((1.0, 0.5), (0.55, 2.0), (0.4, 3.0))
_NO_ROOM = 6.0  # offload, or nothing
_ROUNDING = 0.999  # costs are whole microseconds
_PASSES = MOST_PASSES // 2  # of all orders; those for equal costs are among them
_UNLIKELY = 1.1
_SLOWER = 1.3  # on the front, in times of the fastest
_LEAST = 4  # cases that are searched for the front's small end
_SHARE = 0.1  # of all passes, for one case
