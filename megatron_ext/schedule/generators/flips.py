"""Two passes change places on all ranks at once, and a short annealing adapts the rest.

Single moves change one rank, and where all ranks run one pass before another, an order with the
two exchanged on some ranks only is much slower: annealing hardly ever comes through. So both are
exchanged everywhere (an iterated local search: Lourenco, Martin and Stutzle 2003).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from ..actions import Action, Op, RankActions
from ..effects import peak_sets
from .annealing import Room, anneal, fits
from .request import Request

_FAR = 4  # places between the two passes, at most
EACH = 20  # work of an annealing, times the passes
_HEAT = 0.1  # of it, in mean passes


def with_flips(
    request: Request,
    cap: int,
    start: RankActions,
    work: int,
    enough: Fraction,
    random: Callable[[], float],
    room: Room | None = None,
) -> RankActions:
    """The fastest order that is found from ``start``; ``start`` if none is faster.

    Args:
        request, cap, enough, random, room: as for ``anneal``; V placement.
        start: an order under the cap and in the room.
        work: after about so many tries of moves it ends.
    """
    passes = sum(map(len, start))
    best, least = start, request.time_of(start)
    present = start
    assert least is not None
    while work > 0 and least > enough:
        work -= passes // 4
        flipped = _flipped(present, request.pp, random)
        if flipped is None or max(peak_sets(flipped)) > cap or not _runs(request, flipped):
            continue
        if room is not None and not fits(flipped, room):
            continue
        each = min(work, EACH * passes)
        work -= each
        found = anneal(request, cap, flipped, each, _HEAT, enough, random, room)
        time = request.time_of(found, least)
        if time is not None:  # no slower than the best
            present = found
            if time < least:
                best, least = found, time
    return best


def _flipped(orders: RankActions, pp: int, random: Callable[[], float]) -> RankActions | None:
    """``orders`` in which one F or B stands after another on all ranks where it stands a few places
    before it now; None if that is not so on two ranks."""
    row = orders[int(random() * pp)]
    place = int(random() * len(row))
    other = place + 1 + int(random() * _FAR)
    if other >= len(row):
        return None
    first, second = row[place], row[other]
    if Op.W in (first.op, second.op) or (first.op, first.stage) == (second.op, second.stage):
        return None
    changed, flipped = 0, []
    for row in orders:
        places = {(a.op, a.stage < pp, a.microbatch): place for place, a in enumerate(row)}
        begin = places[first.op, first.stage < pp, first.microbatch]
        end = places[second.op, second.stage < pp, second.microbatch]
        if 0 < end - begin <= _FAR:
            changed += 1
            between = row[begin : end + 1]
            late = [a for a in between if _goes_with(a, row[begin])]
            early = [a for a in between if not _goes_with(a, row[begin])]
            row = [*row[:begin], *early, *late, *row[end + 1 :]]
        flipped.append(row)
    return flipped if changed > 1 else None


def _goes_with(action: Action, first: Action) -> bool:
    """True for ``first`` and what cannot run before it: its lane, and its own W."""
    same = action.op == first.op or (action.op is Op.W and action.microbatch == first.microbatch)
    return action.stage == first.stage and same


def _runs(request: Request, orders: RankActions) -> bool:
    try:
        return request.time_of(orders) is not None
    except ValueError:
        return False  # passes wait for each other in a circle
