"""The named schedules, their memory, the candidates for their orders, and ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..actions import AnyAction, RankActions
from ..costs import Costs
from ..placement import Placement
from ..schedule import Schedule
from ..units import check_slices
from .blocks import VEES, gis_peak, grouped_block, named_block
from .cap import LEAST_CAP, named_order, v_cap
from .dualpipev import dualpipev
from .grouped import interleaved_zb, interleaved_zb_small
from .made import checked
from .request import Make, Request, default_effort
from .sliced import sliced

# Of all ranks, in a picture.
MOST_SETS = 1 << 22
# About, on one core, to make and simulate an order; beyond, it takes gigabytes too.
MOST_SECONDS = 60


@dataclass(frozen=True)
class Generator:
    """One named schedule.

    Attributes:
        orders: makes every rank's compute actions. Never slower, under the request's costs, than
            the fixed order of the name, and never with more memory.
        placement: ``loop`` (stage = chunk * pp + rank) or ``vee`` (see ``Placement``).
        default_chunks: chunks per rank if none are asked for.
        any_chunks: any number >= ``default_chunks`` is possible, not just that one.
        split_backward: uses B and W, so the runtime must be able to delay weight gradients.
        description: one line for people.
        takes_group_size, takes_memory_cap: which options it has; a group of ceil(p/2)+1 to p
            microbatches, a cap of 2 to 2p sets.
        fixed: its order is the same at all costs.
    """

    orders: Callable[[Request], Sequence[Sequence[AnyAction]]]
    placement: Literal["loop", "vee"]
    default_chunks: int
    any_chunks: bool
    split_backward: bool
    description: str
    takes_group_size: bool = False
    takes_memory_cap: bool = False
    fixed: bool = False


def _fixed(name: str) -> Make:
    """The repeated block of ``name``, as it is."""
    return lambda r: named_block(name, r.pp, r.chunks).stamp(r.microbatches)


_one_f_one_b, _interleaved, _po = map(_fixed, ("1f1b", "interleaved", "po"))


def _zb_h1(request: Request) -> RankActions:
    return request.shaped([_fixed("zb-h1")(request)], request.pp)


def _zb_h2(request: Request) -> RankActions:
    return request.shaped([_fixed("zb-h2")(request)], 2 * request.pp - 1)


def _interleaved_zb(request: Request) -> RankActions:
    pp, chunks = request.pp, request.chunks
    fixed = interleaved_zb(pp, request.microbatches, chunks)
    if request.microbatches % pp:
        fixed = request.fastest([fixed, request.listed_at_unit_times(fixed, pp * chunks)])
    orders = [fixed]
    if request.microbatches >= 3 * pp:
        orders.append(interleaved_zb_small(pp, request.microbatches, chunks))
    return request.shaped(orders, pp * chunks)


def _vee(name: str) -> Make:
    return lambda request: request.tasks.actions(named_order(request, VEES[name]).rows)


_v_zb, _v_half, _v_min = map(_vee, ("v-zb", "v-half", "v-min"))


def _gis(request: Request) -> RankActions:
    return _grouped(request, request.group_size or request.pp)


def _gis_h(request: Request) -> RankActions:
    return _grouped(request, -(-request.pp // 2))


def _grouped(request: Request, group: int) -> RankActions:
    pp, chunks = request.pp, request.chunks
    whole = grouped_block(pp, chunks, group, "next").stamp(request.microbatches)
    caps = gis_peak(pp, request.microbatches, chunks, group)
    if not request.microbatches % group:
        return request.shaped([whole], caps)
    # An incomplete last group leaves holes in the fixed order, and less in memory.
    most = max(request.tasks.peaks(request.tasks.rows(whole)))
    caps = [min(sets, most) for sets in caps]
    listed = request.listed_at_unit_times(whole, caps)
    return request.fastest([whole, listed, request.shaped([whole], caps)])


def _dualpipev(request: Request) -> list[list[AnyAction]]:
    return dualpipev(request.pp, request.microbatches)


# Simple first: whole backward passes, then split ones, then V placement, then joint actions, then
# searched orders. Of equally fast schedules ``auto`` takes the first.
GENERATORS: dict[str, Generator] = {
    "1f1b": Generator(
        _one_f_one_b, "loop", 1, False, False, "one forward, one backward; the default", fixed=True
    ),
    "interleaved": Generator(
        _interleaved, "loop", 2, True, False, "1F1B over several chunks; more memory", fixed=True
    ),
    "zb-h1": Generator(
        _zb_h1, "loop", 1, False, True, "split backward at 1F1B's memory; a third of its bubble"
    ),
    "zb-h2": Generator(
        _zb_h2, "loop", 1, False, True, "split backward, nearly twice the memory; no idle in a span"
    ),
    "interleaved-zb": Generator(
        _interleaved_zb, "loop", 2, True, True, "split backward, at 1F1B's memory"
    ),
    "gis-h": Generator(
        _gis_h, "loop", 2, True, True, "gis with groups of p/2: half of interleaved's memory"
    ),
    "gis": Generator(
        _gis, "loop", 2, True, True, "interleaved, W behind its B; 1F1B's memory", True
    ),
    "po": Generator(
        _po, "loop", 2, True, True, "gis-h's block repeated uniformly, made for offload", fixed=True
    ),
    "v-zb": Generator(
        _v_zb, "vee", 2, False, True, "split backward, V placement: 1F1B's memory, least bubble"
    ),
    "v-half": Generator(
        _v_half, "vee", 2, False, True, "split backward, V placement: about half of 1F1B's memory"
    ),
    "v-min": Generator(
        _v_min, "vee", 2, False, True, "split backward, V placement: about a third of the memory"
    ),
    "dualpipev": Generator(
        _dualpipev, "vee", 2, False, True, "V placement, joint F and B; one set more", fixed=True
    ),
    "v-cap": Generator(
        v_cap, "vee", 2, False, True, "V placement at any cap", takes_memory_cap=True
    ),
}

NAMES: tuple[str, ...] = tuple(GENERATORS)


def takers(option: str) -> list[str]:
    """Names of the schedules that have ``takes_group_size`` or ``takes_memory_cap``."""
    return [name for name, generator in GENERATORS.items() if getattr(generator, option)]


_EQUAL = Costs()


def generate(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs = _EQUAL,
    *,
    group_size: int | None = None,
    memory_cap: int | Fraction | None = None,
    effort: float | None = None,
    slices: int | Sequence[int] = 1,
    joined: bool = False,
) -> Schedule:
    """The schedule ``name`` for one pipeline and number of microbatches.

    A name fixes the memory; the costs shape the order, which is never slower under them than the
    name's order for equal costs (``1f1b``, ``interleaved`` and ``po`` are the same at any costs).

    Args:
        name: one of ``NAMES``; ``select`` also chooses one.
        pp: pipeline ranks, >= 2.
        microbatches: of one iteration, >= 1.
        chunks: model chunks per rank; default what the schedule uses.
        costs: of the passes and hops; kept in the schedule, for simulation and lowering.
        group_size: of ``gis``, ceil(p/2)..p microbatches; default p.
        memory_cap: most activation sets (one chunk's for one whole microbatch) on any rank, for
            ``v-cap``: 2 to 1F1B's 2p, the default. With slices it need not be a whole number.
        effort: seconds that a search may take, about (``Request``); more rarely gives a slower
            order. 0: no search; the order is made in a tenth of a second, in the same memory.
        slices: that every microbatch is cut into, or of each (``units``). With slices, and with
            costs of every unit, a name keeps the memory of its repeated block.
        joined: one W for all slices of a microbatch: fewer, longer products, and more memory.

    Returns:
        Compute actions only; see ``lower`` for transfers.

    Raises:
        ValueError: unknown name, or numbers the schedule does not exist for.
    """
    check_sizes(name, pp, microbatches, chunks, units=_slices(slices))
    effort = default_effort() if effort is None else effort
    generator = GENERATORS[name]
    chunks = generator.default_chunks if chunks is None else chunks
    _check_chunks(name, generator, chunks)
    _check_options(name, generator, pp, group_size, memory_cap)
    vee = generator.placement == "vee"
    placement = Placement.vee(pp) if vee else Placement.loop(pp, chunks)
    durations = costs.durations(placement).reduced()  # per-stage costs must fit the stages
    cut = check_slices(slices, microbatches)
    if joined and not cut:
        raise ValueError(f"{name}: one W for all slices is for microbatches that are cut")
    if cut or costs.units is not None:
        asked = Schedule(
            *(name, placement, microbatches, (), costs),
            slices=cut,
            joined=joined,
        )
        return asked.with_ranks(sliced(asked, generator, group_size, memory_cap, effort))
    if memory_cap is not None and memory_cap != int(memory_cap):
        raise ValueError(f"{name} takes whole sets, got a memory cap of {float(memory_cap):g}")
    request = Request(
        *(placement, microbatches, durations, group_size),
        None if memory_cap is None else int(memory_cap),
        effort=effort,
        every_microbatch=costs.vocabulary is not None,
    )
    ranks = checked(name, generator.orders(request))
    return Schedule(name, placement, microbatches, ranks, costs)


def check_sizes(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int | None,
    more: tuple[str, ...] = (),
    units: int = 1,
) -> None:
    """Refuse what no schedule exists for, or what would take too long to make.

    Args:
        name, pp, microbatches, chunks: as ``generate``.
        more: names beside ``NAMES`` that are known.
        units: slices of a microbatch, about.

    Raises:
        ValueError: unknown name, or a number out of range.
    """
    if name not in GENERATORS and name not in more:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join((*NAMES, *more))}")
    if pp < 2:
        raise ValueError(f"{name} needs at least 2 pipeline ranks, got pp={pp}")
    if microbatches < 1:
        raise ValueError(f"{name} needs at least 1 microbatch, got {microbatches}")
    seconds = _seconds(name, pp, microbatches * units, chunks)
    if seconds > MOST_SECONDS:
        of = f"{microbatches} microbatches" + (f" of {units} slices" if units > 1 else "")
        raise ValueError(
            f"{name} at pp={pp} and {of} would take about {seconds:.2g} s, and orders of more "
            f"than {MOST_SECONDS} s are not made; give fewer microbatches or ranks"
        )


def _slices(slices: int | Sequence[int]) -> int:
    """The mean; 1 for what is no such number, which is refused elsewhere."""
    counts = [slices] if isinstance(slices, int) else list(slices) or [1]
    return max(1, sum(counts) // len(counts))


def _seconds(name: str, pp: int, units: int, chunks: int | None) -> float:
    """About how long an order takes to be made and simulated, on one core of 2024.

    Measured: 16 us an activation set where the order is written down, 60 us where it is searched,
    and 0.15 us for every two ranks.
    """
    generator = GENERATORS.get(name)
    fixed = generator is not None and generator.fixed
    chunks = chunks or (2 if generator is None else generator.default_chunks)
    return pp * units * chunks * (16e-6 if fixed else 60e-6) + pp * pp * 1.5e-7


def _check_chunks(name: str, generator: Generator, chunks: int) -> None:
    least = generator.default_chunks
    if generator.any_chunks and chunks < least:
        fix = "use 1f1b for one chunk" if chunks == 1 else f"give chunks={least} or more"
        raise ValueError(f"{name} needs at least {least} chunks per rank, got {chunks}; {fix}")
    if not generator.any_chunks and chunks != least:
        plural = "" if least == 1 else "s"
        raise ValueError(
            f"{name} has exactly {least} chunk{plural} per rank, got {chunks}; "
            f"give chunks={least} or leave it out"
        )


def _check_options(
    name: str,
    generator: Generator,
    pp: int,
    group_size: int | None,
    memory_cap: int | Fraction | None,
) -> None:
    if group_size is not None:
        least = -(-pp // 2)
        if not generator.takes_group_size:
            raise ValueError(f"{name} has no group size, got {group_size}; leave it out or use gis")
        if not least <= group_size <= pp:
            raise ValueError(
                f"{name} at pp={pp} takes a group size from {least} (p/2 rounded up) to {pp} (p), "
                f"got {group_size}"
            )
    if memory_cap is not None and not generator.takes_memory_cap:
        raise ValueError(
            f"the memory of {name} is fixed and takes no memory cap, got {memory_cap} activation "
            "sets; use v-cap or auto for a cap"
        )
    if memory_cap is not None:
        low, high = LEAST_CAP, 2 * pp
        if not low <= memory_cap <= high:
            raise ValueError(
                f"{name} at pp={pp} takes a memory cap from {low} (one microbatch's) to {high} "
                f"(1F1B's) activation sets of half a microbatch per rank, which is "
                f"{low / high:.4g} to 1 of 1F1B's peak, got {float(memory_cap):.4g} sets "
                f"({float(memory_cap / high):.4g})"
            )
