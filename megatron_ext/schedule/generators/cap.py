"""v-cap: V placement at any memory cap from V-Min's to 1F1B's.

Candidates are periodic building blocks, list-scheduled under the cap: blocks that change their
steps once along the ranks (CM, appendix A), for unequal costs also the best steady states that a
search finds, and the named V orders. Whatever a smaller cap gives is a candidate for a larger one,
so a larger cap is never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import product

from ..actions import RankActions
from ..costs import Durations
from ..effects import peak_sets
from ..placement import Placement
from .building_block import Block, vee_block
from .chain import chains, most_sets
from .list_scheduler import list_schedule
from .period import Pattern, improve
from .request import Request
from .vee import v_half, v_half_block, v_half_cap, v_min, v_min_block, v_min_cap, v_zb, v_zb_block

_STEPS = ((1, 1), (1, 2), (2, 2), (4, 2), (2, 1))  # (down, up) of one hop
_TURNS = range(1, 5)
_TRIES = 24  # blocks scheduled at equal costs; the bound is nearly always met within ten
_WHOLE = 2048  # microbatches times ranks; more of them take long to schedule
_LATER = 6  # orders that are repeated up to the real number of microbatches
_SEARCH = 640  # tabu steps times p^2, so that a search takes about as long at every p


def v_cap_limits(pp: int) -> tuple[int, int]:
    """Least and largest cap, in activation sets: V-Min's and 1F1B's memory."""
    return v_min_cap(pp), 2 * pp


def v_cap(request: Request) -> RankActions:
    """The fastest order found under ``request.memory_cap`` activation sets (default 2p).

    At F=B=W, without hops and for m >= 2p the makespan is at most 1 chunk unit above
    ``unit_bound``, for every p in 2..32 and every cap. Under any costs it is at most that of the
    named V orders that fit the cap, and never more than with a smaller cap.
    """
    least, most = v_cap_limits(request.pp)
    cap = most if request.memory_cap is None else request.memory_cap
    plain = replace(request, memory_cap=None)
    if request.at_unit_times and request.objective == "makespan":
        return _at_unit_times(plain, cap)
    # Few caps for many ranks: each takes a search. The same ones for every request, so that what
    # a smaller cap was given is among a larger one's candidates.
    searched = range(least, cap + 1, max(1, request.pp // 8))
    return request.fastest([*_named(request, cap), *(_own(plain, k) for k in searched)])


def _at_unit_times(request: Request, cap: int) -> RankActions:
    """The fastest order of this cap and all smaller ones; those of which the bound says that they
    cannot be faster are not made."""
    one, m = request.durations.forward[0], request.microbatches
    best = _own(request, cap)
    least = _time(request, best)
    for smaller in range(cap - 1, v_cap_limits(request.pp)[0] - 1, -1):
        # The bound holds where memory binds: a rank has two sets a microbatch.
        if smaller < 2 * m and least <= unit_bound(request.pp, m, smaller) * one:
            break
        if smaller >= 2 * m and request.pp > 16 and smaller % 8:
            continue
        orders = _own(request, smaller)
        taken = _time(request, orders)
        if taken < least:
            best, least = orders, taken
    # With many microbatches the named orders are among what was made.
    few = request.microbatches < 2 * request.pp
    return request.fastest([best, *_named(request, cap)]) if few else best


def _time(request: Request, orders: RankActions) -> int:
    taken = request.time_of(orders)
    assert taken is not None  # only with a limit
    return taken


def unit_bound(pp: int, microbatches: int, cap: int) -> int:
    """Least makespan in chunk units at F=B=W and no hops, V placement, ``cap`` sets a rank.

    The larger of CM's bound (its figure 13), and of what the last rank needs: its first F cannot
    start before p-1 and its first B not before 3p-1; in between the memory takes ``cap`` F's.
    """
    return 6 * microbatches + max(6 * pp - 3 * cap - 1, 3 * pp - 1 - min(cap, 2 * pp))


def _named(request: Request, cap: int) -> Iterator[RankActions]:
    """The fixed V orders that fit, shaped for the costs."""
    pp, m = request.pp, request.microbatches
    plain = replace(request, memory_cap=None)
    for make, need in ((v_min, v_min_cap(pp)), (v_half, v_half_cap(pp)), (v_zb, 2 * pp)):
        # With few microbatches an order may keep less than its name stands for.
        if need <= cap or m < 2 * pp:
            fixed = make(pp, m)
            if max(peak_sets(fixed)) <= cap:
                yield _shaped(plain, make, min(need, cap))


@lru_cache(maxsize=16)
def _shaped(request: Request, make: Callable[[int, int], RankActions], cap: int) -> RankActions:
    """The fastest of a fixed V order and its reorderings; the same for all larger caps."""
    fixed = make(request.pp, request.microbatches)
    return request.fastest([fixed, *request.reordered(fixed, cap, thorough=True)])


@lru_cache(maxsize=64)
def _own(request: Request, cap: int) -> RankActions:
    """The fastest order from blocks chosen for this cap. Long runs are planned for fewer
    microbatches, and the steady state repeated."""
    more = request.microbatches - 3 * request.pp
    if more > request.pp:
        short = replace(request, microbatches=3 * request.pp)
        valid = []
        for plan in _plans(short, cap, more):
            longer = repeat_period(plan, more)
            if longer is not None and max(peak_sets(longer)) <= cap and _runs(request, longer):
                valid.append(longer)
        if valid:
            if not request.at_unit_times and request.microbatches * request.pp <= _WHOLE:
                # What a greedy schedule gains at the ends may be no steady state to repeat.
                valid += _best_whole(request, short, cap, more)
            return request.fastest(valid)
    return _plans(request, cap, 0)[0]


def _best_whole(request: Request, short: Request, cap: int, more: int) -> Iterable[RankActions]:
    """All microbatches of the pattern that promises most."""
    promises = []
    for number, pattern in enumerate(_patterns(request.pp, request.durations, cap)):
        stamped = pattern.stamp(short.microbatches)
        period = pattern.period(request.durations)
        assert period is not None
        promises += [
            (_time(short, orders) + more * period, number)
            for orders in short.reordered(stamped, cap)
        ]
    best = _patterns(request.pp, request.durations, cap)[min(promises)[1]]
    return request.reordered(best.stamp(request.microbatches), cap)


def _runs(request: Request, orders: RankActions) -> bool:
    try:
        request.time_of(orders)
    except ValueError:
        return False  # the ranks' steady states do not fit together there
    return True


def _plans(request: Request, cap: int, more: int) -> list[RankActions]:
    """The fastest order, and those that promise most for ``more`` microbatches more."""
    if request.at_unit_times:
        return [_unit_plan(request, cap, _blocks(request.pp, cap))]
    ranked: list[tuple[int, int, Fraction, RankActions]] = []
    for pattern in _patterns(request.pp, request.durations, cap):
        stamped = pattern.stamp(request.microbatches)
        period = pattern.period(request.durations)
        assert period is not None
        for orders in (stamped, *request.reordered(stamped, cap)):
            ranked.append((_time(request, orders), len(ranked), period, orders))
    first = min(ranked)
    if not more:
        return [first[3]]
    later = sorted(ranked, key=lambda plan: (plan[0] + more * plan[2], plan[1]))
    later = later[: _LATER if request.pp <= 8 else 1]
    return [first[3], *(plan[3] for plan in later if plan[1] != first[1])]


@lru_cache(maxsize=64)
def _patterns(pp: int, durations: Durations, cap: int) -> list[Pattern]:
    """The steady states with the shortest periods that were found for this cap."""
    small = pp <= 8
    blocks = _blocks(pp, cap)[: 48 if small else 6]
    patterns = [Pattern.of(b.placement, b.interval, b.offsets) for b in blocks]
    timed = []
    for number, pattern in enumerate(patterns):
        length = pattern.period(durations)
        if length is not None:
            timed.append((length, number))
    timed.sort()
    chosen = [patterns[number] for _, number in timed[: 4 if small else 1]]
    steps = _SEARCH // pp**2
    if steps > 2:
        chosen += _searched(chosen[0], durations, cap, steps)
    work = max(
        sum(rows[s] for s in row for rows in durations[:3]) for row in Placement.vee(pp).stages
    )
    lengths = [length for p in chosen if (length := p.period(durations)) is not None]
    if cap <= most_sets(pp) and min(lengths) > work:
        better = chains(pp, durations, cap, 6 if small else 2)
        chosen += better
        if better and steps > 2:
            chosen.append(improve(better[0], durations, cap, steps))
    return chosen


def _searched(start: Pattern, durations: Durations, cap: int, steps: int) -> list[Pattern]:
    """Better steady states than ``start``. A search for costs that differ more from each other
    finds other patterns; from those the search for the real costs starts once more."""
    first = improve(start, durations, cap, steps)
    second = improve(improve(start, _exaggerated(durations), cap, steps), durations, cap, steps)
    return [first] if first == second else [first, second]


def _exaggerated(durations: Durations) -> Durations:
    """Every duration twice as far from the mean, but at least a quarter of it."""
    rows = durations[:3]
    total, count = sum(map(sum, rows)), sum(map(len, rows))

    def far(time: int) -> int:
        return max(4 * (2 * count * time - total), total)  # in units of 1/(4 count)

    f, b, w = (tuple(far(time) for time in row) for row in rows)
    return Durations(f, b, w, 4 * count * durations.hop, 4 * count * durations.scale)


def _unit_plan(request: Request, cap: int, blocks: Sequence[Block]) -> RankActions:
    """The list-scheduled block that takes least at equal times; stops at the bound, and one above
    it after a few more tries."""
    one = request.durations.forward[0]
    bound = unit_bound(request.pp, request.microbatches, cap) * one
    tries = _TRIES
    if request.objective == "span":
        # All there is to tell when to stop is the work of a rank, which few orders meet.
        bound, tries = 6 * request.microbatches * one, _TRIES // 3
    best: RankActions | None = None
    least = 0
    for tried, block in enumerate(blocks[:tries]):
        orders = list_schedule(block.stamp(request.microbatches), block.placement, cap)
        taken = _time(request, orders)
        if best is None or taken < least:
            best, least = orders, taken
        if least <= bound or (least <= bound + one and tried >= 6):
            break
    assert best is not None  # V-Min's block fits every cap
    return best


def _named_block(pp: int, cap: int) -> Block:
    """The block of the largest named V order that fits."""
    if cap >= 2 * pp:
        return v_zb_block(pp)
    return v_half_block(pp) if cap >= v_half_cap(pp) else v_min_block(pp)


@lru_cache(maxsize=256)
def _blocks(pp: int, cap: int) -> list[Block]:
    """Blocks that fit the cap, the likely best first: most memory, then shortest lifespans."""
    first = [_named_block(pp, cap)]
    if cap == v_min_cap(pp) + 1:
        # One set more than V-Min's: the last hop of the B's takes 2, and W waits.
        ones, last = (1,) * (pp - 1), (1,) * (pp - 2) + (2,)
        first += _block(pp, cap, (ones, ones, last, last), (1, 1, 1), True)
    found: list[tuple[tuple[int, int, int], Block]] = []
    for steps in _step_choices(pp, cap):
        for turns in product(_TURNS, repeat=3):
            for block in _block(pp, cap, steps, turns, False):
                key = (-block.peak(), sum(block.offsets.values()), len(found))
                found.append((key, block))
    found.sort(key=lambda pair: pair[0])
    return first + [block for _, block in found]


_Steps = tuple[tuple[int, ...], ...]  # F down, F up, B down, B up, by hop


def _step_choices(pp: int, cap: int) -> Iterator[_Steps]:
    """Step sizes that change once along the ranks, where the peak comes near the cap."""
    hops = pp - 1
    # The lifespans of a rank's two chunks sum to about twice this, and the peak is a sixth.
    wanted = Fraction(6 * cap - 9, 2)
    for a, b in product(_STEPS, repeat=2):
        if sum(a) == sum(b):
            counts = [hops] if a == b else []
        else:
            middle = round((wanted - sum(b) * hops) / (sum(a) - sum(b)))
            counts = [n for n in range(middle - 2, middle + 3) if 1 <= n < hops]
        for n in counts:
            down, up = ((a[i],) * n + (b[i],) * (hops - n) for i in (0, 1))
            yield down, up, down, up


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


def repeat_period(orders: RankActions, more: int) -> RankActions | None:
    """``orders`` for ``more`` microbatches more: every rank's steady state repeated.

    Returns:
        None if some rank has no steady state, i.e. never runs the same passes for the next
        microbatch twice in a row.
    """
    longer: RankActions = []
    for row in orders:
        size = len({(a.op, a.stage) for a in row})
        run = best = end = 0
        for j in range(size, len(row)):
            before = row[j - size]
            if row[j] == before._replace(microbatch=before.microbatch + 1):
                run += 1
                if run > best:
                    best, end = run, j + 1
            else:
                run = 0
        if best < size:
            return None
        start = end - best // 2
        period = row[start - size : start]
        middle = [
            a._replace(microbatch=a.microbatch + n) for n in range(1, more + 1) for a in period
        ]
        tail = [a._replace(microbatch=a.microbatch + more) for a in row[start:]]
        longer.append([*row[:start], *middle, *tail])
    return longer
