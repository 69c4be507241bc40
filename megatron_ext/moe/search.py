"""Online search for the number of chunks from measured times, the same on every rank.

MPipeMoE searches n while training runs, with the tokens as its key (IPDPS, algorithm 1; MPMoE's
is algorithm 1 of TPDS). All ranks that exchange rows must choose the same n, or they wait for each
other forever. So everything here is a function of what they share: the most rows that any rank
receives, which the exchanged counts tell; step numbers; and times that ``Agreed`` has made the
same. A layer call does, on every rank and in the same order::

    for timing in agreed.incoming(pairs):             # of all ranks, beside the counts
        search.feed(timing)
    decision = search.decide(signature, counted.rows, "forward", step)
    ...                                               # runs with decision.chunks
    if decision.ticket:
        agreed.measured(decision.ticket, time_us)     # when known, at the latest long after
    agreed.outgoing()                                 # with the next exchange of counts
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

EXHAUSTIVE, INTERVAL = "exhaustive", "interval"
METHODS = (EXHAUSTIVE, INTERVAL)


class Key(NamedTuple):
    """What a decision is for.

    Attributes:
        signature: all that changes a layer's times but its rows: sizes, dtype, ranks, strategy.
        phase: ``forward``, ``backward``, or what else is timed.
        bucket: of the rows.
    """

    signature: Hashable
    phase: str
    bucket: int


class Decision(NamedTuple):
    """Chunks to run with; ``ticket`` > 0: time this call, and report it under that number."""

    chunks: int
    ticket: int


class Timing(NamedTuple):
    """A trial's time, of the slowest rank; the same on all."""

    ticket: int
    time_us: int


@dataclass(frozen=True)
class Settings:
    """When and how long to try.

    Attributes:
        samples: times per candidate; the least counts.
        warmups: of each candidate, before them; their times do not count.
        margin: what another n must be faster by, relative, to replace the one in use.
        max_trials: of one key, for good.
        first_step, every_steps: trials happen at steps first, first + every, ...
        patience: decisions until a trial whose time has not come is given up.
        recheck_every: decisions of a key until its n and both neighbours are timed again; 0: never.
    """

    samples: int = 2
    warmups: int = 1
    margin: float = 0.03
    max_trials: int = 48
    first_step: int = 0
    every_steps: int = 1
    patience: int = 1000
    recheck_every: int = 0

    def __post_init__(self) -> None:
        least = {"samples": 1, "max_trials": 1, "every_steps": 1, "patience": 1}
        least |= {"warmups": 0, "first_step": 0, "recheck_every": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"the margin must be in [0, 1), got {self.margin}")


def bucket(rows: int) -> int:
    """Rows in one bucket differ by an eighth at most; larger ones have larger buckets. Integers."""
    rows = max(rows, 1)
    octave = rows.bit_length() - 1
    return octave * 8 + ((rows * 8) >> octave) - 8


def largest(number: int) -> int:
    """The most rows of a bucket."""
    octave, eighth = divmod(number, 8)
    # Where an octave has fewer than eight numbers, some of its buckets are empty.
    return max(1, (((9 + eighth) << octave) - 1) // 8)


class Agreed:
    """One rank's end of making a time the same on all, with an exchange that happens anyway.

    Two integers travel with the counts. A time counts once all ranks have sent theirs for the same
    trial, as that of the slowest; a rank whose clock has not been read yet sends zeros.
    """

    def __init__(self) -> None:
        self._mine = (0, 0)

    def measured(self, ticket: int, time_us: int) -> None:
        """This rank's time for a trial; an older one that was not agreed on is dropped."""
        if ticket > self._mine[0]:
            self._mine = (ticket, time_us)

    def outgoing(self) -> tuple[int, int]:
        """Ticket and microseconds for the next exchange; zeros: nothing yet."""
        return self._mine

    def incoming(self, pairs: Sequence[tuple[int, int]]) -> list[Timing]:
        """What the ranks now agree on: at most one trial.

        Args:
            pairs: every rank's ``outgoing``, this one's too; the same on all ranks.
        """
        ticket = pairs[0][0]
        if ticket == 0 or any(other != ticket for other, _ in pairs):
            return []
        if self._mine[0] == ticket:
            self._mine = (0, 0)
        return [Timing(ticket, max(time for _, time in pairs))]


def next_exhaustive(candidates: Sequence[int], times: Mapping[int, float]) -> int | None:
    """The first that has no time; None if all have one. Right whatever the times look like."""
    return next((n for n in candidates if n not in times), None)


def next_unimodal(candidates: Sequence[int], times: Mapping[int, float]) -> int | None:
    """Both ends, then inward from the better one until it gets worse (MPMoE, algorithm 1).

    Right if the times fall to their least and rise again. None: nothing left to try.
    """
    for end in (candidates[0], candidates[-1]):
        if end not in times:
            return end
    walk = list(candidates)
    if times[walk[-1]] < times[walk[0]]:
        walk.reverse()
    for here, there in pairwise(walk):
        if there not in times:
            return there
        if times[there] > times[here]:
            return None
    return None


@dataclass
class _State:
    """What is known for one key. Times are microseconds per row."""

    chunks: int
    candidates: Sequence[int]  # now; of them all, those that are worth a trial
    among: Sequence[int]
    times: dict[int, float] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    trials: int = 0
    settled: bool = False
    rechecks: bool = False
    decisions: int = 0  # since it settled


class _Trial(NamedTuple):
    ticket: int
    state: _State
    chunks: int
    rows: int


class Search:
    """Decides n, and which calls to time.

    Attributes:
        trials: how many calls were timed, or were to be.
    """

    def __init__(
        self,
        candidates: Sequence[int] = (1, 2, 4, 8),
        method: str = EXHAUSTIVE,
        settings: Settings | None = None,
        *,
        bucket_of: Callable[[int], int] = bucket,
        prior: Callable[[Hashable, int], int] | None = None,
        allowed: Callable[[Hashable], Sequence[int]] | None = None,
    ) -> None:
        """Every rank must give the same.

        Args:
            candidates: numbers of chunks, or numbers that stand for ways to run, in the order of
                their chunks.
            method: ``exhaustive`` times all for every key. ``interval`` is MPMoE's: it takes n to
                rise with the rows, so a key between two of the same n needs no trial, and any other
                only those between its neighbours' n; and times to have one least.
            settings: default ``Settings()``.
            bucket_of: rows to a number that does not fall as they rise.
            prior: signature and rows to the n to use until there are times, for instance the
                simulator's; default the smallest.
            allowed: signature to those candidates, at least one, that it may have; default all.

        Raises:
            ValueError: no candidates, one below 1, or an unknown method.
        """
        self._candidates = tuple(sorted(set(candidates)))
        if not self._candidates or self._candidates[0] < 1:
            raise ValueError(f"candidates must be numbers of at least 1, got {list(candidates)}")
        if method not in METHODS:
            raise ValueError(f"the method must be {' or '.join(METHODS)}, got {method!r}")
        self._method, self._settings = method, settings or Settings()
        self._bucket_of, self._prior, self._allowed = bucket_of, prior, allowed
        self._states: dict[Key, _State] = {}
        self._points: dict[tuple[Hashable, str], list[tuple[int, int]]] = {}
        self._open: _Trial | None = None
        self._waited = 0
        self.trials = 0

    def decide(
        self, signature: Hashable, rows: int, phase: str, step: int, timed: bool = True
    ) -> Decision:
        """The n for a call, and whether to time it.

        At most one trial is open at a time, over all keys. All ranks must call this with the same
        arguments in the same order.

        Args:
            signature, phase: see ``Key``.
            rows: the most that any rank receives.
            step: of the training run.
            timed: whether the call may be timed.
        """
        key = Key(signature, phase, self._bucket_of(rows))
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = self._begin(key, rows)
        self._waited += 1
        if self._open is not None and self._waited > self._settings.patience:
            self._open = None
        if state.settled:
            self._maybe_recheck(state)
        s = self._settings
        agreed_step = step >= s.first_step and (step - s.first_step) % s.every_steps == 0
        if state.settled or self._open is not None or not agreed_step or not timed:
            return Decision(state.chunks, 0)
        chunks = self._next(state)
        if chunks is None:
            self._settle(key, state)
            return Decision(state.chunks, 0)
        self.trials += 1
        state.trials += 1
        self._open, self._waited = _Trial(self.trials, state, chunks, max(rows, 1)), 0
        return Decision(chunks, self.trials)

    def feed(self, timing: Timing) -> None:
        """An agreed time; that of a trial which was given up is ignored."""
        trial = self._open
        if trial is None or timing.ticket != trial.ticket:
            return
        self._open = None
        state, n = trial.state, trial.chunks
        state.taken[n] = state.taken.get(n, 0) + 1
        if state.taken[n] > self._settings.warmups:
            # Per row, as rows of one bucket are not quite the same.
            time = timing.time_us / trial.rows
            state.times[n] = min(time, state.times.get(n, time))

    def settled(self, signature: Hashable, rows: int, phase: str) -> int | None:
        """The n that was found, or None while it is being searched for."""
        state = self._states.get(Key(signature, phase, self._bucket_of(rows)))
        return state.chunks if state is not None and state.settled else None

    def _begin(self, key: Key, rows: int) -> _State:
        candidates = self._candidates
        if self._allowed is not None:
            allowed = set(self._allowed(key.signature))
            candidates = tuple(n for n in candidates if n in allowed)
        first = candidates[0]
        prior = first if self._prior is None else self._prior(key.signature, rows)
        if self._method == EXHAUSTIVE:
            return _State(prior, candidates, candidates)
        points = self._points.get((key.signature, key.phase), [])
        place = bisect_left(points, (key.bucket, 0))
        below = points[place - 1][1] if place > 0 else first
        above = points[place][1] if place < len(points) else candidates[-1]
        low, high = min(below, above), max(below, above)
        between = [n for n in candidates if low <= n <= high]
        if len(between) == 1:
            return _State(between[0], between, candidates, settled=True)
        start = below if place > 0 else above if points else prior
        return _State(start, between, candidates)

    def _next(self, state: _State) -> int | None:
        """What to try, or None when enough is known."""
        s = self._settings
        if state.trials >= s.max_trials:
            return None
        enough = {
            n: time for n, time in state.times.items() if state.taken[n] >= s.samples + s.warmups
        }
        if self._method == INTERVAL and not state.rechecks:
            return next_unimodal(state.candidates, enough)
        return next_exhaustive(state.candidates, enough)

    def _settle(self, key: Key, state: _State) -> None:
        used = state.times.get(state.chunks)
        all_of_them = state.rechecks or self._method == EXHAUSTIVE
        # If trials ended before the n in use had its turn, nothing is known that speaks against it.
        cut_short = used is None and all_of_them and state.chunks in state.candidates
        if state.times and not cut_short:
            best = min(state.times, key=lambda n: (state.times[n], n))
            if used is None or state.times[best] < used * (1 - self._settings.margin):
                state.chunks = best
        state.settled, state.decisions = True, 0
        if self._method == INTERVAL:
            points = self._points.setdefault((key.signature, key.phase), [])
            points[:] = [point for point in points if point[0] != key.bucket]
            insort(points, (key.bucket, state.chunks))

    def _maybe_recheck(self, state: _State) -> None:
        s = self._settings
        state.decisions += 1
        if s.recheck_every == 0 or state.decisions < s.recheck_every:
            return
        if state.trials >= s.max_trials:
            return
        candidates = state.among
        place = bisect_left(candidates, state.chunks)
        near = candidates[max(place - 1, 0) : place + 2]
        state.candidates, state.rechecks, state.settled = near, True, False
        state.times, state.taken = {}, {}
