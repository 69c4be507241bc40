"""--pp-schedule auto: which schedule, decided once, before Megatron builds the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..schedule.costs import Costs
from ..schedule.generators import AUTO, GENERATORS, NAMES, generate
from ..schedule.generators.grouped import gis_peak
from ..schedule.memory_cap import cap_sets
from ..schedule.schedule import Schedule
from ..schedule.simulate import simulate

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
) -> Chosen:
    """The fastest schedule that fits and that the model can be placed for.

    Args:
        pp, microbatches, costs: as ``generate``.
        cap: most activation on a rank, as a fraction of 1F1B's peak; None: that peak.
        names: of the schedules that are possible; all of them, or a part with ``chunks`` chunks.
        chunks: of those that take any number.

    Raises:
        ValueError: nothing fits.
    """
    share = Fraction(1) if cap is None else cap
    if set(names) == set(NAMES):
        sets = cap_sets(share, pp, chunks)
        schedule = generate(AUTO, pp, microbatches, chunks, costs, memory_cap=sets)
    else:
        schedule = _fastest(pp, microbatches, costs, share * pp, names, chunks)
    options = _options(schedule.name, pp, microbatches, schedule.chunks, share)
    return Chosen(schedule, **options)


def _options(name: str, pp: int, microbatches: int, chunks: int, share: Fraction) -> dict[str, int]:
    """Options with which ``name`` fits: the largest group, the whole cap."""
    made = GENERATORS[name]
    sets = cap_sets(share, pp, chunks)
    if made.takes_memory_cap:
        return {"memory_cap": min(sets, pp * chunks)}
    if not made.takes_group_size:
        return {}
    sizes = range(pp, -(-pp // 2), -1)
    fits = (g for g in sizes if max(gis_peak(pp, microbatches, chunks, g)) <= sets)
    return {"group_size": next(fits, -(-pp // 2))}


def _fastest(
    pp: int, microbatches: int, costs: Costs, cap: Fraction, names: Sequence[str], chunks: int
) -> Schedule:
    """As auto does it, over some schedules only."""
    best: Schedule | None = None
    time = least = Fraction(0)
    for name in names:
        made = GENERATORS[name]
        v = chunks if made.any_chunks else made.default_chunks
        options = _options(name, pp, microbatches, v, cap / pp)
        schedule = generate(name, pp, microbatches, v, costs, **options)
        run = simulate(schedule)
        peak = max(run.peak_activation)
        least = peak if not least else min(least, peak)
        if peak <= cap and (best is None or run.makespan < time):
            best, time = schedule, run.makespan
    if best is None:
        raise ValueError(
            f"none of {', '.join(names)} at pp={pp} with {microbatches} microbatches fits a cap "
            f"of {float(cap):g} microbatches of activations per rank; the least takes "
            f"{float(least):g}"
        )
    why = f"{best.name} is the fastest of {', '.join(names)} that fit, which this model's layers "
    return replace(best, note=f"{why}and flags allow: makespan {float(time):g}")
