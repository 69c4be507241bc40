"""What a generator has made, which may be one of a user's own: is it a schedule, does it run?"""

from __future__ import annotations

from collections.abc import Sequence

from ..._input import shown
from ..actions import Action, AnyAction, Joint
from ..network import Network
from ..passes.lower import lower
from ..schedule import Schedule, ScheduleError
from ..simulate import Simulation, simulate


class BrokenGenerator(ScheduleError):
    """What a generator has made is no schedule; the text names it."""


def checked(name: str, ranks: Sequence[Sequence[AnyAction]]) -> tuple[tuple[AnyAction, ...], ...]:
    """Every rank's actions.

    Raises:
        BrokenGenerator: something else is among them.
    """
    rows = tuple(tuple(row) for row in ranks)
    for action in (action for row in rows for action in row):
        if not isinstance(action, (Action, Joint)):
            raise BrokenGenerator(f"the generator of {name} made {shown(action)}, no action")
    return rows


def simulate_made(schedule: Schedule, network: Network | None = None) -> Simulation:
    """``simulate`` of a generator's order, or a file's that is checked.

    Raises:
        BrokenGenerator: the order cannot run.
    """
    try:
        if network is not None and not schedule.is_lowered:
            schedule = lower(schedule)
        return simulate(schedule, network=network)
    except ScheduleError as error:
        reason = str(error).splitlines()[0]
        raise BrokenGenerator(
            f"the generator of {schedule.name} made an order that cannot run: {reason}"
        ) from None
