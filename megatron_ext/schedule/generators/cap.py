"""v-cap: V placement at any memory cap, from one microbatch's to 1F1B's.

A cap's orders come from searches (``search``) for more and more microbatches, each of which begins
with the last one's orders made longer (``longer``); at equal costs without hops they come from the
first building blocks that fit it, which meet the bound or miss it by one pass. From V-Min's memory
on, whatever a smaller cap gives is a candidate for a larger one, so a larger cap is never slower;
so is what a named V schedule of that memory gives.

Below it no order can be near V-Min's makespan: by Little's law p ranks with k sets have k/2
microbatches a rank on their way, each for the time of all stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice, product

from ..actions import RankActions
from ..bounds import makespan_bound
from ..costs import Costs, Durations
from ..engine import Rows
from ..search import FINE, GAPS, Found, Search
from .blocks import VEES, Vee
from .building_block import INTERVAL, Block, vee_block
from .longer import PERIODS, longer
from .request import Request, fastest

_STEPS = (2, 3, 6, 4, 5)  # down and up of one hop, together
_TURNS = range(1, INTERVAL)
_TRIES = 24  # blocks scheduled at equal costs; the bound is nearly always met within ten
# Passes that a search places at effort 1, and twice as many in annealings. A search for one
# of a few caps takes 1 s at p=4, half of that at p=8, about 1 s for more ranks.
_WORK = 4_800_000  # over p^2, with p from 4 to 8
_MANY = 150_000  # for more ranks
_NAMED = 0.5  # share of the effort that a named schedule's search takes
_SHORT = 3  # microbatches a rank; for more, a steady state is repeated
_MUCH = 25  # work, times the passes
_STAGE = 600  # least work of a search, times the passes
_STARTS = 24  # orders of a search that a search for more microbatches begins with
_SMALL = 16  # ranks; for more, every order takes long to make
_WHOLE = 2048  # microbatches times ranks; more of them take long to schedule
_CUT_WORK = 60_000  # passes placed to find where an order for equal times is cut
_REPEATED = 2  # longer orders that are timed in full
LEAST_CAP = 2  # activation sets: those of one microbatch, of both chunks of a rank


def v_cap_limits(pp: int) -> tuple[int, int]:
    """V-Min's and 1F1B's memory, in activation sets."""
    return VEES["v-min"].cap(pp), 2 * pp


def v_cap(request: Request) -> RankActions:
    """The fastest order found under ``request.memory_cap`` activation sets (default 2p).

    At F=B=W, without hops and for m >= 2p the makespan is at most 1 chunk unit above
    ``unit_bound``, for every p in 2..32 and every cap. Under any costs it is at most that of the
    named V schedules that fit the cap, and never more than with a smaller cap.
    ``request.effort`` is that of one cap; one to three are searched.
    """
    cap = 2 * request.pp if request.memory_cap is None else request.memory_cap
    return request.tasks.actions(_under(replace(request, memory_cap=None), cap).rows)


def _under(plain: Request, cap: int) -> Found:
    if cap < v_cap_limits(plain.pp)[0]:
        return searched(plain, cap) if plain.effort else _quick(plain, _base(plain, cap), cap)
    if not plain.effort:
        vee = [vee for vee in VEES.values() if vee.cap(plain.pp) <= cap][-1]
        rows = vee.rows(plain.pp, plain.microbatches)
        return _quick(plain, rows, cap)
    if not plain.at_unit_times:
        return _of_searches(plain, cap)
    best = _at_unit_times(plain, cap)
    if plain.pp > _SMALL or best.time <= _bound(plain, cap):
        return best
    return fastest(best, _of_searches(plain, cap))


def _of_searches(plain: Request, cap: int) -> Found:
    """The fastest order of searches for this cap and for those others that may be faster."""
    pp = plain.pp
    least, _ = v_cap_limits(pp)
    named = [vee.cap(pp) for vee in VEES.values()]
    # Few caps for many ranks: each takes a search. The same ones for every request, so that what
    # a smaller cap was given is among a larger one's candidates.
    step = max(1, pp // (8 if pp <= _SMALL else 4))
    caps = [k for k in range(least, cap + 1) if not (k - least) % step or k in named]
    best = _at_cap(plain, caps.pop())
    for smaller in reversed(caps):
        if best.time <= _bound(plain, smaller):
            break  # no smaller cap can be faster
        best = fastest(best, _at_cap(plain, smaller))
    # With few microbatches a named order may keep less than its name stands for, in sets.
    few = plain.microbatches < 2 * pp
    for vee in VEES.values():
        if few and vee.cap(pp) > cap and best.time > _bound(plain, cap):
            found = named_order(plain, vee)
            if max(plain.tasks.peaks(found.rows)) <= cap:
                best = fastest(best, found)
    return best


def _at_cap(plain: Request, cap: int) -> Found:
    """The fastest order found for this cap, not slower than its named schedule."""
    for vee in VEES.values():
        if vee.cap(plain.pp) == cap and not plain.at_unit_times:
            named = named_order(plain, vee)
            if named.time <= _bound(plain, cap):
                return named
            return fastest(named, searched(plain, cap))
    return searched(plain, cap)


def named_order(request: Request, vee: Vee) -> Found:
    """The published order at equal costs, for others the best of a short search in its memory."""
    rows, cap = vee.rows(request.pp, request.microbatches), vee.cap(request.pp)
    if request.at_unit_times:
        return request.found(rows)
    own = replace(request, effort=request.effort * _NAMED)
    return searched(own, cap) if request.effort else _quick(own, rows, cap)


def loosened(request: Request) -> list[RankActions]:
    """The named V orders and their list schedules in 1F1B's memory, the fastest first.

    Most of their sets live from F to B, where offload takes them, and few between B and W.
    """
    found: list[Found] = []
    for vee in VEES.values():
        search = request.search(v_cap_limits(request.pp)[1])
        search.start(vee.rows(request.pp, request.microbatches), GAPS[:1])
        found += search.pool
    return [request.tasks.actions(one.rows) for one in sorted(found, key=lambda one: one.time)]


def _quick(request: Request, rows: Rows, cap: int) -> Found:
    """This order, or the fastest of a few list schedules of it under ``cap``."""
    gaps = GAPS[:1] if request.is_long else GAPS
    search = request.search(cap)
    search.start(rows, gaps)
    return search.pool[0]


@lru_cache(maxsize=64)
def searched(request: Request, cap: int) -> Found:
    """The fastest order found for this cap alone; not slower than a named V order for equal costs.

    For more than ``_SHORT`` microbatches a rank the steady state of fewer is repeated (``_whole``).
    """
    pp, m = request.pp, request.microbatches
    work = int((_MANY if pp > 8 else _WORK // max(pp, 4) ** 2) * request.effort)
    last = m if m <= _SHORT * pp else _steady(request, work)
    search: Search | None = None
    sizes = _sizes(pp, last, work)
    for size in sizes:
        search = _search(replace(request, microbatches=size), cap, work // len(sizes), search)
    assert search is not None  # there is one size at least
    if last < m:
        search = _whole(request, cap, search, work)
    return search.pool[0]


def _steady(request: Request, work: int) -> int:
    """Microbatches of an order whose steady state is repeated for more; any period fits in then."""
    pp, m = request.pp, request.microbatches
    # In little time a steady state is found only where it is long; at equal times the best orders
    # for few microbatches have none.
    short = work >= _MUCH * 6 * pp * (2 * pp + 1) and not request.at_unit_times
    least = 2 * pp + 1 if short else 3 * pp + 1
    return min(m, least + (m - least) % PERIODS[-1])


def _sizes(pp: int, last: int, work: int) -> list[int]:
    """Microbatches of the searches one after the other: each takes some work."""
    most = max(1, work // (_STAGE * 6 * pp * last))
    step = -(-(last - pp) // most)
    return list(range(last, pp, -step))[::-1] if step > 0 else [last]


def _search(request: Request, cap: int, work: int, short: Search | None) -> Search:
    """A search that has ended; ``short``: one for fewer microbatches."""
    tasks = request.tasks
    search = request.search(cap, _bound(request, cap))
    if short is not None:
        for rows in islice(longer(short, tasks, work, _longest(request)), _STARTS):
            search.add(rows)
    blocks = _each_block(request.pp, cap) if cap >= v_cap_limits(request.pp)[0] else ()
    search.run(_fixed(request, cap), work, (block.rows(tasks) for block in blocks))
    return search


def _whole(request: Request, cap: int, short: Search, work: int) -> Search:
    """Orders for many microbatches, from a search for fewer."""
    search = request.search(cap, _bound(request, cap))
    for rows in islice(longer(short, request.tasks, work, _longest(request)), _REPEATED):
        search.add(rows)
    for rows in _fixed(request, cap):
        search.add(rows)
    if request.microbatches * request.pp <= _WHOLE:
        # What a list schedule gains in a steady state may have no period to repeat.
        for found in list(search.pool):
            search.start(found.rows)
        # Vocabulary passes fit badly into annealed orders.
        if not request.every_microbatch:
            search.anneal(search.pool[0].rows, work)
    return search


def _longest(request: Request) -> int:
    """Period that is repeated, in microbatches."""
    return 1 if request.every_microbatch else PERIODS[-1]


def _fixed(request: Request, cap: int) -> Iterator[Rows]:
    """The order for this cap at equal times, and the named V orders of no more memory; for many
    ranks one kind of them, as each takes long to make."""
    named = _named(request, cap)
    if not named or request.pp <= _SMALL:
        base = _base(request, cap)
        yield base
        named = [rows for rows in named if rows != base]
    yield from named


def _named(request: Request, cap: int) -> list[Rows]:
    """The named V orders of this memory; with few microbatches one may keep less than its name
    stands for."""
    pp, m = request.pp, request.microbatches
    return [
        rows
        for vee in VEES.values()
        if vee.cap(pp) == cap or m < 2 * pp
        for rows in [vee.rows(pp, m)]
        if max(request.tasks.peaks(rows)) <= cap
    ]


def _base(request: Request, cap: int) -> Rows:
    """An order that fits the cap: the best at equal times, or below V-Min's memory its block,
    repeated slowly enough."""
    if cap >= v_cap_limits(request.pp)[0]:
        unit = replace(request, durations=Durations.unit(request.placement))
        return _at_equal_times(unit, cap).rows
    block = VEES["v-min"].block(request.pp)
    while block.peak() > cap:
        block = replace(block, interval=block.interval + 1)
    return block.rows(request.tasks)


def _bound(request: Request, cap: int) -> Fraction:
    """A time that no order under this cap beats, in the unit of the table."""
    d = request.durations
    stages = tuple((Fraction(f), Fraction(b), Fraction(w)) for f, b, w in zip(*d[:3]))
    costs = Costs(hop=Fraction(d.hop), stages=stages)
    return makespan_bound(request.placement, request.microbatches, costs, cap) * FINE


def unit_bound(pp: int, microbatches: int, cap: int) -> int:
    """Least makespan in chunk units at F=B=W and no hops, V placement, ``cap`` sets a rank.

    The larger of CM's bound (its figure 13), and of what the last rank needs: its first F cannot
    start before p-1 and its first B not before 3p-1; in between the memory takes ``cap`` F's.
    """
    return 6 * microbatches + max(6 * pp - 3 * cap - 1, 3 * pp - 1 - min(cap, 2 * pp))


def _at_unit_times(request: Request, cap: int) -> Found:
    """The fastest order of this cap and all smaller ones; those of which the bound says that they
    cannot be faster are not made."""
    one, m = request.durations.forward[0] * FINE, request.microbatches
    best = _at_equal_times(request, cap)
    for smaller in range(cap - 1, v_cap_limits(request.pp)[0] - 1, -1):
        # The bound holds where memory binds: a rank has two sets a microbatch.
        if smaller < 2 * m and best.time <= unit_bound(request.pp, m, smaller) * one:
            break
        if smaller >= 2 * m and request.pp > _SMALL and smaller % 8:
            continue
        best = fastest(best, _at_equal_times(request, smaller))
    if m >= 2 * request.pp:
        return best  # the named orders are among what was made
    return fastest(best, *map(request.found, _named(request, cap)))


@lru_cache(maxsize=64)
def _at_equal_times(request: Request, cap: int) -> Found:
    """The list-scheduled block that takes least at equal times."""
    more = request.microbatches - 3 * request.pp
    if more > (request.pp if request.pp <= _SMALL else 0):
        first = replace(request, microbatches=3 * request.pp)
        short = first.search(cap)
        short.add(_unit_plan(first, cap).rows)
        for rows in longer(short, request.tasks, _CUT_WORK, longest=1):
            return request.found(rows)
    return _unit_plan(request, cap)


@lru_cache(maxsize=64)
def _unit_plan(request: Request, cap: int) -> Found:
    """The fastest of the first blocks at equal times; stops at the bound, and one above it after a
    few more tries."""
    pp, m, one = request.pp, request.microbatches, request.durations.forward[0] * FINE
    bound = unit_bound(pp, m, cap) * one
    best: Found | None = None
    named = {vee.cap(pp): vee for vee in VEES.values()}
    for tried, block in enumerate(islice(_each_block(pp, cap), _TRIES)):
        if not tried and cap in named:
            found = request.found(named[cap].rows(pp, m))
        else:
            found = request.listed(block.rows(request.tasks), cap)
        best = found if best is None else fastest(best, found)
        if best.time <= bound or (best.time <= bound + one and tried >= 6):
            break
    assert best is not None  # V-Min's block fits every cap
    return best


def _named_block(pp: int, cap: int) -> Block:
    """The block of the largest named V order that fits."""
    return [vee for vee in VEES.values() if vee.cap(pp) <= cap][-1].block(pp)


def _each_block(pp: int, cap: int) -> Iterator[Block]:
    """``_blocks``; all but the first take long to find for many ranks."""
    yield _named_block(pp, cap)
    yield from _blocks(pp, cap)[1:]


@lru_cache(maxsize=256)
def _blocks(pp: int, cap: int) -> list[Block]:
    """Blocks that fit the cap, the likely best first: most memory, then longest lifespans,
    which leave most room for passes to come late.

    A rank's two chunks turn around at the ends of the pipeline, so only the sum of a hop's steps
    down and up matters, and here it changes once along the ranks (CM, appendix A).
    """
    first = [_named_block(pp, cap)]
    if cap == v_cap_limits(pp)[0] + 1:
        # One set more than V-Min's: the last hop of the B's takes 2, and W waits.
        ones, last = (1,) * (pp - 1), (1,) * (pp - 2) + (2,)
        first += _block(pp, cap, (ones, ones, last, last), (1, 1, 1), True)
    found: list[tuple[tuple[int, int, int], Block]] = []
    for steps, turns in _shapes(pp, cap):
        ones, more = (1,) * (pp - 1), tuple(step - 1 for step in steps)
        for late_w in (False, True):
            for block in _block(pp, cap, (more, ones, more, ones), turns, late_w):
                key = (-block.peak(), -sum(block.offsets.values()), len(found))
                found.append((key, block))
    found.sort(key=lambda pair: pair[0])
    return first + [block for _, block in found]


def _shapes(pp: int, cap: int) -> Iterator[tuple[tuple[int, ...], tuple[int, int, int]]]:
    """Steps and turns of which no two passes of a rank collide, with about as much memory."""
    hops = pp - 1
    for a, b in product(_STEPS, repeat=2):
        for count in range(1, hops) if a != b else (hops,):
            steps = (a,) * count + (b,) * (hops - count)
            total = sum(steps)
            to_last = {sum(steps[rank:]) % INTERVAL for rank in range(pp)}
            for f_turn, loss_turn, b_turn in product(_TURNS, repeat=3):
                # Lifespans of a rank's two chunks, up to the waits for W; a sixth is the peak.
                spans = 2 * total + f_turn + 2 * loss_turn + b_turn
                if not INTERVAL * (cap - 3) <= spans <= INTERVAL * cap:
                    continue
                # First F to second, and so on to the last B, on the last rank.
                second = f_turn + loss_turn + total
                if second % INTERVAL == 0 or (second - f_turn + b_turn) % INTERVAL == 0:
                    continue
                taken = {-f_turn, -b_turn, loss_turn + total, -second - b_turn}
                if not any(place % INTERVAL in to_last for place in taken):
                    yield steps, (f_turn, loss_turn, b_turn)


_Steps = tuple[tuple[int, ...], ...]  # F down, F up, B down, B up, by hop


def _block(
    pp: int, cap: int, steps: _Steps, turns: tuple[int, ...], late_w: bool
) -> Iterator[Block]:
    """The block of these steps, if it exists and its peak is the cap or one less."""
    try:
        down, up, b_down, b_up = steps
        block = vee_block(pp, down, up, *turns, b_steps=(b_down, b_up), late_w=late_w)
    except ValueError:
        return
    if cap - 1 <= block.peak() <= cap:
        yield block
