"""What the options on slices and on costs of single microbatches ask for."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from .._input import fraction, read_text, reason, shown
from ..schedule.units import check_slices, shares_of, times

_CUTS = ("attention_share", "slice_overhead")
_UNITS = ("slices", *_CUTS, "microbatch_cost")
Factors = tuple[tuple[Fraction, Fraction, Fraction], ...]


class Units(NamedTuple):
    """What the options ask for.

    Attributes:
        slices: of each microbatch; empty: none is cut.
        shares: of every unit (``Costs.units``); None: equal ones.
    """

    slices: tuple[int, ...] = ()
    shares: tuple[tuple[Fraction, ...], ...] | None = None


def units_asked(args: argparse.Namespace, microbatches: int, cut: tuple[int, ...] = ()) -> Units:
    """The options' slices and shares.

    Args:
        args: parsed options.
        microbatches: of one iteration.
        cut: slices that a file's order has.

    Raises:
        ValueError: they contradict each other, the numbers or the file.
    """
    if not cut and all(getattr(args, option) is None for option in _UNITS):
        return Units()
    if args.slices is None:
        slices = cut
        for option in _CUTS:
            lengths = option == "attention_share" and args.microbatch_cost is not None
            if getattr(args, option) is not None and not cut and not lengths:
                flag = f"--{option.replace('_', '-')}"
                raise ValueError(f"{flag} {getattr(args, option)} is for --slices; give both")
    else:
        slices = _slices(args.slices, microbatches)
        if cut and slices != cut:
            raise ValueError(f"--slices {args.slices} contradicts the file; leave --slices out")
    factors = None
    attention, overhead = args.attention_share or Fraction(0), args.slice_overhead or Fraction(0)
    if args.microbatch_cost is not None:
        factors = factors_of(args.microbatch_cost, attention)
        if len(factors) != microbatches:
            raise ValueError(
                f"--microbatch-cost has {len(factors)} microbatches, but there are {microbatches}; "
                "give one factor each"
            )
    counts = slices or (1,) * microbatches
    return Units(slices, shares_of(counts, attention, factors, overhead))


def _slices(text: str, microbatches: int) -> tuple[int, ...]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--slices must be one whole number or one a microbatch, such as 4, got {shown(text)}"
        ) from None
    return check_slices(counts[0] if len(counts) == 1 else counts, microbatches)


def factors_of(text: str, attention: Fraction) -> Factors:
    """Of F, B and W of each microbatch, by the value of ``--microbatch-cost``.

    Args:
        attention: share of F's time in core attention, for lengths.

    Raises:
        ValueError: it is neither a list nor a file of one.
    """
    rows = [[part] for part in text.split(",")]
    where = "--microbatch-cost"
    if "," not in text and not _is_number(text):
        where = f"--microbatch-cost {text}"
        try:
            lines = read_text(Path(text)).splitlines()
        except (OSError, ValueError) as error:
            raise ValueError(f"{where}: {reason(error)}") from None
        rows = [line.split(",") for line in lines if line.strip()]
        if rows and rows[0][0].strip().lower() in ("tokens", "length", "lengths"):
            return _by_length(rows[1:], where, attention)
    return tuple(_row(row, f"{where}, microbatch {j}") for j, row in enumerate(rows))


def _by_length(rows: list[list[str]], where: str, attention: Fraction) -> Factors:
    """Of microbatches of these lengths, beside one of their mean length, by ``times``."""
    if not rows:
        raise ValueError(f"{where} has no lengths below its first line")
    lengths = [_row(row, f"{where}, microbatch {j}")[0] for j, row in enumerate(rows)]
    mean = sum(lengths, Fraction(0)) / len(lengths)
    return tuple(times(x, x * x, attention) for x in (length / mean for length in lengths))


def _is_number(text: str) -> bool:
    try:
        fraction(text)
    except ValueError:
        return False
    return True


def _row(row: list[str], where: str) -> tuple[Fraction, Fraction, Fraction]:
    try:
        numbers = [fraction(part.strip()) for part in row]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or min(numbers) <= 0:
        raise ValueError(
            f"{where} must be one factor > 0 or three, F,B,W, got {shown(','.join(row))}"
        )
    f, b, w = numbers * 3 if len(numbers) == 1 else numbers
    return f, b, w
