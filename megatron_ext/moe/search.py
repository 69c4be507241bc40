"""Online search for the number of chunks from measured times, the same on every rank.

MPipeMoE searches n while training runs, with the tokens as its key (IPDPS, algorithm 1; MPMoE's
is algorithm 1 of TPDS). Here every candidate is timed for every key, because GEMM times rise in
steps and so times over n have several local minima (docs/12 compares both). All ranks that exchange
rows must choose the same n, or they wait for each other forever. So everything here is a function
of what they share: the most rows that any rank receives, which the exchanged counts give, and times
that ``Agreed`` has made the same. A layer call does, on every rank and in the same order::

    for timing in agreed.incoming(pairs):             # of all ranks, beside the counts
        search.feed(timing)
    decision = search.decide(signature, counted.rows)
    ...                                               # runs with decision.chunks
    if decision.ticket:
        agreed.measured(decision.ticket, time_us)     # when known, at the latest long after
    agreed.outgoing()                                 # with the next exchange of counts
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """What a decision is for.

    Attributes:
        signature: all that changes a layer's times but its rows: sizes, dtype, ranks, strategy.
        bucket: of the rows.
    """

    signature: Hashable
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
        patience: decisions until a trial whose time has not come is given up.
        recheck_every: decisions of a key until its n and both neighbours are timed again; 0: never.
    """

    samples: int = 2
    warmups: int = 1
    margin: float = 0.03
    max_trials: int = 48
    patience: int = 1000
    recheck_every: int = 0

    def __post_init__(self) -> None:
        least = {"samples": 1, "max_trials": 1, "patience": 1, "warmups": 0, "recheck_every": 0}
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
        settings: Settings | None = None,
        *,
        prior: Callable[[Hashable, int], int] | None = None,
        allowed: Callable[[Hashable], Sequence[int]] | None = None,
    ) -> None:
        """Every rank must give the same.

        Args:
            candidates: numbers of chunks, or numbers that stand for ways to run, in the order of
                their chunks.
            settings: default ``Settings()``.
            prior: signature and rows to the n to use until there are times, for instance the
                simulator's; default the smallest.
            allowed: signature to those candidates, at least one, that it may have; default all.

        Raises:
            ValueError: no candidates, or one below 1.
        """
        self._candidates = tuple(sorted(set(candidates)))
        if not self._candidates or self._candidates[0] < 1:
            raise ValueError(f"candidates must be numbers of at least 1, got {list(candidates)}")
        self._settings = settings or Settings()
        self._prior, self._allowed = prior, allowed
        self._states: dict[Key, _State] = {}
        self._open: _Trial | None = None
        self._waited = 0
        self.trials = 0

    def decide(self, signature: Hashable, rows: int, timed: bool = True) -> Decision:
        """The n for a call, and whether to time it.

        At most one trial is open at a time, over all keys. All ranks must call this with the same
        arguments in the same order.

        Args:
            signature: see ``Key``.
            rows: the most that any rank receives.
            timed: whether the call may be timed.
        """
        key = Key(signature, bucket(rows))
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = self._begin(key, rows)
        self._waited += 1
        if self._open is not None and self._waited > self._settings.patience:
            self._open = None
        if state.settled:
            self._maybe_recheck(state)
        if state.settled or self._open is not None or not timed:
            return Decision(state.chunks, 0)
        chunks = self._next(state)
        if chunks is None:
            self._settle(state)
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

    def settled(self, signature: Hashable, rows: int) -> int | None:
        """The n that was found, or None while it is being searched for."""
        state = self._states.get(Key(signature, bucket(rows)))
        return state.chunks if state is not None and state.settled else None

    def _begin(self, key: Key, rows: int) -> _State:
        candidates = self._candidates
        if self._allowed is not None:
            allowed = set(self._allowed(key.signature))
            candidates = tuple(n for n in candidates if n in allowed)
        prior = candidates[0] if self._prior is None else self._prior(key.signature, rows)
        return _State(prior, candidates, candidates)

    def _next(self, state: _State) -> int | None:
        """What to try, or None when enough is known."""
        s = self._settings
        if state.trials >= s.max_trials:
            return None
        enough = s.samples + s.warmups
        return next((n for n in state.candidates if state.taken.get(n, 0) < enough), None)

    def _settle(self, state: _State) -> None:
        used = state.times.get(state.chunks)
        # If trials ended before the n in use had its turn, nothing is known that speaks against it.
        cut_short = used is None and state.chunks in state.candidates
        if state.times and not cut_short:
            best = min(state.times, key=lambda n: (state.times[n], n))
            if used is None or state.times[best] < used * (1 - self._settings.margin):
                state.chunks = best
        state.settled, state.decisions = True, 0

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
        state.candidates, state.settled = near, False
        state.times, state.taken = {}, {}
