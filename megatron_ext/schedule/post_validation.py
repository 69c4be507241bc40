"""Optimizer post-validation in a lowered schedule (ZB, section 4): operations, pass and checks.

The step of the *former* iteration stands at the begin of a rank's list. ``PREFIX`` adds the rank's
part to the gradient statistics of the ranks before it (``RECV_PREFIX``), which ``SEND_PREFIX``
hands to the next rank; ``STEP`` updates the parameters by what is known so far; ``VALIDATE``
compares that with the statistics of all ranks, which come back from the last rank (``RECV_STATE``,
``SEND_STATE``). In between run forward passes of the ranks' first chunks, the *head* of the
iteration. Every such action names its rank's first stage, and microbatch 0: ``PREFIX2.0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from .actions import Action, AnyAction, Op, Operation
from .effects import CARRIED, given
from .event_loop import Lane, Program, Row, run
from .placement import Placement
from .schedule import Schedule, ScheduleError
from .simulate import Replay, simulate


class ValidationOp(Operation):
    """An operation that post-validation adds to a schedule."""

    PREFIX = "PREFIX"
    STEP = "STEP"
    VALIDATE = "VALIDATE"
    SEND_PREFIX = "SEND_PREFIX"
    RECV_PREFIX = "RECV_PREFIX"
    SEND_STATE = "SEND_STATE"
    RECV_STATE = "RECV_STATE"

    def peer(self, action: Action, placement: Placement) -> tuple[int, Action]:
        """The neighbouring rank's end of a message."""
        step, matching = _OTHER_END[self]
        rank = placement.rank_of(action.stage) + step
        return rank, Action(matching, placement.stages[rank][0], action.microbatch)


PREFIX, STEP, VALIDATE = ValidationOp.PREFIX, ValidationOp.STEP, ValidationOp.VALIDATE
_OTHER_END = {
    ValidationOp.SEND_PREFIX: (1, ValidationOp.RECV_PREFIX),
    ValidationOp.RECV_PREFIX: (-1, ValidationOp.SEND_PREFIX),
    ValidationOp.SEND_STATE: (-1, ValidationOp.RECV_STATE),
    ValidationOp.RECV_STATE: (1, ValidationOp.SEND_STATE),
}
_STEPS = (ValidationOp.RECV_PREFIX, PREFIX, ValidationOp.SEND_PREFIX, STEP)
_VALIDATIONS = (ValidationOp.RECV_STATE, VALIDATE, ValidationOp.SEND_STATE)


def _actions(ops: Sequence[ValidationOp], placement: Placement, rank: int) -> list[AnyAction]:
    """Of one rank; a message needs a rank at its other end."""
    peers = {op: rank + step for op, (step, _) in _OTHER_END.items()}
    there = [op for op in ops if peers.get(op, rank) in range(placement.pp)]
    return [Action(op, placement.stages[rank][0], 0) for op in there]


def _is_own(action: AnyAction) -> bool:
    return isinstance(action, Action) and isinstance(action.op, ValidationOp)


def _refuse_vocabulary(schedule: Schedule) -> None:
    if schedule.barriers:
        raise ScheduleError(
            f"schedule {schedule.name} has a sharded vocabulary: embeddings of the next iteration "
            "need the steps of all ranks, which post-validation does not wait for; leave one out"
        )


def add_post_validation(schedule: Schedule) -> Schedule:
    """Insert post-validation into a lowered schedule, in place of what it may already have.

    The ranks' PREFIX go from first to last, each with its STEP behind. The ranks' VALIDATE, from
    last to first, stand behind all passes that have ended, in simulated time, when the first one
    begins that is not an F of a rank's first chunk, and behind the transfers of these. At that one
    point, whatever has been sent has been received: an iteration can be begun so far, and then be
    left for something else, or be dropped and begun again.

    Args:
        schedule: as ``lower`` returns it; not forward-only.

    Raises:
        ScheduleError: the order of the passes cannot progress, or the vocabulary is sharded.
    """
    _refuse_vocabulary(schedule)
    simulation, placement = simulate(schedule), schedule.placement
    first = {row[0] for row in placement.stages}
    cut: int | None = None
    ends: dict[Action, int] = {}
    for row, begins, stops in zip(simulation.schedule.ranks, simulation.start, simulation.end):
        for action, begin, end in zip(row, begins, stops):
            ends |= dict.fromkeys(given(action), end)
            if any(part.op is not Op.F or part.stage not in first for part in action.parts):
                cut = begin if cut is None else min(cut, begin)
    assert cut is not None  # it has backward passes
    ranks: list[list[AnyAction]] = []
    for rank, row in enumerate(schedule.ranks):
        own = [a for a in row if not _is_own(a)]
        head = next((i for i, a in enumerate(own) if _end(a, schedule, ends) > cut), len(own))
        ranks.append(
            [
                *_actions(_STEPS, placement, rank),
                *own[:head],
                *_actions(_VALIDATIONS, placement, rank),
                *own[head:],
            ]
        )
    return schedule.with_ranks(ranks)


def _end(action: AnyAction, schedule: Schedule, ends: dict[Action, int]) -> int:
    """When the pass ends that ``action`` is, or whose result it carries; copies have no end."""
    if not isinstance(action, Action) or action.is_compute:
        return ends[next(given(action))]
    if action.is_copy:
        return -1
    send = action if action.op.is_send else action.peer(schedule.placement)[1]
    return ends[send._replace(op=CARRIED[send.op])]


def head_length(row: Sequence[AnyAction]) -> int:
    """Actions of a rank's list up to the last one of post-validation; 0 without any."""
    return max((position + 1 for position, a in enumerate(row) if _is_own(a)), default=0)


def check_post_validation(schedule: Schedule) -> None:
    """Verify the order on every rank, and that no message is in flight when the ranks validate.

    Raises:
        ScheduleError: the first fault found, or the vocabulary is sharded.
    """
    _refuse_vocabulary(schedule)
    placement = schedule.placement
    lengths = [head_length(row) for row in schedule.ranks]
    for rank, row in enumerate(schedule.ranks):
        first = _actions(_STEPS, placement, rank)
        last = _actions(_VALIDATIONS, placement, rank)
        found = [action for action in row if _is_own(action)]
        if found != first + last or list(row[: len(first)]) != first:
            expected = " ".join(map(str, first + last))
            got = " ".join(map(str, found)) or "none"
            raise schedule.fault(
                rank,
                0,
                f"post-validation is {got}, but a rank's is {expected}, its first "
                f"{len(first)} at the begin of its list",
            )
        if list(row[lengths[rank] - len(last) : lengths[rank]]) != last:
            text = f"{' '.join(map(str, last))} must stand together"
            raise schedule.fault(rank, lengths[rank] - 1, text)
        for position in range(len(first), lengths[rank] - len(last)):
            action = row[position]
            if action.is_compute and action.parts[0][:2] != (Op.F, placement.stages[rank][0]):
                text = f"{action} stands before {last[0]}; only forward passes of the rank's first"
                raise schedule.fault(rank, position, f"{text} chunk may run on a step in doubt")
    where = {action: position for _, position, action in schedule.actions()}
    for rank, position, action in schedule.actions():
        if action.is_message and not _is_own(action):
            peer, matching = action.peer(placement)
            if (position < lengths[rank]) != (where[matching] < lengths[peer]):
                text = f"{action} and {matching} of rank {peer} stand on two sides of VALIDATE; a"
                raise schedule.fault(rank, position, f"{text} message must not be in flight there")


_ROUNDS = 8


def steady_time(schedule: Schedule) -> Fraction:
    """Steady-state iteration time, where the next iteration begins before all ranks have ended one.

    Every rank runs its list over and over, as early as the passes' inputs allow. PREFIX waits for
    the rank before, VALIDATE for the rank behind, and behind VALIDATE a rank waits for all others:
    Megatron reduces over all ranks there what it logs. The optimizer's own work takes no time. What
    copies of offloaded sets delay one iteration by (``simulate``) is added.

    Args:
        schedule: lowered, with post-validation.

    Returns:
        In the units of the costs; the mean of the later half of 8 iterations.

    Raises:
        ValueError: the schedule has no post-validation, or the vocabulary is sharded.
    """
    _refuse_vocabulary(schedule)
    if not schedule.is_extended:
        raise ValueError(f"schedule {schedule.name} is lowered without post-validation")
    durations = schedule.costs.durations(schedule.placement)
    replay = Replay(schedule.compute(), durations)
    durations, units = replay.durations, replay.program.units
    pp, m = schedule.pp, replay.program.microbatches
    every = None if units is None else [*units] * _ROUNDS
    program = Program(schedule.placement, durations, m * _ROUNDS, units=every)
    hop, base = durations.hop, program.pass_slots

    # Slots by rank and round, behind those of the passes.
    def slot(kind: int, rank: int) -> int:
        return base + (kind * pp + rank) * _ROUNDS

    rows: list[Row] = []
    for rank, row in enumerate(schedule.ranks):
        # The VALIDATE of rank 0 is the last of all; every rank waits for it in a slot of its own.
        all_ranks = tuple(slot(2, other) for other in range(pp)) if not rank else ()
        meeting = Lane(0, ((slot(2, rank), 0),), (slot(3, rank),))
        nodes: list[tuple[Lane, int, int]] = []  # with what a round adds to the number
        came: tuple[tuple[int, int], ...] = ()
        for action in row:
            if action.is_compute:
                nodes += [(lane, j, m) for lane, j in program.row([action])]
            elif isinstance(action, Action) and isinstance(action.op, ValidationOp):
                if action.op.is_receive:
                    state = action.op is ValidationOp.RECV_STATE
                    came = ((slot(state, action.peer(schedule.placement)[0]), hop),)
                elif action.op is PREFIX:
                    nodes.append((Lane(0, came, (slot(0, rank),)), 0, 1))
                    came = ()
                elif action.op is VALIDATE:
                    validate = Lane(0, came, (slot(1, rank), *all_ranks))
                    nodes += [(validate, 0, 1), (meeting, 0, 1)]
        turns = range(_ROUNDS)
        rows.append([(lane, j + turn * more) for turn in turns for lane, j, more in nodes])
    done = run(rows, base + 4 * pp * _ROUNDS)
    assert all(at == len(row) for at, row in zip(done.at, rows))
    first = _ROUNDS // 2 - 1
    taken = []
    for row in schedule.ranks:
        ((lane, j),) = program.row([a for a in row if a.is_compute][-1:])
        begin, end = (done.ends[lane.gives[0] + j + turn * m] for turn in (first, _ROUNDS - 1))
        taken.append(end - begin)
    time = Fraction(max(taken), durations.scale * (_ROUNDS - 1 - first))
    if schedule.has_offload:
        alone = simulate(schedule.compute())
        time += simulate(schedule).makespan - alone.makespan
    return time


def describe_gain(schedule: Schedule) -> str:
    """The simulated gain of a lowered schedule by its post-validation, in words."""
    usual, steady = simulate(schedule).makespan, steady_time(schedule)
    gain = float(1 - steady / usual)
    if gain < 0.0005:
        return (
            f"post-validation gains {schedule.name} nothing here: its longest rank takes the whole "
            "iteration; v-zb and zb-h2 are those that gain"
        )
    return f"post-validation: an iteration of {schedule.name} takes {gain:.1%} less by simulation"
