"""Schedules as data: generate, check, simulate, lower. Pure Python, standard library only."""

from .actions import Action, AnyAction, Joint, Op
from .costs import Costs
from .generators import GENERATORS, NAMES, default_effort, forward_only, generate
from .io import load, save
from .link import Link
from .named import CapExceeded, Selected
from .passes.check import CheckReport, check
from .passes.lower import lower
from .passes.offload import OffloadPlan
from .passes.offload import offload as offload_pass
from .placement import Placement
from .schedule import FILE_FORMAT, Schedule, ScheduleError
from .select import select
from .simulate import Simulation, simulate
from .spec import AUTO, Cut, OffloadSpec, ScheduleSpec

__all__ = [
    "AUTO",
    "FILE_FORMAT",
    "GENERATORS",
    "NAMES",
    "Action",
    "AnyAction",
    "CapExceeded",
    "CheckReport",
    "Costs",
    "Cut",
    "Joint",
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
    "default_effort",
    "forward_only",
    "generate",
    "load",
    "lower",
    "offload_pass",
    "select",
    "save",
    "simulate",
]
