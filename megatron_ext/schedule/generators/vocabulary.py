"""Vocabulary passes in any order: output layer and embedding of all ranks (arXiv 2411.05288).

The passes S of a microbatch stand between its last F and its first B. All ranks have one, so all
backward passes come one period later; every rank keeps one microbatch
more (section 5). S and T go where in that time they cost least, and a list scheduler
with so much more memory shortens warm-up and cool-down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from ..actions import Action, AnyAction, Op, Operation, RankActions
from ..effects import given, passes, peak_sets
from ..engine import list_schedule
from ..schedule import Schedule, ScheduleError
from ..simulate import Replay, simulate
from ..tasks import Tasks
from ..units import named
from ..vocabulary import AHEAD, E, G, S, T, Vocabulary, VocabularyOp, peak_held
from .request import LONG


def add_vocabulary(
    schedule: Schedule, growth: Fraction | None = None, *, quick: bool = False
) -> Schedule:
    """Insert the vocabulary passes of all ranks, and reorder for their times.

    Args:
        schedule: compute actions, no joint ones; its costs are those of the stages without
            vocabulary layers, with the times of vocabulary passes.
        growth: activation sets by which the peak of a rank may grow; None: those of one
            microbatch, or of a slice.
        quick: try few of the ways.

    Raises:
        ScheduleError: joint, offload or vocabulary actions, or costs without vocabulary passes.
    """
    if schedule.costs.vocabulary is None:
        raise ScheduleError("the costs have no times of vocabulary passes")
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            if not isinstance(action, Action) or not isinstance(action.op, Op) or action.is_copy:
                text = f"{action} cannot stand beside vocabulary passes that are to be inserted"
                raise schedule.fault(rank, position, text)
    placement, durations = schedule.placement, schedule.costs.durations(schedule.placement)
    output = Vocabulary(placement, embeddings=False)
    costs, whole = schedule.unit_costs()
    units = schedule.units
    more = taken(schedule) if growth is None else growth
    caps = [held + int(more * whole) for held in peak_sets(schedule.ranks, costs)]

    plain = replace(schedule, barriers=1)

    def scored(orders: RankActions) -> _Scored:
        end = Replay(plain.with_ranks(orders), durations).makespan()
        return (end, *sorted(peak_held(orders), reverse=True)), orders

    delayed = _Delayed(schedule, output, caps, more / placement.chunks)
    tried = _SHARES[:1] if quick else _SHARES
    fixed = [scored(delayed.orders(s, t)) for s in tried for t in tried]
    fixed.sort(key=lambda one: one[0])
    found = fixed[:1]
    fused, split = (
        {action.stage for row in schedule.ranks for action in passes(row) if action.op is op}
        for op in (Op.BW, Op.W)
    )
    # Else a lane has no order of its own, or some slices no W, and the shifted orders stay.
    if not (fused & split or schedule.joined):
        given = iter(costs)
        counts = schedule.slices or (1,) * schedule.microbatches
        rows = [[next(given) for _ in range(count)] for count in counts]
        times = durations.of_units(whole)
        tasks = Tasks(placement, times, rows, fused=fused, vocabulary=output)
        few = fixed[: 2 if sum(map(len, schedule.ranks)) <= LONG else 1]
        for base in [tasks.rows(orders) for _, orders in few]:
            for gap, urgent in _WAYS[: 1 if quick else None]:
                order = [
                    sorted(row, key=lambda task: tasks.name(task)[0] is not urgent) for row in base
                ]
                listed = list_schedule(tasks, base, caps, gap=gap, order=order)
                found.append(scored(tasks.actions(listed)))
    best = min(found, key=lambda one: one[0])[1]
    made = schedule.with_ranks(named(best, units) if schedule.slices else best)
    return _with_embeddings(replace(made, barriers=1))


def taken(schedule: Schedule) -> Fraction:
    """Activation sets by which the peak of a rank grows at most, of whole microbatches."""
    costs, whole = schedule.unit_costs()
    return Fraction(schedule.chunks * max(unit.size for unit in costs), whole)


# Gap of the list schedules, and what is preferred.
_WAYS: tuple[tuple[Fraction, Operation | None], ...] = (
    (Fraction(1), None),
    (Fraction(0), None),
    (Fraction(0), T),
    (Fraction(0), S),
)
_Scored = tuple[tuple[int, ...], RankActions]  # time, then peaks of what S keeps for T; less first
# Where S and T begin behind what they wait for, in quarters of a period.
_SHARES = range(4)
_FINER = 16  # units of time of a unit of the simulation


class _Delayed:
    """A schedule whose backward passes come later: by one microbatch's work.

    In the steady state that is one more microbatch in flight, and every rank's passes are in the
    order that they had, one turn later. In between there is time for the passes of all ranks.

    Args:
        schedule: compute actions.
        vocabulary: of the passes to insert.
        caps: most that each rank may hold, in the unit of the units' sizes. The delay is less if
            they need that.
        microbatches: that the caps have room for.
    """

    def __init__(
        self,
        schedule: Schedule,
        vocabulary: Vocabulary,
        caps: Sequence[int],
        microbatches: Fraction,
    ) -> None:
        self._vocabulary, costs = vocabulary, schedule.unit_costs()[0]
        self._run = run = simulate(schedule)
        work = schedule.costs.per_rank_work(schedule.placement)
        self._period = int(max(work) * run.scale) * _FINER
        most = min(max(microbatches, Fraction(0)), Fraction(1))
        for quarters in (4, 3, 2, 1, 0):
            delay = int(self._period * most * quarters / 4)
            self._timed = [self._row(rank, delay) for rank in range(schedule.pp)]
            kept = peak_sets([[action for *_, action in row] for row in self._timed], costs)
            if all(held <= cap for held, cap in zip(kept, caps)):
                break
        last = [timed for row in self._timed for timed in row if timed[2].stage == vocabulary.last]
        self._saved = {a.microbatch: end for _, end, a in last if a.op is Op.F}
        self._backward = {a.microbatch: (s, e) for s, e, a in last if a.op in (Op.B, Op.BW)}

    def _row(self, rank: int, delay: int) -> list[_Timed]:
        run, row = self._run, []
        for start, end, action in zip(run.start[rank], run.end[rank], run.schedule.ranks[rank]):
            assert isinstance(action, Action)
            later = 0 if action.op is Op.F else delay
            row.append((start * _FINER + later, end * _FINER + later, action))
        return sorted(row, key=lambda one: one[0])

    def orders(self, s_quarters: int, t_quarters: int) -> RankActions:
        """With S so many quarters of a period behind the last stage's F, and T behind its B; what
        B waits for stands before it. S's come in the order of the F's, T's in that of the B's."""
        out: RankActions = []
        s_wait, t_wait = (self._period * quarters // 4 for quarters in (s_quarters, t_quarters))
        s_at: dict[int, int] = {}
        next_s = max(begin for begin, _ in self._backward.values())
        for unit in sorted(self._backward, reverse=True):
            next_s = min(self._saved[unit] + s_wait, self._backward[unit][0], next_s)
            s_at[unit] = next_s
        for own, row in zip(self._vocabulary.stages, self._timed):
            timed = [(start, 2, action) for start, _, action in row]
            timed += [(s_at[j], 0, Action(S, own, j)) for j in sorted(s_at)]
            for j, (_, end) in self._backward.items():
                timed.append((end + t_wait, 1, Action(T, own, j)))
            out.append([action for *_, action in sorted(timed, key=lambda one: one[:2])])
        return out


_Timed = tuple[int, int, Action]  # start, end


def _with_embeddings(schedule: Schedule) -> Schedule:
    """E of all ranks two microbatches ahead of stage 0; G once its gradient is there."""
    vocabulary = Vocabulary(schedule.placement)
    run = simulate(schedule)
    begin: dict[int, int] = {}
    ready: dict[int, int] = {}
    for starts, ends, row in zip(run.start, run.end, run.schedule.ranks):
        for start, end, action in zip(starts, ends, row):
            for kind, stage, microbatch in given(action):
                if (kind, stage) in vocabulary.waiters[VocabularyOp.JOIN_E]:
                    begin[microbatch + AHEAD] = start
                elif (kind, stage) in vocabulary.sources[VocabularyOp.SHARE_G]:
                    ready[microbatch] = end
    ranks: list[list[AnyAction]] = []
    for rank, (starts, row) in enumerate(zip(run.start, run.schedule.ranks)):
        own = vocabulary.stages[rank]
        more = [(begin.get(j, -1), 0, Action(E, own, j)) for j in schedule.units]
        more += [(time, 1, Action(G, own, j)) for j, time in ready.items()]
        more.sort()
        out: list[AnyAction] = []
        for start, action in zip(starts, row):
            while more and more[0][0] <= start and (more[0][0] < start or more[0][1] == 0):
                out.append(more.pop(0)[2])
            out.append(action)
        ranks.append(out + [action for *_, action in more])
    return schedule.with_ranks(ranks)
