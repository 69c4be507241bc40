"""Vocabulary passes in any order: output layer and embedding of all ranks (arXiv 2411.05288).

The passes S of a microbatch stand between its last F and its first B. All ranks have one, so B
comes about one interval later than it would, and that is as much as every rank has to keep more:
one microbatch with one barrier, two with two (section 5). A list scheduler with so much more memory
finds the passes that run in between.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ..actions import Action, AnyAction, Op, RankActions
from ..effects import peak_sets
from ..event_loop import time_of
from ..schedule import Schedule, ScheduleError
from ..simulate import simulate
from ..vocabulary import AHEAD, E, G, S, T, Vocabulary, VocabularyOp
from .list_scheduler import list_schedule
from .request import min_gaps


def add_vocabulary(schedule: Schedule, barriers: int = 1, growth: int | None = None) -> Schedule:
    """Insert the vocabulary passes of all ranks, and reorder for their times.

    Args:
        schedule: compute actions, no joint ones; its costs are those of the stages without
            vocabulary layers, with the times of vocabulary passes.
        barriers: between the last stage's F and its B.
        growth: activation sets by which the peak of a rank may grow; None: those of as many
            microbatches as there are barriers.

    Raises:
        ScheduleError: joint, offload or vocabulary actions, or costs without vocabulary passes.
        ValueError: ``barriers`` is neither 1 nor 2.
    """
    if schedule.costs.vocabulary is None:
        raise ScheduleError("the costs have no times of vocabulary passes")
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            if not isinstance(action, Action) or not isinstance(action.op, Op) or action.is_copy:
                text = f"{action} cannot stand beside vocabulary passes that are to be inserted"
                raise schedule.fault(rank, position, text)
    placement, durations = schedule.placement, schedule.costs.durations(schedule.placement)
    output = Vocabulary(placement, barriers, embeddings=False)
    fixed = _inserted(schedule, output)
    more = placement.chunks * barriers if growth is None else growth
    caps = [sets + more for sets in peak_sets(schedule.ranks)]
    found: list[tuple[int, RankActions]] = []
    for gap, urgent in product(min_gaps(schedule.pp)[:2], ((), (T,), (S,), (S, T))):
        orders = list_schedule(fixed, placement, caps, durations, gap, output, urgent)
        taken = time_of(orders, placement, durations, schedule.microbatches, vocabulary=output)
        assert taken is not None  # there is no limit
        found.append((taken, orders))
    best = min(found, key=lambda one: one[0])[1]
    return _with_embeddings(replace(schedule.with_ranks(best), barriers=barriers))


def _inserted(schedule: Schedule, vocabulary: Vocabulary) -> RankActions:
    """S and T of all ranks where the last stage's B would begin: before it, but T with one barrier,
    which needs that B's result, before the next microbatch's S."""
    run = simulate(schedule)
    timed = [
        (start, end, rank, action)
        for rank, row in enumerate(run.schedule.ranks)
        for start, end, action in zip(run.start[rank], run.end[rank], row)
    ]
    out: RankActions = [[] for _ in schedule.ranks]

    def append(op: VocabularyOp, microbatch: int) -> None:
        for row, action in zip(out, vocabulary.actions(op, microbatch)):
            row.append(action)

    for _, _, rank, action in sorted(timed, key=lambda one: one[:3]):
        assert isinstance(action, Action)
        j = action.microbatch
        if action.stage == vocabulary.last and action.op in (Op.B, Op.BW):
            if vocabulary.barriers == 1 and j:
                append(T, j - 1)
            append(S, j)
            if vocabulary.barriers == 2:
                append(T, j)
        out[rank].append(action)
    if vocabulary.barriers == 1:
        append(T, schedule.microbatches - 1)
    return out


def _with_embeddings(schedule: Schedule) -> Schedule:
    """E of all ranks two microbatches ahead of stage 0; G once its gradient is there."""
    vocabulary = Vocabulary(schedule.placement, schedule.barriers)
    run = simulate(schedule)
    begin: dict[int, int] = {}
    ready: dict[int, int] = {}
    for starts, ends, row in zip(run.start, run.end, run.schedule.ranks):
        for start, end, action in zip(starts, ends, row):
            for op, stage, microbatch in action.parts:
                if op is Op.F and stage == 0:
                    begin[microbatch + AHEAD] = start
                elif op in (Op.B, Op.BW) and stage == 0:
                    ready[microbatch] = end
    ranks: list[list[AnyAction]] = []
    for rank, (starts, row) in enumerate(zip(run.start, run.schedule.ranks)):
        own = vocabulary.stages[rank]
        more = [(begin.get(j, -1), 0, Action(E, own, j)) for j in range(schedule.microbatches)]
        more += [(time, 1, Action(G, own, j)) for j, time in ready.items()]
        more.sort()
        out: list[AnyAction] = []
        for start, action in zip(starts, row):
            while more and more[0][0] <= start and (more[0][0] < start or more[0][1] == 0):
                out.append(more.pop(0)[2])
            out.append(action)
        ranks.append(out + [action for *_, action in more])
    return schedule.with_ranks(ranks)
