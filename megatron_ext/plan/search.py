"""The search: all configurations in one table, and the fastest that fits.

Three steps, each of which costs about ten times as much for one configuration as the one before:
closed forms of all (``rows.py``), short orders of the likely fastest (``short.py``), and whole
orders of the best of these: with little effort, then a few as training makes them. Points that are
given, the user's own flags and stock's best that fits, are rows of the same table: no answer is
slower than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..schedule import GENERATORS, ScheduleSpec
from .alone import without_pipeline
from .model import PlanError
from .point import Point, evaluate
from .result import Result, division_text
from .rows import Families, Row, rows
from .short import SLACK, Candidate, candidates, shortlist
from .slices import sliced, worth_it
from .space import SearchSpace
from .vocabulary import rank_work
from .work import SECOND, work_of


def search(
    spaces: Sequence[SearchSpace],
    budget: int,
    host_budget: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    given: Iterable[Point] = (),
    families: Families | None = None,
    *,
    alone: bool = True,
    share: float = 1.0,
) -> Result:
    """The points that are likely the fastest, with the fastest that fits among them.

    Args:
        spaces: of every division that is searched.
        budget, host_budget: as ``Result``.
        progress: called with a line now and then.
        given: points that are there before, and may be the answer.
        families: shared with other searches.
        alone: no pipeline may be the answer, where a space has one rank.
        share: of the work, for points with little effort.

    Raises:
        PlanError: no schedule is possible for this model and these devices.
    """
    one = _Search(spaces, Result(budget, host_budget), progress, families or Families())
    apart: list[Point] = []  # they need no search, and are no reason to leave out a pipeline
    for point in given:
        (one.result.points if point.is_pipeline else apart).append(point)
    one.fastest(_WORK * share)
    one.polish()
    apart += [one.result.alone] if alone and one.result.alone is not None else []
    for point in apart:
        if not any(known.key() == point.key() for known in one.result.points):
            one.result.points.append(point)
    if one.result.best is None:
        one.smallest()
        one.polish()
    if not one.result.points:
        raise PlanError(_why_none(spaces))
    return one.result


class _Search:
    """One search: its table, and the points that were made."""

    def __init__(
        self,
        spaces: Sequence[SearchSpace],
        result: Result,
        progress: Callable[[str], None],
        families: Families,
    ) -> None:
        self.spaces, self.result, self.progress = spaces, result, progress
        self.families = families

    @property
    def best_us(self) -> float:
        """Of the fastest that fits; infinite without one."""
        best = self.result.best
        return float("inf") if best is None else float(best.iteration_us)

    def rows(self, budget: float) -> list[Row]:
        """Of all divisions, what may fit; and the best point without a pipeline."""
        result = self.result
        out: list[Row] = []
        result.divisions, result.cases, result.pruned = len(self.spaces), 0, 0
        failed: PlanError | None = None
        for space in self.spaces:
            try:
                if space.pp < 2:
                    self._alone(space)
                    continue
                for found in rows(space, budget, self.families, self.best_us):
                    result.cases += 1
                    result.pruned += not found
                    out += found
            except PlanError as error:
                failed = error
        if failed is not None and not result.cases and result.alone is None:
            raise failed
        return out

    def _alone(self, space: SearchSpace) -> None:
        """Without a pipeline there is one order, so all points are made at once."""
        for job in (job for job, _ in space.jobs() if not job.cheap_recompute):
            point = without_pipeline(space, job)
            known = self.result.alone
            if self.result.fits(point) and (known is None or point.key() < known.key()):
                self.result.alone = point

    def fastest(self, work: float) -> None:
        """Simulate what is likely the fastest of what fits."""
        budget = self.result.budget
        found = sorted(self.rows(budget), key=lambda row: row.us)
        self.result.candidates = len(found)
        self.progress(f"{len(found)} configurations")
        plain = [row for row in found if row.offload is None]
        short = shortlist(plain, budget, self.families, _FITTING)
        least = short[0].us if short else float("inf")
        moved = [row for row in found if row.offload and row.us < least]
        short += shortlist(moved, budget, self.families, _FITTING // 4)
        short.sort(key=lambda one: one.us)
        self.progress(f"{len(short)} short orders")
        left, fits = work, False
        for one in self._probed(short, work):
            if one.us >= self.best_us * _CLOSE or (left < 0 and fits):
                break
            more = work_of(_quick(one.spec))
            if left < work and more > left + work:
                continue  # what takes long is made where nothing else was
            left -= more
            point = self.add(one.spec, one)
            fits = fits or (point is not None and self.result.fits(point))
        self._slices(short)

    def _probed(self, short: Sequence[Candidate], work: float) -> list[Candidate]:
        """Those that fit by an order of their own, of few microbatches, by its time."""
        seen: set[tuple[object, ...]] = set()
        left = {False: work, True: work / 4}  # with offload
        found: list[Candidate] = []
        best = self.best_us
        for one in short:
            if one.us >= best * _NEAR:
                break  # short orders err by less, mostly
            moves, more = one.row.offload is not None, work_of(_quick(one.few()))
            late = more > left[moves] + work * (best == float("inf") and not moves)
            if one.kind() in seen or late or (moves and work_of(one.spec) > work):
                continue
            seen.add(one.kind())
            left[moves] -= more
            try:
                probed = one.probed(evaluate(_quick(one.few()), one.workload))
            except ValueError:
                continue
            if probed.bytes <= SLACK * self.result.budget:
                found.append(probed)
            if probed.bytes <= self.result.budget:
                best = min(best, probed.us)
        return sorted(found, key=lambda one: one.us)

    def _slices(self, short: Sequence[Candidate]) -> None:
        """Sequences in slices, with the likely fastest schedules, where that is worth it."""
        tried: set[tuple[object, ...]] = set()
        for one in short:
            spec, job = one.spec, one.row.job
            kind = spec.name, spec.chunks, spec.barriers
            if len(tried) == _SLICED or kind in tried or not worth_it(spec, job):
                continue
            # Slices shorten what ranks wait for, and make no pass of a microbatch faster.
            busy = max(rank_work(one.workload.costs, spec.placement)) * spec.microbatches
            beside = one.workload.overhead(spec.placement).total * 1e6
            if float(busy) + beside >= self.best_us:
                continue
            tried.add(kind)
            for number in one.row.space.slices:
                self.add(sliced(spec, job, number), one)

    def add(self, spec: ScheduleSpec, one: Candidate) -> Point | None:
        """Simulate a point; None if there is none."""
        try:
            point = evaluate(_quick(spec), one.workload)
        except ValueError:
            return None
        self.result.points.append(point)
        self._tell()
        return point

    def _tell(self) -> None:
        best, text = self.result.best, "none fits yet"
        if best is not None:
            text = f"best {self.best_us / 1e3:.1f} ms on {division_text(best.job)}, {best.name}"
        self.progress(f"{len(self.result.points)} simulated, {text}")

    def polish(self) -> None:
        """Make the orders of the best as training does, until the best one is."""
        result, left = self.result, _WORK
        near = [point for point in self._quick() if point.worst.total <= SLACK * result.budget]
        for point in sorted(near, key=Point.key)[:_TRIES]:
            done = [p for p in result.points if p.spec.effort >= _full() and result.fits(p)]
            limit = min((p.iteration_us for p in done), default=None)
            if limit is not None and (left < 0 or point.iteration_us * _BETTER > limit):
                break
            left -= work_of(self._make(point).spec)
        while (best := result.best) is not None and best.spec.effort < _full():
            self._make(best)
        # The least memory is that of an order that training makes.
        while result.best is None and result.points and result.smallest in self._quick():
            self._make(result.smallest)

    def _quick(self) -> list[Point]:
        return [point for point in self.result.points if point.spec.effort < _full()]

    def _make(self, point: Point) -> Point:
        """Replace a point by the one that training makes."""
        made = evaluate(replace(point.spec, effort=_full()), point.workload)
        self.result.points.remove(point)
        self.result.points.append(made)
        self._tell()
        return made

    def smallest(self) -> None:
        """Nothing fits: the smallest there is, with and without offload."""
        found = sorted(self.rows(float("inf")), key=lambda row: row.bytes)[:_SMALL]
        self.result.candidates = max(self.result.candidates, len(found))
        short = [one for row in found for one in candidates(row, self.families)]
        for one in sorted(short, key=lambda one: (one.bytes, one.us))[:_SMALLEST]:
            self.add(one.spec, one)
        moved = [
            one
            for row in found
            if row.offload is None and row.space.offload
            for one in candidates(row._replace(offload=row.space.offload[-1]), self.families)
        ]
        seen: set[tuple[object, ...]] = set()
        for one in sorted(moved, key=lambda one: (one.bytes, one.us)):
            kind = one.spec.name, one.workload.split.even  # estimates of one kind err alike
            if kind not in seen and len(seen) < _SMALLEST:
                seen.add(kind)
                self.add(one.spec, one)


def _quick(spec: ScheduleSpec) -> ScheduleSpec:
    """With little effort where an order is searched for; such orders leave less of what offload
    could move."""
    searched = spec.offload is None and not GENERATORS[spec.name].fixed
    return replace(spec, effort=0.0) if searched else spec


def _full() -> float:
    """The effort of training's own orders."""
    return ScheduleSpec("1f1b", 2, 1).effort


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


_FITTING = 80  # candidates of the shortlist
# For orders of few microbatches, a quarter more for those with offload; as much for whole ones
# with little effort, and for those that training makes.
_WORK = 4.0 * SECOND
_NEAR, _CLOSE = 1.005, 1.02  # by which the time of short orders, and of few microbatches, errs
_SLICED = 4  # schedules that are tried with slices
_TRIES = 12  # orders that are made as training does
_BETTER = 0.96  # training's own orders are shorter than quick ones by less
_SMALL, _SMALLEST = 40, 3  # of the smallest: rows that are looked at, and points
