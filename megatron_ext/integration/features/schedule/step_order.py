"""The order of one training step that is planned for its own microbatches."""

from __future__ import annotations

from ....schedule.for_units import order_for_units
from ....schedule.schedule import Schedule
from ...callbacks import Loads
from .choose import Choice, named_errors


def order_of_step(choice: Choice, loads: Loads) -> Schedule:
    """It is made without a search.

    Args:
        choice: what the run executes.

    Raises:
        ConfigError: a cap does not hold a microbatch.
    """
    with named_errors(choice.name):
        return order_for_units(choice.spec, loads.units, loads.free, choice.known(len(loads.units)))
