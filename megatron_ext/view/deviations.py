"""Deviations of a measured run from its plan: the longest waits, and their causes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..schedule.actions import Action, AnyAction
from ..schedule.tasks import sources
from .timeline import Box, Timeline, decimal, results_of


class Deviation(NamedTuple):
    """One action before which its rank was idle for longer than planned.

    Attributes:
        action: what came late.
        longer: by how much longer the rank was idle before it, in the measured run's unit.
        producer: the pass whose result it takes, or None if it takes none.
        of: that pass's rank.
        ended: how long before the action's start the producer had ended.
    """

    rank: int
    action: AnyAction
    longer: float
    producer: AnyAction | None
    of: int
    ended: float

    def text(self, unit: str) -> str:
        """One sentence."""
        start = f"rank {self.rank}: {self.action} waits {decimal(self.longer, 2)} {unit} longer"
        if self.producer is None:
            return f"{start} than planned, for no other pass: its rank or its data came late"
        whose = f"{self.producer} of rank {self.of}"
        ago = f"{decimal(self.ended, 2)} {unit} before"
        if self.ended >= self.longer:
            came = "the rank" if self.of == self.rank else "the message or the rank"
            return f"{start} than planned; {whose} had ended {ago}, so {came} came late"
        return f"{start} than planned, for {whose}, which ended {ago}"


def largest(planned: Timeline, measured: Timeline, count: int = 3) -> list[Deviation]:
    """The waits that exceed the plan's most, longest first.

    Args:
        planned, measured: runs of one schedule. The planned one is stretched, so that both spend
            equally long computing.
        count: how many at most; fewer if no more exceed the plan.
    """
    plan = planned.scaled_to(measured)
    made = results_of(measured)
    found = []
    for rank, row in enumerate(measured.boxes):
        gaps = {box.action: gap for box, gap in _gaps(plan.boxes[rank])}
        for box, gap in _gaps(row):
            longer = gap - gaps.get(box.action, 0.0)
            if longer > 0:
                found.append((longer, rank, box))
    # Of equal ones the first is the cause of the others.
    found.sort(key=lambda one: (-round(one[0], 6), one[2].start, one[1]))
    out = []
    for longer, rank, box in found[:count]:
        needs = [made[a] for a in _needs(box.action, measured) if a in made]
        of, producer = max(needs, key=lambda one: one[1].end) if needs else (rank, None)
        ended = 0.0 if producer is None else box.start - producer.end
        action = None if producer is None else producer.action
        out.append(Deviation(rank, box.action, longer, action, of, ended))
    return out


def _gaps(row: tuple[Box, ...]) -> Iterator[tuple[Box, float]]:
    """Every pass and the idle time before it, from the first start of all ranks on."""
    end = 0.0
    for box in row:
        yield box, max(0.0, box.start - end)
        end = max(end, box.end)


def _needs(action: AnyAction, run: Timeline) -> Iterator[Action]:
    """The results that ``action`` takes."""
    schedule = run.schedule
    durations = schedule.costs.durations(schedule.placement)
    for op, stage, unit in action.parts:
        for kind, other, _ in sources(
            op, stage, schedule.placement, durations, schedule.vocabulary
        ):
            yield Action(kind, other, unit)
