"""Optimization of any schedule by constraint programming, within its memory and a time limit.

The order starts as it is. Windows of it are solved by CP-SAT, all else fixed (large neighbourhood
search; Shaw, CP 1998), and for few passes the whole of it, which gives a lower bound too and may
prove the order optimal. The result is never slower than the start.

With offload, sets that leave do not count between their F and their B, and a margin of some sets is
for their copies, which the offload pass then places in every order found; it judges what keeps the
cap, and which is the fastest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from .actions import Action, Op
from .bounds import lower_bound, makespan_bound
from .effects import peak, peak_sets
from .generators import Objective
from .link import Link
from .named import time_taken
from .optimize_window import Problem, Times, Window, import_solver
from .passes.offload import offload
from .schedule import Schedule
from .simulate import run_times, simulate
from .spec import OffloadSpec

_WORK_RATE = 0.4  # CP-SAT's deterministic units a second, on one core without other work
_WHOLE = 1000  # passes; for more the exact problem gives neither orders nor a bound in minutes
_WINDOWS = 0.6  # share of the work for windows; the rest is for the exact problem
_SMALL, _LARGE = 30, 200  # passes of a window
_WINDOW_WORK = 0.4  # deterministic units for one window
_SEED = 0  # of the choice of windows
_OVERHEAD = 0.01  # the same, for making one


@dataclass(frozen=True)
class Optimized:
    """What an optimization came to. Times are in the units of the costs.

    Attributes:
        schedule: the order found; the start itself if nothing is better.
        cap: most activation sets allowed on a rank.
        objective: what was made short.
        before, after: its value at the start, and of ``schedule``.
        bound: no order on this placement with these sets is faster.
        complete: False if the wall clock ended it: then the result depends on the machine.
    """

    schedule: Schedule
    cap: int
    objective: Objective
    before: Fraction
    after: Fraction
    bound: Fraction
    complete: bool

    @property
    def gap(self) -> Fraction:
        """How far above the bound the result is, as a share of the bound; 0 if it is optimal."""
        return self.after / self.bound - 1


def optimize(
    start: Schedule,
    seconds: float,
    cap: int | None = None,
    objective: Objective = "makespan",
    away: OffloadSpec | None = None,
) -> Optimized:
    """The fastest order found in about ``seconds`` with no more memory.

    The work is counted in CP-SAT's deterministic time, so equal calls give equal results unless
    the wall clock ends one, after ``seconds``.

    Args:
        start: a valid schedule; its costs count.
        seconds: > 0.
        cap: most activation sets on a rank; default the largest peak of ``start``.
        objective: what is made short.
        away: what is offloaded, for a start with offload; the result's is planned again.

    Raises:
        ValueError: OR-tools is missing, or the schedule has joint actions, offloaded sets that
            ``away`` does not plan, passes of a sharded vocabulary, no backward passes, or more sets
            than ``cap``.
    """
    import_solver()
    start.require_whole("a search by CP-SAT")
    _refuse(start, seconds, away)
    held = max(peak_sets(start.ranks))
    if cap is not None and held > cap:
        raise ValueError(f"{start.name} keeps {held} activation sets on a rank, more than {cap}")
    most = held if cap is None else cap
    if away is not None and start.has_offload:
        return _with_offload(start, away, most, objective, seconds)
    search = _Search(start, most, objective, seconds)
    search.run()
    return search.result()


_MARGINS = (0, 1)  # sets, for copies that wait for others


def _with_offload(
    start: Schedule,
    away: OffloadSpec,
    cap: int,
    objective: Objective,
    seconds: float,
) -> Optimized:
    """Orders within the cap less a margin, taken over where their own offload keeps the cap."""
    before = time_taken(simulate(start), objective)
    best, complete = (before, start), True

    def accepts(order: Schedule) -> bool:
        nonlocal best
        plan = offload(order, away.link, away.wanted, most_sets=cap)
        fits = max(plan.peak_sets) <= cap
        if fits:
            taken = time_taken(simulate(plan.schedule), objective)
            best = min(best, (taken, replace(plan.schedule, note=plan.note)), key=lambda x: x[0])
        return fits

    for margin in _MARGINS:
        share = seconds / len(_MARGINS)
        search = _Search(best[1], cap - margin, objective, share, away.link, accepts)
        if max(search.held()) > cap - margin:
            continue
        search.run()
        complete &= search.budget.complete
    after, found = best
    span, fused = objective == "span", not start.splits_backward
    sizes = start.placement, start.microbatches, start.costs
    bound = lower_bound(*sizes, fused=fused, span=span).value
    return Optimized(found, cap, objective, before, after, min(bound, after), complete)


def _refuse(start: Schedule, seconds: float, away: OffloadSpec | None) -> None:
    if not 0 < seconds < float("inf"):
        raise ValueError(f"an optimization needs a number of seconds > 0, got {seconds}")
    if start.has_offload and away is None:
        raise ValueError(
            f"{start.name} offloads activation sets; give --offload and --offload-time again, by "
            "which new copies are planned, or --offload off"
        )
    if start.has_pairs:
        raise ValueError(
            f"{start.name} has joint forward and backward passes, which are not optimized; give "
            "another schedule, such as v-zb"
        )
    if start.barriers:
        raise ValueError(
            f"{start.name} has passes of a sharded vocabulary, which are not optimized; leave "
            "the sharded vocabulary out"
        )
    if not any(peak_sets(start.ranks)):
        raise ValueError(f"{start.name} has no backward passes, so there is nothing to optimize")


class _Budget:
    """The work of one optimization, in CP-SAT's deterministic units, and its end by the clock.

    Attributes:
        complete: False once the clock, not the work, ended something.
    """

    def __init__(self, seconds: float) -> None:
        self.work, self.done = seconds * _WORK_RATE, 0.0
        self._deadline = time.monotonic() + seconds
        self.complete = True

    def is_spent(self, share: float) -> bool:
        """True once that share of the work is done, or the time is over."""
        if time.monotonic() >= self._deadline:
            self.complete = False
        return not self.complete or self.done >= share * self.work

    def solver(self, work: float, seed: int) -> Any:
        """A CP-SAT solver that does no more than ``work``."""
        solver = import_solver().CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = max(work, 1e-3)
        solver.parameters.max_time_in_seconds = max(self._deadline - time.monotonic(), 1e-2)
        return solver

    def count(self, solver: Any) -> None:
        """Add what ``solver`` did."""
        self.done += _OVERHEAD + solver.response_proto.deterministic_time
        self.complete &= time.monotonic() < self._deadline


class _Search:
    """The state of one optimization."""

    def __init__(
        self,
        start: Schedule,
        cap: int,
        objective: Objective,
        seconds: float,
        link: Link | None = None,
        accepts: Callable[[Schedule], bool] | None = None,
    ) -> None:
        self.start, self.objective = start.compute(), objective
        durations = start.costs.durations(start.placement)
        self.durations, away = durations.reduced(), {}
        if link is not None:
            times = link.times(start.placement, self.durations)
            self.durations = times.durations
            away = {
                a[1:]: (times.to_host[a.stage], times.to_device[a.stage])
                for _, _, a in start.actions()
                if a.op is Op.OFFLOAD
            }
        self.accepts = accepts
        self.unit = Fraction(durations.forward[0], durations.scale * self.durations.forward[0])
        rows: Any = self.start.ranks  # of plain actions: there are no joint ones
        self.problem = Problem(rows, start.placement, self.durations, cap, objective, away)
        self.now = self._times(rows)
        self.best = self.problem.value(self.now)
        self.bound = math.ceil(self._known_bound() / self.unit)
        self.random = random.Random(_SEED)
        self.budget = _Budget(seconds)
        self.failed: set[tuple[object, ...]] = set()  # shapes of windows that gave nothing

    def _known_bound(self) -> Fraction:
        start = self.start
        if self.objective == "makespan":
            cap = None if self.problem.away else self.problem.cap
            return makespan_bound(start.placement, start.microbatches, start.costs, cap)
        return start.microbatches * max(start.costs.per_rank_work(start.placement))

    def held(self) -> list[int]:
        """Most sets that each rank holds in the order that it starts from."""
        rows: Any = self.start.ranks
        return [
            peak(x for a in row for x in (a in self.problem.holds, -len(self.problem.freed[a])))
            for row in rows
        ]

    def _times(self, rows: Sequence[Sequence[Action]]) -> Times:
        begins, _ = run_times(self.start.with_ranks(rows), self.durations)
        pairs = (pair for row, times in zip(rows, begins) for pair in zip(row, times))
        return dict(sorted(pairs, key=lambda pair: (pair[1], pair[0])))

    def _rows(self, order: Iterable[Action]) -> list[list[Action]]:
        rows: list[list[Action]] = [[] for _ in self.start.ranks]
        for action in order:
            rows[self.problem.rank[action]].append(action)
        return rows

    def run(self) -> None:
        """Windows, then the whole if it is small; else windows at other places to the end."""
        if len(self.now) <= _WHOLE:
            self._windows(_WINDOWS)
            if self._goes_on(1):
                self.bound = self._improve(0, self.best, self.budget.work - self.budget.done)
        while len(self.now) > _WHOLE and self._goes_on(1):
            self._windows(1)

    def _goes_on(self, share: float) -> bool:
        return self.best > self.bound and not self.budget.is_spent(share)

    def _windows(self, share: float) -> None:
        """Windows at all places, larger ones once small ones give nothing more, until ``share`` of
        the work is done."""
        size, last = _SMALL, max(self.now.values())
        while size <= min(_LARGE, len(self.now)):
            before = self.best
            # As long as so many passes take on average.
            width = max(1, last * size // len(self.now))
            shift = self.random.randrange(width)
            places = list(range(shift - width, last, max(1, width // 2)))
            self.random.shuffle(places)
            for begin in places:
                if not self._goes_on(share):
                    return
                self._improve(begin, begin + width, _WINDOW_WORK)
            if self.best == before:
                size = size * 3 // 2

    def _improve(self, begin: int, end: int, work: float) -> int:
        """Take over what a window at its best is, if no worse; a lower bound of all that differ
        from the order now in the window only."""
        window = Window.of(self.problem, self.now, begin, end)
        if not window.free or max(window.fixed) >= self.best:
            self.budget.done += _OVERHEAD
            return self.best
        shape = window.shape(self.best)
        if shape in self.failed and len(window.free) < len(self.now):
            self.budget.done += _OVERHEAD
            return self.bound
        solver = self.budget.solver(work, self.random.randrange(1 << 31))
        found, bound = window.solve(solver, self.bound, self.best)
        self.budget.count(solver)
        was = self.best
        if found is not None:
            before = [a for a, start in self.now.items() if start < begin]
            after = [a for a, start in self.now.items() if start >= end]
            free = sorted(found, key=lambda a: (found[a], a))
            times = self._times(self._rows([*before, *free, *after]))
            value = self.problem.value(times)
            taken = value <= self.best
            if taken and self.accepts is not None:
                taken = self.accepts(self.start.with_ranks(self._rows(times)))
            if taken:
                self.now, self.best = times, value
        if self.best == was:
            self.failed.add(shape)
        return bound

    def result(self) -> Optimized:
        """The schedule, never slower than the start."""
        found = self.start.with_ranks(self._rows(self.now))
        was, now = (time_taken(simulate(one), self.objective) for one in (self.start, found))
        if now >= was:
            found, now = self.start, was
        bound = min(self.bound * self.unit, now)
        cap, complete = self.problem.cap, self.budget.complete
        return Optimized(found, cap, self.objective, was, now, bound, complete)
