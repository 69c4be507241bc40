"""How long an iteration takes where the next one begins before all ranks have ended it."""

from __future__ import annotations

from fractions import Fraction

from .actions import Action, Op
from .costs import Costs
from .schedule import Schedule
from .simulate import inputs, outputs, simulate

_ROUNDS = 8
_Key = tuple[object, ...]


def steady_time(schedule: Schedule, costs: Costs | None = None) -> Fraction:
    """Time from one iteration to the next under post-validation, once they follow each other.

    Every rank runs its list over and over, as early as the passes' inputs allow. PREFIX waits for
    the rank before, VALIDATE for the rank behind, and behind VALIDATE a rank waits for all others:
    Megatron reduces over all ranks there what it logs. The optimizer's own work takes no time.

    Args:
        schedule: lowered, with post-validation.
        costs: default ``schedule.costs``.

    Returns:
        In the units of the costs; the mean of the later half of 8 iterations.

    Raises:
        ValueError: the schedule has no post-validation.
    """
    if not schedule.is_validated:
        raise ValueError(f"schedule {schedule.name} is lowered without post-validation")
    durations = (schedule.costs if costs is None else costs).durations(schedule.placement)
    placement, last = schedule.placement, schedule.pp - 1
    rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    length = {
        Op.F: durations.forward,
        Op.B: durations.backward_input,
        Op.W: durations.backward_weight,
    }
    rows = [
        [a for a in row if a.is_compute or a.op in (Op.PREFIX, Op.VALIDATE)]
        for row in schedule.ranks
    ]
    done: dict[_Key, int] = {}

    def ready(rank: int, action: Action, around: int) -> list[tuple[_Key, int]]:
        """What an action waits for: (what, how long it travels)."""
        if action.op is Op.PREFIX:
            return [((Op.PREFIX, rank - 1, around), durations.hop)] if rank else []
        if action.op is Op.VALIDATE:
            return [((Op.VALIDATE, rank + 1, around), durations.hop)] if rank < last else []
        return [
            ((kind, stage, action.microbatch, around), durations.hop * (rank_of[stage] != rank))
            for kind, stage in inputs(action.op, action.stage, placement.num_stages)
        ]

    clock, at = [0] * schedule.pp, [0] * schedule.pp
    meeting: list[dict[int, int]] = [{} for _ in range(_ROUNDS)]
    ends: list[list[int]] = [[] for _ in schedule.ranks]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) * _ROUNDS:
                around, position = divmod(at[rank], len(row))
                met = meeting[around]
                behind = position and row[position - 1].op is Op.VALIDATE
                if behind and len(met) < schedule.pp:
                    break
                action = row[position]
                waits = ready(rank, action, around)
                if any(key not in done for key, _ in waits):
                    break
                time = max([clock[rank], *(done[key] + hop for key, hop in waits)])
                if behind:
                    time = max(time, *met.values())
                if action.is_compute:
                    parts = (Op.B, Op.W) if action.op is Op.BW else (action.op,)
                    time += sum(length[op][action.stage] for op in parts)
                    for kind in outputs(action.op):
                        done[kind, action.stage, action.microbatch, around] = time
                else:
                    done[action.op, rank, around] = time
                    if action.op is Op.VALIDATE:
                        met[rank] = time
                clock[rank], at[rank], moved = time, at[rank] + 1, True
                if position == len(row) - 1:
                    ends[rank].append(time)
    first = _ROUNDS // 2 - 1
    whole = max(row[-1] - row[first] for row in ends)
    return Fraction(whole, durations.scale * (_ROUNDS - 1 - first))


def describe_gain(schedule: Schedule) -> str:
    """What post-validation brings a lowered schedule that has it, by simulation, in words."""
    usual, steady = simulate(schedule).makespan, steady_time(schedule)
    gain = float(1 - steady / usual)
    if gain < 0.0005:
        return (
            f"post-validation gains {schedule.name} nothing here: its longest rank takes the whole "
            "iteration; v-zb and zb-h2 are those that gain"
        )
    return f"post-validation: an iteration of {schedule.name} takes {gain:.1%} less by simulation"
