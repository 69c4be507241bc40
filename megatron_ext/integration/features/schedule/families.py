"""Which schedules a model can be placed for, and which of them --pp-schedule auto takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ....schedule.costs import Costs
from ....schedule.generators import GENERATORS, NAMES, generate
from ....schedule.generators.auto import auto, family_options
from ....schedule.generators.request import Objective
from ....schedule.memory_cap import cap_sets
from ....schedule.schedule import Schedule

ONE_CHUNK: tuple[str, ...] = tuple(
    name
    for name, made in GENERATORS.items()
    if made.placement == "loop" and made.default_chunks == 1 and not made.any_chunks
)
ANY_CHUNKS: tuple[str, ...] = tuple(name for name, made in GENERATORS.items() if made.any_chunks)


@dataclass(frozen=True)
class Chosen:
    """What auto chose, and what its generator needs for other numbers of microbatches.

    Attributes:
        schedule: for the full number of microbatches, with the reason in ``note``.
        group_size, memory_cap: options of its generator (the cap in activation sets), or None.
    """

    schedule: Schedule
    group_size: int | None = None
    memory_cap: int | None = None


def choose(
    pp: int,
    microbatches: int,
    costs: Costs,
    cap: Fraction | None,
    names: Sequence[str] = NAMES,
    chunks: int = 2,
    objective: Objective = "makespan",
) -> Chosen:
    """The fastest schedule that fits and that the model can be placed for.

    Args:
        pp, microbatches, costs, objective: as ``generate``.
        cap: most activation on a rank, as a fraction of 1F1B's peak; None: that peak.
        names: of the schedules that are possible; all of them, or a part with ``chunks`` chunks.
        chunks: of those that take any number.

    Raises:
        ValueError: nothing fits.
    """
    sets = cap_sets(Fraction(1) if cap is None else cap, pp, chunks)
    schedule = auto(generate, pp, microbatches, chunks, costs, sets, objective, names)
    if set(names) != set(NAMES):
        note = f"{schedule.note}; only these suit this model's layers and flags"
        schedule = replace(schedule, note=note)
    options = family_options(schedule.name, pp, microbatches, chunks, Fraction(sets, chunks)) or {}
    return Chosen(schedule, options.get("group_size"), options.get("memory_cap"))
