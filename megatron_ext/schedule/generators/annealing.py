"""Simulated annealing of an order under a memory cap, each move timed from its place on.

A move costs a few passes' times, not those of the whole order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import log
from typing import NamedTuple

from ..actions import Action, Op, Operation, RankActions
from ..effects import DEVICE, KINDS, steps
from ..event_loop import Program, run
from .request import Request

_FAR = 6  # places that a pass moves at most
_CRITICAL = 0.8  # how often a pass of a critical path is looked for
_LOOKS = 3  # passes drawn until one is on a critical path
_TIMES = 4  # work: changed times that cost as much as to place a pass, or to try a move


Room = Sequence[int]  # by the number of sets on a rank, how many may be between B and W


def anneal(
    request: Request,
    cap: int,
    start: RankActions,
    work: int,
    heat: float,
    enough: Fraction,
    random: Callable[[], float],
    room: Room | None = None,
) -> RankActions:
    """The fastest order that one annealing of ``start`` finds; ``start`` if none is faster.

    Args:
        request: placement, microbatches and durations; what counts is the makespan.
        cap: most activation sets on a rank.
        start: an order under the cap and in the room; of all passes, F, B and W.
        work: after about so many tries it ends.
        heat: mean delay that is accepted at first, in mean passes; it falls with the square of the
            work that is left.
        enough: a time that no order beats.
        random: numbers from 0 to 1.
        room: of a rank (``room_of``); None: no limit but the cap.
    """
    order = Order(request, cap, start, room)
    began = order.best_time
    hot = heat * sum(map(sum, request.durations[:3])) / (3 * request.placement.num_stages)
    while order.work < work and order.best_time > enough:
        now = hot * (1 - order.work / work) ** 2
        order.move(random, int(-now * log(1 - random())))
    return order.best if order.best_time < began else start


_GROWN: dict[Operation, int] = {Op.B: 1, Op.W: -1}  # change of the number of sets between B and W


def _states(row: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Sets on a rank after every pass, and those of them that are between B and W."""
    return zip(accumulate(steps(row)), accumulate(steps(row, _GROWN)))


def fits(orders: RankActions, room: Room) -> bool:
    """True if no rank has more sets between B and W than in ``room``."""
    return all(grown <= room[held] for row in orders for held, grown in _states(row))


def room_of(orders: RankActions, cap: int) -> Room:
    """By the number of sets on a rank, how many of them may be between B and W, -1 for no such
    number, so that it takes no more bytes than the rank with most in ``orders``.

    If such a set counts g, a rank with n sets, k of them between B and W, takes n + (g - 1) k. What
    lies under the upper hull of all (n, k) takes no more than the peak of all, for every g.
    """
    most = [-1] * (cap + 1)
    for held, grown in (state for row in orders for state in _states(row)):
        most[held] = max(most[held], grown)
    most = list(accumulate(reversed(most), max))[::-1]
    hull: list[tuple[int, int]] = []
    for n, k in enumerate(most):
        while len(hull) > 1 and k >= 0:
            (n1, k1), (n2, k2) = hull[-2:]
            if (k2 - k1) * (n - n1) > (k - k1) * (n2 - n1):
                break
            hull.pop()
        if k >= 0:
            hull.append((n, k))
    for (n1, k1), (n2, k2) in pairwise(hull):
        for n in range(n1, n2):
            most[n] = (k1 * (n2 - n) + k2 * (n - n1)) // (n2 - n1)
    return most


class _Passes(NamedTuple):
    """What moves do not change, by slot; one slot more stands before the first and after the last
    pass of every rank.

    Attributes:
        took: duration.
        need: the pass whose result it needs, or that last slot.
        latency: from there.
        fed: the pass that needs its result, likewise.
        to_fed: latency to that.
        sets: change of the number of activation sets,
        grown: and of those between B and W.
    """

    took: list[int]
    need: list[int]
    latency: list[int]
    fed: list[int]
    to_fed: list[int]
    sets: list[int]
    grown: list[int]

    @classmethod
    def of(cls, program: Program, orders: RankActions) -> _Passes:
        size = program.pass_slots
        took, latency, to_fed, sets, grown = ([0] * (size + 1) for _ in range(5))
        need, fed = ([size] * (size + 1) for _ in range(2))
        for row in orders:
            for action, (lane, j) in zip(row, program.row(row)):
                node = lane.gives + j
                took[node] = lane.took
                sets[node], grown[node] = DEVICE.get(action.op, 0), _GROWN.get(action.op, 0)
                if action.op is not Op.W and lane.need >= 0:  # a W stands after its B anyway
                    source = lane.need + j
                    need[node], latency[node] = source, lane.latency
                    fed[source], to_fed[source] = node, lane.latency
        return cls(took, need, latency, fed, to_fed, sets, grown)


class _Memory:
    """What every rank of an order holds after every pass.

    Args:
        cap: most activation sets on a rank, counted from F's start to W's end.
        passes: what they change.
        nodes: every rank's slots in order.
        room: of a rank (``room_of``); None: no limit but the cap.

    Attributes:
        held: sets after the pass in each slot.
    """

    def __init__(
        self,
        cap: int,
        passes: _Passes,
        nodes: Sequence[Sequence[int]],
        room: Room | None,
    ) -> None:
        self.cap, self._passes, self._room = cap, passes, room
        self.held, self._grown = [0] * len(passes.sets), [0] * len(passes.sets)
        for row in nodes:
            self.note(-1, row)

    def note(self, before: int, seq: Sequence[int]) -> None:
        """``seq`` stands after ``before``, -1 at a rank's start."""
        held, grown = self.held[before], self._grown[before]
        for node in seq:
            held += self._passes.sets[node]
            grown += self._passes.grown[node]
            self.held[node], self._grown[node] = held, grown

    def fits(self, before: int, seq: Sequence[int]) -> bool:
        """True if ``seq`` may stand after ``before``."""
        room = self._room
        if room is None:
            return True
        held, grown = self.held[before], self._grown[before]
        sets, grows = self._passes.sets, self._passes.grown
        for node in seq:
            held += sets[node]
            grown += grows[node]
            if grown > room[held]:
                return False
        return True


def _orders(after: list[int], first: Iterable[int], m: int) -> RankActions:
    """Every rank's passes from its ``first`` one on; ``after`` has each slot's next one, the last
    slot stands for none."""
    end = len(after) - 1
    stages = end // (3 * m)
    orders: RankActions = []
    for node in first:
        orders.append([])
        while node != end:
            lane, j = divmod(node, m)
            kind, stage = divmod(lane, stages)
            orders[-1].append(Action(KINDS[kind], stage, j))
            node = after[node]
    return orders


class Order:
    """An order under a memory cap that changes by one pass at a time.

    Every pass has its end, and the longest path from its start to the end of all. Both change from
    a move's place on, in the order that they had before; a move is given up as soon as some pass
    lies on too long a path (Balas and Vazacopoulos, Management Science 1998).

    Args:
        request: placement, microbatches and durations; what counts is the makespan.
        cap: most activation sets on a rank, counted from F's start to W's end.
        orders: to begin with; all F, B and W of all stages and microbatches.
        room: of a rank (``room_of``); None: no limit but the cap.

    Attributes:
        time: of the present order.
        best_time: of the fastest order so far.
        work: times changed, and moves tried.
    """

    def __init__(
        self,
        request: Request,
        cap: int,
        orders: RankActions,
        room: Room | None = None,
    ) -> None:
        m = request.microbatches
        program = Program(request.placement, request.durations, m)
        self._passes = fixed = _Passes.of(program, orders)
        self._microbatches = m
        self._size = size = program.pass_slots
        self._previous, self._next = ([size] * (size + 1) for _ in range(2))
        rows = [program.row(row) for row in orders]
        nodes = [[lane.gives + j for lane, j in row] for row in rows]
        # The first F of a rank's first stage: all else on the rank needs it, so no move takes it.
        self._first = [row[0] for row in nodes]
        self._memory = _Memory(cap, fixed, nodes, room)
        for row in nodes:
            self._link(size, row, size)
        done = run(rows, size)
        assert done is not None
        self._ends, self._paths = [*done.ends, 0], [0] * (size + 1)
        self._spread_back(range(size))
        self.best_time, self._best = self.time, list(self._next)
        self.work = 0

    @property
    def time(self) -> int:
        """Of the present order: every path begins with stage 0's first F."""
        return self._paths[0]

    @property
    def best(self) -> RankActions:
        """The fastest order so far."""
        return _orders(self._best, self._first, self._microbatches)

    @property
    def present(self) -> RankActions:
        """The present order."""
        return _orders(self._next, self._first, self._microbatches)

    def move(self, random: Callable[[], float], worse: int) -> bool:
        """Move one pass, mostly one of a critical path; undone if that cannot run, or
        makes the order slower by more than ``worse``.

        Args:
            random: a random number from 0 to 1.
            worse: in units of the durations.
        """
        self.work += 1
        size, limit = self._size, self.time + worse
        here = int(random() * size)
        if random() < _CRITICAL:
            ends, paths, took, longest = self._ends, self._paths, self._passes.took, self.time
            for _ in range(_LOOKS):
                if ends[here] - took[here] + paths[here] == longest:
                    break
                here = int(random() * size)
        far = int(random() * 2 * _FAR) - _FAR
        passed = self._passed_later(here, far + 1) if far >= 0 else self._passed_earlier(here, -far)
        if not passed:
            return False
        before, after = self._previous, self._next
        if far >= 0:
            ends_of, seq = (before[here], after[passed[-1]]), [*passed, here]
        else:
            ends_of, seq = (before[passed[-1]], after[here]), [here, *reversed(passed)]
        old = [here, *passed] if far >= 0 else [*reversed(passed), here]
        if not self._memory.fits(ends_of[0], seq):
            return False
        if not self._accepted(old, seq, ends_of, limit, passed if far >= 0 else [here]):
            return False
        self._memory.note(ends_of[0], seq)
        if self.time < self.best_time:
            self.best_time, self._best = self.time, list(after)
        return True

    def _passed_later(self, node: int, most: int) -> list[int]:
        """The passes that ``node`` may pass, at most so many: none of its lane, or of its stage and
        microbatch, and none where a W would keep a set beyond the cap."""
        size, after, held, cap = self._size, self._next, self._memory.held, self._memory.cap
        own = node + self._size // 3
        frees = self._passes.sets[node] < 0
        passed: list[int] = []
        other = after[node]
        while len(passed) < most and other != size and other != node + 1 and other != own:
            if frees and held[other] >= cap:
                break
            passed.append(other)
            other = after[other]
        return passed

    def _passed_earlier(self, node: int, most: int) -> list[int]:
        """The same towards the start; an F holds its set longer there."""
        size, before, held, cap = self._size, self._previous, self._memory.held, self._memory.cap
        own = node - self._size // 3
        holds = self._passes.sets[node] > 0
        passed: list[int] = []
        other = before[node]
        while len(passed) < most and other != size and other != node - 1 and other != own:
            if holds and held[before[other]] >= cap:
                break
            passed.append(other)
            other = before[other]
        return passed

    def _accepted(
        self,
        old: list[int],
        seq: list[int],
        around: tuple[int, int],
        limit: int,
        earlier: list[int],
    ) -> bool:
        """Put ``seq`` in the place of ``old``, the same passes between two others; False, and
        nothing has changed, if no order within ``limit`` comes of it. ``earlier``: the passes that
        now stand before one that stood before them."""
        ends, paths = self._ends, self._paths
        took, need, latency, fed, to_fed, _, _ = self._passes
        first, last = around
        time, path = ends[first], paths[last]
        times, ways = [], []
        for node in seq:
            ready = ends[need[node]] + latency[node]
            time = (ready if ready > time else time) + took[node]
            times.append(time)
        for node, end in zip(reversed(seq), reversed(times)):
            way = paths[fed[node]] + to_fed[node]
            path = way if way > path else path
            if end + path > limit:
                return False
            path += took[node]
            ways.append(path)
        undo = [(node, ends[node]) for node in seq]
        old_paths = [paths[node] for node in seq]
        self._link(first, seq, last)
        width = self._size.bit_length()
        heap = [ends[last] << width | last] if last != self._size else []
        for node, end, path in zip(seq, times, reversed(ways)):
            paths[node] = path
            if ends[node] != end:
                ends[node] = end
                other = fed[node]
                if other != self._size:
                    heappush(heap, ends[other] << width | other)
        if self._spread(heap, undo, limit, earlier):
            self._spread_back([first, *(need[node] for node in seq), *seq])
            return True
        for node, end in reversed(undo):
            ends[node] = end
        for node, path in zip(seq, old_paths):
            paths[node] = path
        self._link(first, old, last)
        return False

    def _link(self, before: int, nodes: list[int], last: int) -> None:
        for node in nodes:
            self._next[before], self._previous[node] = node, before
            before = node
        self._next[before], self._previous[last] = last, before

    def _spread(
        self, heap: list[int], undo: list[tuple[int, int]], limit: int, earlier: list[int]
    ) -> bool:
        """Change the ends of the passes in ``heap``, and of all after them; False if one of them
        then lies on a path longer than ``limit``, or the order cannot run.

        Nothing delays those of ``earlier`` but a circle of waits. Without this look each round of
        the circle would add its time until the limit is reached: 2^64 rounds if one pass takes
        2^64 times as long as the others.
        """
        ends, paths, before, after = self._ends, self._paths, self._previous, self._next
        took, need, latency, fed, *_ = self._passes
        width, size = self._size.bit_length(), self._size
        mask, known = (1 << width) - 1, len(undo)
        accepted = True
        while heap:
            node = heappop(heap) & mask
            start = ends[before[node]]
            ready = ends[need[node]] + latency[node]
            if ready > start:
                start = ready
            if start + paths[node] > limit:
                accepted = False
                break
            end, was = start + took[node], ends[node]
            if end == was:
                continue
            if end > was and node in earlier:
                accepted = False
                break
            undo.append((node, was))
            ends[node] = end
            other = after[node]
            if other != size:
                heappush(heap, ends[other] << width | other)
            other = fed[node]
            if other != size:
                heappush(heap, ends[other] << width | other)
        self.work += (len(undo) - known) // _TIMES
        return accepted

    def _spread_back(self, seeds: Iterable[int]) -> None:
        """The same for the paths of ``seeds`` and of all before them."""
        paths, before, after = self._paths, self._previous, self._next
        took, need, _, fed, to_fed, _, _ = self._passes
        width, size = self._size.bit_length(), self._size
        mask = (1 << width) - 1
        heap = [paths[node] << width | node for node in seeds if node != size]
        heapify(heap)
        while heap:
            node = heappop(heap) & mask
            path = paths[after[node]]
            way = paths[fed[node]] + to_fed[node]
            path = (way if way > path else path) + took[node]
            if path == paths[node]:
                continue
            paths[node] = path
            other = before[node]
            if other != size:
                heappush(heap, paths[other] << width | other)
            other = need[node]
            if other != size:
                heappush(heap, paths[other] << width | other)
