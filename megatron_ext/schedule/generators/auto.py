"""auto: the fastest schedule of all families that fits a memory cap, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..costs import Costs
from ..schedule import Schedule
from ..simulate import Simulation, simulate
from .cap import v_cap_limits
from .grouped import gis_peak
from .registry import GENERATORS, NAMES
from .request import Objective


@dataclass(frozen=True)
class Choice:
    """One family's schedule and what it takes.

    Attributes:
        schedule: its orders.
        time: makespan, or longest span, in the units of the costs.
        peak: most activations on a rank, in microbatches.
    """

    schedule: Schedule
    time: Fraction
    peak: Fraction


def auto(
    make: Callable[..., Schedule],
    pp: int,
    microbatches: int,
    chunks: int | None,
    costs: Costs,
    memory_cap: int | None,
    objective: Objective,
    names: Sequence[str] = NAMES,
) -> Schedule:
    """The fastest of ``names`` whose peak fits, the simpler one of those equally fast.

    Args:
        make: ``generate``.
        pp, microbatches, costs, objective: as ``generate``.
        chunks: of the families that take any number; default 2. Per-stage costs are for this many
            chunks; families with one chunk get the sums.
        memory_cap: most activation sets of one of ``chunks`` chunks on a rank; default 1F1B's,
            p*chunks.
        names: of the families that it may choose from.

    Returns:
        The schedule, with the reason in ``note``.

    Raises:
        ValueError: nothing fits.
    """
    parts = 2 if chunks is None else chunks
    cap = Fraction(pp) if memory_cap is None else Fraction(memory_cap, parts)
    some = None if len(names) == len(NAMES) else ", ".join(names)
    fitting: list[Choice] = []
    least: list[tuple[Fraction, str]] = []
    for name in simplest_first(names):
        options = family_options(name, pp, microbatches, parts, cap)
        if options is None:
            continue
        family_costs = costs_for(costs, pp * options["chunks"])
        if family_costs is None:
            continue
        schedule = make(name, pp, microbatches, costs=family_costs, objective=objective, **options)
        run = simulate(schedule)
        peak = max(run.peak_activation)
        if peak > cap:
            least.append((peak, name))
            continue
        fitting.append(Choice(schedule, time_taken(run, objective), peak))
    if not fitting:
        need = f"; the least of all is {_text(min(least)[0])} ({min(least)[1]})" if least else ""
        which = f"none of {some}" if some else "no schedule"
        raise ValueError(
            f"{which} at pp={pp} with {microbatches} microbatches fits a cap of {_text(cap)} "
            f"microbatches of activations per rank{need}"
        )
    best = min(fitting, key=lambda choice: choice.time)  # the first, i.e. simplest, of the fastest
    of = some or str(len(fitting))
    return replace(best.schedule, note=_why(best, of, fitting, least, cap, objective))


def simplest_first(names: Iterable[str]) -> list[str]:
    """``names`` in the order of the registry."""
    return sorted(names, key=NAMES.index)


def time_taken(run: Simulation, objective: Objective) -> Fraction:
    """What ``objective`` makes short, in the units of the costs."""
    if objective == "makespan":
        return run.makespan
    return Fraction(max(e[-1] - s[0] for s, e in zip(run.start, run.end) if s), run.scale)


def family_options(
    name: str, pp: int, microbatches: int, chunks: int, cap: Fraction
) -> dict[str, int] | None:
    """Options of ``generate`` with which ``name`` may fit: the largest group, the whole cap.

    Args:
        name, pp, microbatches: as ``generate``.
        chunks: if the family takes any number.
        cap: most activations on a rank, in microbatches.

    Returns:
        ``chunks`` and what else it takes; it may turn out not to fit. None if it cannot.
    """
    generator = GENERATORS[name]
    if generator.any_chunks and chunks < generator.default_chunks:
        return None
    options = {"chunks": chunks if generator.any_chunks else generator.default_chunks}
    if generator.takes_group_size:
        sizes = range(pp, -(-pp // 2), -1)  # ceil(p/2) itself is gis-h
        fits = [g for g in sizes if max(gis_peak(pp, microbatches, chunks, g)) <= cap * chunks]
        if not fits:
            return None
        options["group_size"] = fits[0]
    if generator.takes_memory_cap:
        low, high = v_cap_limits(pp)
        sets = min(high, int(cap * 2))
        if sets < low:
            return None
        options["memory_cap"] = sets
    return options


def costs_for(costs: Costs, stages: int) -> Costs | None:
    """``costs`` for another number of stages: neighbours are summed. None if that cannot be."""
    if costs.stages is None or len(costs.stages) == stages:
        return costs
    if len(costs.stages) % stages:
        return None
    size = len(costs.stages) // stages
    rows = [costs.stages[i : i + size] for i in range(0, len(costs.stages), size)]
    merged = tuple((sum(f), sum(b), sum(w)) for f, b, w in (zip(*row) for row in rows))
    return replace(
        costs, stages=tuple((Fraction(f), Fraction(b), Fraction(w)) for f, b, w in merged)
    )


def _why(
    best: Choice,
    of: str,
    fitting: list[Choice],
    unfit: list[tuple[Fraction, str]],
    cap: Fraction,
    objective: Objective,
) -> str:
    others = sorted(
        (choice for choice in fitting if choice is not best), key=lambda choice: choice.time
    )
    text = (
        f"{best.schedule.name} is the fastest of {of} that fit in {_text(cap)} "
        f"microbatches of activations per rank: {objective} {_text(best.time)}, "
        f"peak {_text(best.peak)}"
    )
    if others:
        second = others[0]
        more = second.time / best.time - 1
        how = "as fast, but less simple" if not more else f"{float(more):.1%} slower"
        text += f"; next is {second.schedule.name}, {how}"
    if unfit:
        text += f"; too large: {', '.join(f'{name} ({_text(peak)})' for peak, name in unfit)}"
    return text


def _text(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.4g}"
