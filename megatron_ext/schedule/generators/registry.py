"""The named schedules: which memory each one has, and the candidates for its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..actions import AnyAction, RankActions
from ..effects import peak_sets
from .blocks import VEES, gis_peak, grouped_block, named_block
from .cap import named_order, v_cap
from .dualpipev import dualpipev
from .grouped import interleaved_zb, interleaved_zb_small
from .request import Make, Request


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
    return lambda r: named_block(name, r.pp, r.microbatches, r.chunks).stamp(r.microbatches)


_one_f_one_b, _interleaved, _po = map(_fixed, ("1f1b", "interleaved", "po"))


def _zb_h1(request: Request) -> RankActions:
    return request.shaped([_fixed("zb-h1")], request.pp)


def _zb_h2(request: Request) -> RankActions:
    return request.shaped([_fixed("zb-h2")], 2 * request.pp - 1)


def _interleaved_zb(request: Request) -> RankActions:
    makes: list[Make] = [_interleaved_zb_fixed]
    if request.microbatches >= 3 * request.pp:
        makes.append(lambda r: interleaved_zb_small(r.pp, r.microbatches, r.chunks))
    return request.shaped(makes, request.pp * request.chunks)


def _interleaved_zb_fixed(request: Request) -> RankActions:
    pp, chunks = request.pp, request.chunks
    fixed = interleaved_zb(pp, request.microbatches, chunks)
    if not request.microbatches % pp:
        return fixed
    return request.fastest([fixed, request.listed_at_unit_times(fixed, pp * chunks)])


def _vee(name: str) -> Make:
    return lambda request: request.tasks.actions(named_order(request, VEES[name]).rows)


_v_zb, _v_half, _v_min = map(_vee, ("v-zb", "v-half", "v-min"))


def _gis(request: Request) -> RankActions:
    return _grouped(request, request.group_size or request.pp)


def _gis_h(request: Request) -> RankActions:
    return _grouped(request, -(-request.pp // 2))


def _grouped(request: Request, group: int) -> RankActions:
    def fixed(r: Request) -> RankActions:
        return grouped_block(r.pp, r.chunks, group, "next").stamp(r.microbatches)

    peak = gis_peak(request.pp, request.microbatches, request.chunks, group)
    if not request.microbatches % group:
        return request.shaped([fixed], peak)
    # An incomplete last group leaves holes in the fixed order, and less in memory.
    whole = fixed(request)
    most = max(peak_sets(whole))
    caps = [min(sets, most) for sets in peak]
    listed = request.listed_at_unit_times(whole, caps)
    return request.fastest([whole, listed, request.shaped([fixed], caps)])


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
    "gis": Generator(_gis, "loop", 2, True, True, "interleaved in groups of --pp-group-size", True),
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
