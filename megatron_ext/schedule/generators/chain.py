"""Steady states on the V placement, put together rank by rank.

A building block whose steps from rank to rank all differ has far too many forms to try. But what
makes a period longer than the work of a rank is nearly always a circle of waits between two
neighbours, and that depends on their places in the period only. So the best chain of neighbours is
found by dynamic programming, with the length that each pair forces known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

from ..actions import Op
from ..costs import Durations
from ..placement import Placement
from .building_block import INTERVAL, Block, w_times
from .cycles import Graph, Row
from .period import Pattern, row_peak

_TURNS = range(1, 5)
_LONGEST = 3  # step from rank to rank
_LISTED, _CHOSEN, _CHAINS = 48, 4, 6  # blocks, and those and chains with the shortest periods

# Waits of one rank: from its first F to its second, from there to the B of the same stage, and from
# there to the B of the first.
_State = tuple[int, int, int]
_Steps = tuple[int, ...]
# Longest period forced from here to the last rank, and how to go on.
_Entry = tuple[Fraction, _State | None]


def steady_states(blocks: Sequence[Block], durations: Durations, cap: int) -> list[Pattern]:
    """The steady states with the shortest periods: of the first blocks, and of chains where these
    may be shorter.

    Args:
        blocks: of one V placement, that fit the cap.
        durations: of the passes and hops.
        cap: most activation sets on a rank.
    """
    patterns = [Pattern.of(b.placement, b.interval, b.offsets) for b in blocks[:_LISTED]]
    found = _timed(patterns, durations)
    placement = blocks[0].placement
    work = max(sum(rows[s] for s in row for rows in durations[:3]) for row in placement.stages)
    chosen = [pattern for _, pattern in found[:_CHOSEN]]
    # With a larger cap chains are those of a smaller one.
    if cap <= 2 * _LONGEST * placement.pp // 3 + 2 and found[0][0] > work:
        chosen += _chains(placement.pp, durations, cap)
    return chosen


def _chains(pp: int, durations: Durations, cap: int) -> list[Pattern]:
    """The steady states with the shortest periods of all chains, best first.

    Steps from rank to rank are 1 to 3: longer ones are for caps at which the named blocks already
    lose nothing. It takes seconds for more than a few ranks.
    """
    # Shorter steps alone too: of chains whose pairs do equally well each search knows but one.
    made = [p for n in range(2, _LONGEST + 1) for p in _Chain(pp, durations, cap, n).best()]
    return [pattern for _, pattern in _timed(made, durations)[:_CHAINS]]


def _timed(patterns: Sequence[Pattern], durations: Durations) -> list[tuple[Fraction, Pattern]]:
    """Those that can run with the lengths of their periods, shortest first."""
    timed = []
    for pattern in patterns:
        length = pattern.period(durations)  # circles through more than two ranks included
        if length is not None:
            timed.append((length, pattern))
    return sorted(timed, key=lambda pair: pair[0])


class _Chain:
    def __init__(self, pp: int, durations: Durations, cap: int, longest: int) -> None:
        self.pp, self.durations, self.cap = pp, durations, cap
        self.placement = Placement.vee(pp)
        self.longest = longest
        self.steps = tuple(product(range(1, self.longest + 1), repeat=4))
        self.fits: dict[_State, bool] = {}
        self.pairs: dict[tuple[object, ...], Fraction | None] = {}

    def best(self) -> list[Pattern]:
        """The best chain for every way that rank 0 can be; best first, as far as pairs tell."""
        tables: list[dict[_State, _Entry]] = [{} for _ in range(self.pp)]
        last = self.pp - 1
        waits = range(2 * last + 1, 2 * self.longest * last + 5)
        for f_turn, wait, b_turn in product(_TURNS, waits, _TURNS):
            if self._fits((f_turn, wait, b_turn)):
                tables[last][f_turn, wait, b_turn] = Fraction(0), None
        for rank in range(last - 1, -1, -1):
            for then, (length, _) in tables[rank + 1].items():
                for state, steps in self._before(rank, then):
                    known = tables[rank].get(state)
                    if known is not None and known[0] <= length:
                        continue
                    forced = self._pair(rank, state, steps)
                    if forced is None:
                        continue
                    forced = max(forced, length)
                    if known is None or forced < known[0]:
                        tables[rank][state] = forced, then
        ends = sorted((length, sum(s), s) for s, (length, _) in tables[0].items() if s[1] in _TURNS)
        return [self._pattern(tables, state) for _, _, state in ends]

    def _before(self, rank: int, then: _State) -> Iterator[tuple[_State, _Steps]]:
        """What the rank before may be like, and the steps between the two."""
        least = 1 + 2 * rank  # all ranks before this one take at least 2 of the middle wait
        for steps in self.steps:
            f_down, f_up, b_down, b_up = steps
            middle = then[1] - f_up - b_down
            if least <= middle <= 4 + 2 * self.longest * rank:
                state = then[0] + f_down + f_up, middle, then[2] + b_down + b_up
                if self._fits(state):
                    yield state, steps

    def _fits(self, state: _State) -> bool:
        known = self.fits.get(state)
        if known is None:
            row = _row(0, state, (0, 1))
            known = self.fits[state] = row is not None and row_peak(row) <= self.cap
        return known

    def _pair(self, rank: int, state: _State, steps: _Steps) -> Fraction | None:
        """Length of the period that this rank and the next force; None if they cannot run."""
        pp, d = self.pp, self.durations
        here = (rank, rank + 1, 2 * pp - 2 - rank, 2 * pp - 1 - rank)
        f, b, w = (tuple(row[s] for s in here) for row in d[:3])
        at_end = rank == 0 or rank == pp - 2
        place = state if at_end else tuple(wait % INTERVAL for wait in state)
        key: tuple[object, ...] = (*place, *steps, f, b, w, rank if at_end else -1)
        if key in self.pairs:
            return self.pairs[key]
        f_down, f_up, b_down, b_up = steps
        then = state[0] - f_down - f_up, state[1] + f_up + b_down, state[2] - b_down - b_up
        rows = _row(0, state, (0, 3)), _row(f_down, then, (1, 2))
        assert rows[0] is not None and rows[1] is not None
        graph = Graph(Placement.vee(2), (rows[0], rows[1]), Durations(f, b, w, d.hop, 1))
        # The ways through other ranks are not seen here.
        if rank != 0:
            graph.unlink((Op.F, 3), (Op.B, 3))
        if rank != pp - 2:
            graph.unlink((Op.F, 1), (Op.F, 2))
            graph.unlink((Op.B, 2), (Op.B, 1))
        self.pairs[key] = graph.length()
        return self.pairs[key]

    def _pattern(self, tables: list[dict[_State, _Entry]], state: _State) -> Pattern:
        rows: list[Row] = []
        begin = 0
        for rank in range(self.pp):
            row = _row(begin, state, (rank, 2 * self.pp - 1 - rank))
            assert row is not None
            rows.append(row)
            then = tables[rank][state][1]
            if then is not None:
                begin += self._step(rank, state, then)
                state = then
        return Pattern(self.placement, tuple(rows))

    def _step(self, rank: int, state: _State, then: _State) -> int:
        """The step of the first F: of all that lead there the one of the shortest period."""
        found = []
        for before, steps in self._before(rank, then):
            length = self._pair(rank, state, steps) if before == state else None
            if length is not None:
                found.append((length, steps))
        return min(found)[1][0]


def _row(begin: int, state: _State, stages: tuple[int, int]) -> Row | None:
    """One rank's period; None if two passes fall on the same time modulo the interval."""
    f1 = begin + state[0]
    b1 = f1 + state[1]
    b0 = b1 + state[2]
    taken = {begin % INTERVAL, f1 % INTERVAL, b1 % INTERVAL, b0 % INTERVAL}
    if len(taken) != 4:
        return None
    w0, w1 = w_times(taken, b0, b1)
    low, high = stages
    times = (
        *((begin, Op.F, low), (f1, Op.F, high), (b1, Op.B, high), (b0, Op.B, low)),
        *((w0, Op.W, low), (w1, Op.W, high)),
    )
    ordered = sorted((at % INTERVAL, op, s, at // INTERVAL) for at, op, s in times)
    return tuple((op, s, lag) for _, op, s, lag in ordered)
