"""Schedules as data: generate, check, simulate, lower. Pure Python, standard library only."""

from .actions import Action, Op
from .check import CheckReport, check
from .costs import Costs
from .generators import GENERATORS, NAMES, forward_only, generate
from .link import Link
from .lower import lower
from .offload import OffloadPlan
from .offload import offload as offload_pass
from .placement import Placement
from .schedule import FILE_FORMAT, Schedule, ScheduleError
from .select import AUTO, OffloadSpec, ScheduleSpec, Selected, select
from .simulate import Simulation, simulate

__all__ = [
    "AUTO",
    "FILE_FORMAT",
    "GENERATORS",
    "NAMES",
    "Action",
    "CheckReport",
    "Costs",
    "Link",
    "OffloadPlan",
    "OffloadSpec",
    "Op",
    "Placement",
    "Schedule",
    "ScheduleError",
    "ScheduleSpec",
    "Selected",
    "Simulation",
    "check",
    "forward_only",
    "generate",
    "lower",
    "offload_pass",
    "select",
    "simulate",
]
