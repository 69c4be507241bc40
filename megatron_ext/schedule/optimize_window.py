"""A part of a schedule as a job-shop problem with heads and tails, solved by CP-SAT.

All passes that start in a stretch of time, the *window*, are free; those before it stay where they
are, those after it keep their order. A window over all passes is the exact problem. OR-tools is
imported here alone, and not before a window is solved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .actions import Action, Op
from .costs import Durations
from .effects import FREES, given
from .engine import earliest
from .generators import Objective
from .placement import Placement
from .tasks import Tasks, sources

Times = dict[Action, int]  # start of every pass, earliest first


def import_solver() -> ModuleType:
    """OR-tools' CP-SAT.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ValueError(
            f"--optimize needs OR-tools ({error}): pip install 'megatron-ext[optimize]'"
        ) from None
    return cp_model  # type: ignore[no-any-return]


class Problem:
    """What never changes while a schedule is optimized.

    Args:
        rows: every rank's passes, none of them joint.
        placement: rank and chunk of every stage.
        durations: of the passes and hops.
        cap: most activation sets on a rank.
        objective: what is made short.
        away: (stage, microbatch) of sets that are on the host between their F and their B, and the
            times of their copies to the host and back, before and after which they count here.

    Attributes:
        rank, took: of every pass.
        before, after: of every pass, the (pass, latency) that it waits for and that wait for it,
            on whichever rank.
        following: of every pass, those of the next microbatch that must come later.
        holds: of every pass that brings a set to the device, the one that frees it: of an F its W
            (or BW), but itself and of the B its W where the set is away in between.
        freed: the reverse.
        goals: what is made short is the longest of these: (rank, or None for all ranks; what to
            subtract from the end of the rank's last pass).
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        placement: Placement,
        durations: Durations,
        cap: int,
        objective: Objective,
        away: Mapping[tuple[int, int], tuple[int, int]] | None = None,
    ) -> None:
        self.placement, self.cap, self.away = placement, cap, away or {}
        self.took = {a: durations.of(a.op, a.stage) for row in rows for a in row}
        self.rank = {a: rank for rank, row in enumerate(rows) for a in row}
        gives = {result: a for a in self.took for result in given(a)}
        self.holds: dict[Action, Action] = {}
        for a in self.took:
            if a.op in FREES:
                f = a._replace(op=Op.F)
                self.holds[f] = a
                if a[1:] in self.away:
                    self.holds |= {f: f, gives[a._replace(op=Op.B)]: a}
        self.freed: dict[Action, list[Action]] = {a: [] for a in self.took}
        for a, frees in self.holds.items():
            self.freed[frees].append(a)
        self.before: dict[Action, list[tuple[Action, int]]] = {a: [] for a in self.took}
        self.after: dict[Action, list[tuple[Action, int]]] = {a: [] for a in self.took}
        for a, needs in self.before.items():
            for kind, stage, lag in sources(a.op, a.stage, placement, durations):
                b = gives[Action(kind, stage, a.microbatch)]
                needs.append((b, lag))
                self.after[b].append((a, lag))
        # A chunk's passes of a kind come in microbatch order (see ``check``).
        self.following = {
            a: {
                gives[later]
                for result in given(a)
                if (later := result._replace(microbatch=a.microbatch + 1)) in gives
            }
            for a in self.took
        }
        self.goals: list[tuple[int | None, int]] = [(None, 0)]
        if objective == "span":
            # A rank starts with its first stage's first F, in any order at the same time.
            tasks = Tasks(placement, durations, 1)
            start = earliest(tasks)
            firsts = [tasks.number(Op.F, row[0], 0) for row in placement.stages]
            self.goals = [(rank, start[task]) for rank, task in enumerate(firsts)]

    def copies(self, a: Action) -> tuple[int, int]:
        """How long before its start and after its end the set counts that a pass brings."""
        there, back = self.away.get(a[1:], (0, 0))
        return (0, there) if a.op is Op.F else (back, 0)

    def change(self, a: Action) -> int:
        """Of the sets on its rank, from before to after a pass."""
        return (a in self.holds) - len(self.freed[a])

    def value(self, starts: Times) -> int:
        """What is made short."""
        ends = [0] * self.placement.pp
        for a, start in starts.items():
            ends[self.rank[a]] = max(ends[self.rank[a]], start + self.took[a])
        return max((max(ends) if r is None else ends[r]) - begin for r, begin in self.goals)


@dataclass
class Window:
    """The free passes of one window, and what the others demand of them.

    Attributes:
        free: the passes to order.
        resident: activation sets on each rank before.
        head: earliest start of each.
        tails: of each and each goal, the least time from its end to the end of the goal's last
            pass, or None where none of the goal's comes later.
        fixed: of each goal, what passes outside the window take alone.
    """

    problem: Problem
    now: Times
    free: list[Action]
    resident: list[int]
    head: dict[Action, int]
    tails: dict[Action, list[int | None]]
    fixed: list[int]

    @classmethod
    def of(cls, problem: Problem, now: Times, begin: int, end: int) -> Window:
        """All passes that start from ``begin`` on and before ``end``."""
        free = [a for a, start in now.items() if begin <= start < end]
        head = dict.fromkeys(free, 0)
        clock, resident = [0] * problem.placement.pp, [0] * problem.placement.pp
        for a, start in now.items():
            if start >= begin:
                break
            clock[problem.rank[a]] = start + problem.took[a]
            resident[problem.rank[a]] += problem.change(a)
        for a in free:
            ready = [now[b] + problem.took[b] + h for b, h in problem.before[a] if now[b] < begin]
            head[a] = max([clock[problem.rank[a]], *ready])
        # From the last pass back; ``follow`` holds each rank's first pass after the window.
        tails: dict[Action, list[int | None]] = {}
        follow: list[Action | None] = [None] * problem.placement.pp
        fixed = [0] * len(problem.goals)
        for a in reversed(now):
            rank, start = problem.rank[a], now[a]
            later = [(b, hop) for b, hop in problem.after[a] if now[b] >= end]
            following = follow[rank]
            if following is not None:
                later.append((following, 0))
            tails[a] = [
                _longest(problem, tails, later, goal, owner in (None, rank))
                for goal, (owner, _) in enumerate(problem.goals)
            ]
            if start >= end:
                follow[rank] = a
            if start < begin:
                for goal, tail in enumerate(tails[a]):
                    if tail is not None:
                        fixed[goal] = max(fixed[goal], start + problem.took[a] + tail)
        return cls(problem, now, free, resident, head, tails, fixed)

    def solve(self, solver: Any, floor: int, best: int) -> tuple[Times | None, int]:
        """The window at its best: new starts of the free passes, or None if nothing better than
        ``best`` was found; and a lower bound.

        Args:
            solver: a ``cp_model.CpSolver`` with its limits set.
            floor: a lower bound that is known.
            best: the value now.
        """
        cp_model = import_solver()
        model = cp_model.CpModel()
        took, far = self.problem.took, best + max(begin for _, begin in self.problem.goals)
        start = {a: model.new_int_var(self.head[a], far - took[a], str(a)) for a in self.free}
        for a, var in start.items():
            model.add_hint(var, self.now[a])
            for b, hop in self.problem.before[a]:
                if b in start:
                    model.add(var >= start[b] + took[b] + hop)
            for b in self.problem.following[a]:
                if b in start:
                    model.add(start[b] >= var + took[a])
        for rank in range(self.problem.placement.pp):
            self._one_rank(model, start, rank, far)
        value = model.new_int_var(floor, best, "value")
        for goal, (_, begin) in enumerate(self.problem.goals):
            model.add(value >= self.fixed[goal] - begin)
            for a, var in start.items():
                tail = self.tails[a][goal]
                if tail is not None:
                    model.add(value >= var + took[a] + tail - begin)
        model.add_hint(value, best)
        model.minimize(value)
        status = solver.solve(model)
        bound = max(floor, math.ceil(solver.best_objective_bound - 1e-6))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        return {a: solver.value(var) for a, var in start.items()}, bound

    def _one_rank(self, model: Any, start: dict[Action, Any], rank: int, far: int) -> None:
        """One pass at a time, and no more activation sets than the cap."""
        problem = self.problem
        took, cap = problem.took, problem.cap
        row = [a for a in self.free if problem.rank[a] == rank]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[a], took[a], "") for a in row]
        )
        lives, kept = [], self.resident[rank]
        for a in row:
            size = model.new_int_var(0, 2 * far, "")
            if a in problem.holds:
                frees, (early, late) = problem.holds[a], problem.copies(a)
                end = start[frees] + took[frees] + late if frees in start else far + late
                lives.append(model.new_interval_var(start[a] - early, size, end, ""))
                later = a._replace(microbatch=a.microbatch + cap)
                if not problem.away and frees in start and later in start:
                    model.add(start[later] >= end)
            for b in problem.freed[a]:
                if b not in start:
                    size = model.new_int_var(0, far, "")
                    lives.append(model.new_interval_var(0, size, start[a] + took[a], ""))
                    kept -= 1
        if len(lives) + kept > cap:
            model.add_cumulative(lives, [1] * len(lives), cap - kept)

    def shape(self, best: int) -> tuple[object, ...]:
        """Equal for windows that are the same problem at another time, such as those of a steady
        state: each free pass with its slack on both sides, by time and microbatch since the first.
        """
        zero = self.now[self.free[0]]
        first = min(a.microbatch for a in self.free)
        passes = []
        for a in self.free:
            j, at = a.microbatch - first, self.now[a] - zero
            slack = [None if tail is None else best - self.now[a] - tail for tail in self.tails[a]]
            away = a[1:] in self.problem.away
            passes.append((a.op, a.stage, j, at, self.head[a] - zero, away, *slack))
        return (*passes, *self.resident)


def _longest(
    problem: Problem,
    tails: dict[Action, list[int | None]],
    later: list[tuple[Action, int]],
    goal: int,
    ends: bool,
) -> int | None:
    """Longest way over the passes of ``later`` to the end of a goal; 0 if the pass itself may be
    the goal's last (``ends``)."""
    ways = [0] if ends else []
    for b, hop in later:
        tail = tails[b][goal]
        if tail is not None:
            ways.append(hop + problem.took[b] + tail)
    return max(ways, default=None)
