"""What a generator has made, which may be one of a user's own: is it a schedule, does it run?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..._input import shown
from ..actions import Action, AnyAction, Joint
from ..schedule import ScheduleError


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


@contextmanager
def generated_by(name: str) -> Iterator[None]:
    """Around the run of a generator's order; those of files are checked when they are read.

    Raises:
        BrokenGenerator: the order cannot run.
    """
    try:
        yield
    except BrokenGenerator:
        raise
    except ScheduleError as error:
        reason = str(error).splitlines()[0]
        raise BrokenGenerator(
            f"the generator of {name} made an order that cannot run: {reason}"
        ) from None
