"""Pass and latency costs. Integers inside, so that scaling all costs never changes an order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from .._input import fraction, only_known, parse_json, read_text, reason, shown
from .actions import Op, Operation
from .placement import Placement

Number = int | float | str | Fraction


_FIELDS = (
    *("forward", "backward_input", "backward_weight", "hop", "stages", "vocabulary", "exchange"),
    "units",
)


class Durations(NamedTuple):
    """Integer durations; divide by ``scale`` to get back to the units of the costs.

    ``forward[s]``, ``backward_input[s]``, ``backward_weight[s]`` are per stage. ``vocabulary`` has
    a rank's S, T, E and G (``vocabulary``), and ``collective`` the latency of what they wait for.
    ``exchange_forward[s]`` and ``exchange_backward[s]`` are the communication in an F and a B of
    stage s, which is part of their durations; empty: there is none.
    """

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    hop: int
    scale: int
    vocabulary: tuple[int, ...] = (0, 0, 0, 0)
    collective: int = 0
    exchange_forward: tuple[int, ...] = ()
    exchange_backward: tuple[int, ...] = ()

    @classmethod
    def unit(cls, placement: Placement) -> Durations:
        """F, B and W of every stage take 1, a hop 0."""
        ones = (1,) * placement.num_stages
        return cls(ones, ones, ones, 0, 1)

    def of(self, op: Operation, stage: int) -> int:
        """Of one compute action."""
        if op is Op.F:
            return self.forward[stage]
        if op is Op.W:
            return self.backward_weight[stage]
        if not isinstance(op, Op):
            return self.vocabulary["STEG".index(op.value)]
        b = self.backward_input[stage]
        return b if op is Op.B else b + self.backward_weight[stage]

    def exchange(self, op: Operation, stage: int) -> int:
        """The communication in one compute action."""
        row = self.exchange_forward if op is Op.F else self.exchange_backward
        return row[stage] if row and op in (Op.F, Op.B, Op.BW) else 0

    def joint(self, parts: Sequence[tuple[Operation, int]]) -> int:
        """Of passes (operation, stage) that run in one another; see ``joint_time``."""
        sent = sum(self.exchange(op, stage) for op, stage in parts)
        return joint_time([self.of(op, stage) for op, stage in parts], sent)

    def computation(self) -> Durations:
        """The same without communication in passes."""
        stages = range(len(self.forward))
        f, b = (tuple(self.of(op, s) - self.exchange(op, s) for s in stages) for op in (Op.F, Op.B))
        return self._replace(forward=f, backward_input=b, exchange_forward=(), exchange_backward=())

    def times(self, factor: int, scale: int) -> Durations:
        """All durations times ``factor``, with this scale."""
        return self._mapped(lambda x: x * factor, scale)

    def of_units(self, whole: int) -> Durations:
        """For passes of units, which take these times their shares, of ``whole``."""
        hop, collective = self.hop * whole, self.collective * whole
        return self._replace(hop=hop, collective=collective, scale=self.scale * whole)

    def _mapped(self, change: Callable[[int], int], scale: int) -> Durations:
        fields: Iterable[Any] = self
        rows: list[Any] = [
            tuple(map(change, x)) if isinstance(x, tuple) else change(x) for x in fields
        ]
        return Durations(*rows)._replace(scale=scale)

    def reduced(self) -> Durations:
        """The same without common factors, for comparing: costs times any number become equal.
        ``scale`` is 1, so these are no longer times in the units of the costs."""
        times = self._replace(scale=0)
        common = math.gcd(*(x for row in times for x in (row if isinstance(row, tuple) else [row])))
        return self._mapped(lambda x: x // common, 1)


def joint_time(alone: Sequence[int], sent: int) -> int:
    """How long passes take that run in one another.

    Computation and communication each take as long as those of all passes; one goes on beside the
    other, but no pass is faster than alone. Layer by layer dispatch and combine of one pass stand
    beside the experts and the attention of the other, so that holds where both passes have about
    as many layers.

    Args:
        alone: time of every pass by itself, communication included.
        sent: communication of all of them.
    """
    return max(sum(alone) - sent, sent, *alone)


def _number(value: Number, what: str, *, positive: bool) -> Fraction:
    try:
        number = fraction(value)
    except ValueError:
        raise ValueError(
            f"cost {what} must be a finite number, from 1e-100 to 1e100, got {shown(value)}"
        ) from None
    if number < 0 or (positive and number == 0):
        raise ValueError(f"cost {what} must be {'> 0' if positive else '>= 0'}, got {value}")
    return number


def _row(row: Sequence[Number], names: Sequence[str], of: str, what: str, *, positive: bool) -> Any:
    """A row of times, one for each name.

    Raises:
        ValueError: there are not as many, or one is out of range.
    """
    if isinstance(row, str) or len(row) != len(names):
        raise ValueError(f"{what}, got {shown(row)}")
    return tuple(_number(x, f"{name} of {of}", positive=positive) for x, name in zip(row, names))


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch on one rank, in any one unit, and the latency of one hop.

    A pass of one of v chunks costs 1/v of it. ``stages``, when given, replaces that rule: entry s
    holds (F, B, W) of stage s itself. ``vocabulary``, of sharded vocabulary layers, are a rank's S,
    T, E and G, and the latency of a collective. ``exchange``, the all-to-all of experts on other
    ranks, is the part of F's and of B's time in which only the network is busy: one pair for all
    stages, by the same rule as F and B, or one for each stage. ``units`` are of every unit
    (``units``) the shares that it takes of a whole microbatch's F, B and W, and of its set.
    """

    forward: Fraction = Fraction(1)
    backward_input: Fraction = Fraction(1)
    backward_weight: Fraction = Fraction(1)
    hop: Fraction = Fraction(0)
    stages: tuple[tuple[Fraction, Fraction, Fraction], ...] | None = None
    vocabulary: tuple[Fraction, ...] | None = None
    exchange: tuple[tuple[Fraction, Fraction], ...] | None = None
    units: tuple[tuple[Fraction, ...], ...] | None = None

    @classmethod
    def of(
        cls,
        forward: Number = 1,
        backward_input: Number = 1,
        backward_weight: Number = 1,
        hop: Number = 0,
        stages: Sequence[Sequence[Number]] | None = None,
        vocabulary: Sequence[Number] | None = None,
    ) -> Costs:
        """Build from ints, floats, decimal strings or Fractions.

        Raises:
            ValueError: a time is not a positive number (a latency: not >= 0).
        """
        if vocabulary is not None:
            if isinstance(vocabulary, str) or len(vocabulary) not in (4, 5):
                raise ValueError(
                    f"costs of vocabulary passes must be S,T,E,G[,LATENCY], got {shown(vocabulary)}"
                )
            padded = [*vocabulary, 0]
            vocabulary = [
                _number(x, f"{n} of the vocabulary", positive=n != "latency")
                for x, n in zip(padded, ("S", "T", "E", "G", "latency"))
            ]
        rows = None
        if stages is not None:
            rows = [
                _row(row, "FBW", f"stage {s}", f"stage {s} needs three costs F,B,W", positive=True)
                for s, row in enumerate(stages)
            ]
        return cls(
            _number(forward, "F", positive=True),
            _number(backward_input, "B", positive=True),
            _number(backward_weight, "W", positive=True),
            _number(hop, "hop", positive=False),
            None if rows is None else tuple(rows),
            None if vocabulary is None else tuple(vocabulary),  # type: ignore[arg-type]
        )

    @classmethod
    def parse(cls, text: str, hop: Number | None = None) -> Costs:
        """``F,B,W[,HOP]``, as on the command line; ``hop`` overrides the fourth number.

        Raises:
            ValueError: not three or four numbers, or one of them is out of range.
        """
        parts = [part.strip() for part in text.split(",")]
        if len(parts) not in (3, 4):
            raise ValueError(
                f"costs must be F,B,W or F,B,W,HOP, got {shown(text)}; e.g. 1,1,1,0.05"
            )
        last: Number = hop if hop is not None else (parts[3] if len(parts) == 4 else 0)
        return cls.of(parts[0], parts[1], parts[2], last)

    def with_vocabulary(self, times: Sequence[Number]) -> Costs:
        """The same with times of vocabulary passes, S, T, E, G and the latency of a collective.

        Raises:
            ValueError: not four or five numbers, or one of them is out of range.
        """
        return replace(self, vocabulary=Costs.of(vocabulary=times).vocabulary)

    def with_exchange(self, times: Sequence[Sequence[Number]]) -> Costs:
        """The same with communication in F and B, one pair for all stages or one a stage.

        Raises:
            ValueError: not pairs of numbers >= 0.
        """
        what = "the exchange needs two times F,B"
        rows = (_row(row, "FB", "the exchange", what, positive=False) for row in times)
        return replace(self, exchange=tuple(rows))

    def with_units(self, shares: Sequence[Sequence[Number]] | None) -> Costs:
        """The same with shares F, B, W and size of every unit; None: equal ones.

        Raises:
            ValueError: not four numbers > 0 a unit.
        """
        if shares is None:
            return replace(self, units=None)
        names, what = ("F", "B", "W", "the set"), "needs four shares F,B,W,size"
        rows = (
            _row(row, names, f"unit {u}", f"unit {u} {what}", positive=True)
            for u, row in enumerate(shares)
        )
        return replace(self, units=tuple(rows))

    def computation(self) -> Costs:
        """The same without communication in passes; given per stage, as ``stages`` are."""
        if self.exchange is None or self.stages is None:
            return self
        rows = zip(self.stages, self.exchange)
        alone = tuple((f - sent_f, b - sent_b, w) for (f, b, w), (sent_f, sent_b) in rows)
        return replace(self, stages=alone, exchange=None)

    def in_pairs(self) -> Costs:
        """The same as if all F and B were in pairs of one stage, which share the time of a pair
        (``Durations.joint``); given per stage, as ``stages`` are."""
        if self.exchange is None or self.stages is None:
            return self
        rows = []
        for (f, b, w), (sent_f, sent_b) in zip(self.stages, self.exchange):
            sent = sent_f + sent_b
            share = max(f + b - sent, sent, f, b) / (f + b)
            rows.append((f * share, b * share, w))
        return replace(self, stages=tuple(rows), exchange=None)

    def _exchange(self, placement: Placement) -> Sequence[tuple[Fraction, Fraction]]:
        """Of every stage; empty: there is none."""
        n, rows = placement.num_stages, self.exchange or ()
        if len(rows) == 1:
            f, b = rows[0]
            rows = ((f / placement.chunks, b / placement.chunks),) * n
        if rows and len(rows) != n:
            raise ValueError(
                f"the exchange is given for {len(rows)} stages but there are {n}; give one row F,B "
                "for all of them or one per stage"
            )
        return rows

    def durations(self, placement: Placement) -> Durations:
        """Integer durations of every stage's F, B and W under ``placement``.

        Raises:
            ValueError: per-stage costs were given for another number of stages, or communication
                takes longer than the pass that it is in.
        """
        n, v = placement.num_stages, placement.chunks
        if self.stages is None:
            row = (self.forward / v, self.backward_input / v, self.backward_weight / v)
            rows: Sequence[tuple[Fraction, Fraction, Fraction]] = [row] * n
        elif len(self.stages) != n:
            raise ValueError(
                f"costs are given for {len(self.stages)} stages but pp={placement.pp} x "
                f"chunks={v} has {n}; give one row F,B,W per stage"
            )
        else:
            rows = self.stages
        exchange = self._exchange(placement)
        for s, (own, (sent_f, sent_b)) in enumerate(zip(rows, exchange)):
            if sent_f > own[0] or sent_b > own[1]:
                raise ValueError(
                    f"the exchange of stage {s} takes {float(sent_f):g} of F and {float(sent_b):g} "
                    f"of B, but they take {float(own[0]):g} and {float(own[1]):g} in all; costs "
                    "of F and B contain it"
                )
        distinct, more = {*rows, *exchange}, self.vocabulary or (Fraction(0),) * 5
        single = (self.hop, *more)
        scale = math.lcm(*(x.denominator for row in (*distinct, single) for x in row))
        ints = {row: tuple(int(x * scale) for x in row) for row in distinct}
        f, b, w = zip(*(ints[row] for row in rows))
        *vocabulary, collective = (int(x * scale) for x in more)
        sent = zip(*(ints[row] for row in exchange))
        return Durations(
            f, b, w, int(self.hop * scale), scale, tuple(vocabulary), collective, *sent
        )

    def per_rank_work(self, placement: Placement) -> list[Fraction]:
        """F + B + W of one microbatch on each rank, in the units of the costs."""
        d = self.durations(placement)
        total = [f + b + w for f, b, w in zip(d.forward, d.backward_input, d.backward_weight)]
        return [Fraction(sum(total[s] for s in row), d.scale) for row in placement.stages]

    def to_json(self) -> dict[str, Any]:
        """The ``cost`` object of the command line and the schedule file."""
        data: dict[str, Any] = {
            "forward": number_to_json(self.forward),
            "backward_input": number_to_json(self.backward_input),
            "backward_weight": number_to_json(self.backward_weight),
            "hop": number_to_json(self.hop),
        }
        for name, rows in (("stages", self.stages), ("exchange", self.exchange)):
            if rows is not None:
                data[name] = [[number_to_json(x) for x in row] for row in rows]
        if self.vocabulary is not None:
            data["vocabulary"] = [number_to_json(x) for x in self.vocabulary]
        if self.units is not None:
            data["units"] = [[_exact(x) for x in row] for row in self.units]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Costs:
        """Reverse of ``to_json``; missing times are 1, a missing hop 0.

        Raises:
            ValueError: a value is no number, or out of range.
        """
        if not isinstance(data, dict):
            raise ValueError(f'"cost" must be an object, got {shown(data)}')
        only_known(data, _FIELDS, '"cost"')
        lists = {name: data.get(name) for name in ("stages", "vocabulary", "units", "exchange")}
        for name, found in lists.items():
            rows = name in ("units", "exchange")
            good = isinstance(found, list) and not (
                rows and any(not isinstance(row, list) for row in found)
            )
            if found is not None and not good:
                what = "list of rows" if rows else "list"
                raise ValueError(f'"{name}" of "cost" must be a {what}, got {shown(found)}')
        f, b, w = (data.get(name, 1) for name in _FIELDS[:3])
        costs = cls.of(f, b, w, data.get("hop", 0), lists["stages"], lists["vocabulary"])
        costs = costs.with_units(lists["units"])
        sent = lists["exchange"]
        return costs if sent is None else costs.with_exchange(sent)


def with_stage_file(costs: Costs, path: str | Path) -> Costs:
    """``costs`` per stage from a JSON file: ``{"stages": [[F, B, W], ...]}``, one row a stage;
    with ``"exchange": [[F, B], ...]``, the communication in them. What the file has not, such
    as times of vocabulary passes, stays.

    Raises:
        ValueError: the file cannot be read or is not of that form.
    """
    try:
        data = parse_json(read_text(path))
        stages = [list(row) for row in data["stages"]]
        only_known(data, ("stages", "exchange"), "the file")
        sent = [list(row) for row in data["exchange"]] if "exchange" in data else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'stage costs {path}: {reason(error)}; expected JSON {{"stages": [[F, B, W], ...]}}'
        ) from None
    costs = replace(costs, stages=Costs.of(stages=stages).stages)
    return costs if sent is None else costs.with_exchange(sent)


def merged(costs: Costs, stages: int) -> Costs | None:
    """Costs of fewer stages, each the sum of neighbours in model order.

    None where the costs are given for a number of stages that is no multiple of ``stages``.
    """
    given = len(costs.stages or costs.exchange or ())
    if given <= 1 or given == stages:
        return costs
    if given % stages:
        return None
    size = given // stages

    def sums(rows: Sequence[tuple[Fraction, ...]] | None) -> Any:
        if rows is None or len(rows) == 1:
            return rows
        parts = (rows[at : at + size] for at in range(0, len(rows), size))
        return tuple(tuple(map(sum, zip(*part))) for part in parts)

    return replace(costs, stages=sums(costs.stages), exchange=sums(costs.exchange))


def _exact(value: Fraction) -> int | float | str:
    """As ``number_to_json`` where that can be read back, else the fraction as a text."""
    number = number_to_json(value)
    return number if fraction(number) == value else str(value)


def number_to_json(value: Fraction) -> int | float:
    """An int where the value is an integer, else the nearest float."""
    return int(value) if value.denominator == 1 else float(value)
