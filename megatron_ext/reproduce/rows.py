"""A published value beside ours, and the verdict: one rule for each kind of quantity."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Range = tuple[float, float]
Value = float | str | Range | None


class Kind(enum.Enum):
    """What a quantity is; its value says when ours reproduces the published one."""

    EXACT = "closed forms, and verdicts in words: equal, to the last printed digit"
    ORDER = (
        "properties of an order under given times (sets, bubbles, makespans): at most 1 % more; "
        "more than 1 % less is better"
    )
    BYTES = "predicted memory: within 10 %, or within half of a printed GB"
    TIME = "predicted times, MFU, ratios of them: within 10 %"
    GAIN = "gains and losses in per cent: within 2 points, or from two thirds to one and a half"
    MEASURED = "only a run can tell: needs a GPU"


class Cell(NamedTuple):
    """One quantity.

    Attributes:
        row: which one, within its table.
        published: a number, a range (low, high), words; None if there is no value.
        ours: a number, or words for words.
        digits: a printed number's decimals, for ``Kind.EXACT``.
        reason: why ours differs, in place of the table's.
        note: on ours, for people.
    """

    row: str
    published: Value
    ours: float | str | None
    digits: int = 4
    reason: str = ""
    note: str = ""


class Row(NamedTuple):
    """A cell with its verdict, as ``reproduce --json`` has it.

    ``difference`` is relative to the published value, except for gains, where it is in points;
    None where one of the two is no number.
    """

    paper: str
    table: str
    row: str
    published: Value
    ours: float | str | None
    difference: float | None
    unit: str
    verdict: str
    source: str
    kind: Kind
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**self._asdict(), "kind": self.kind.name.lower()}


class Table(NamedTuple):
    """One table or figure of a paper.

    Attributes:
        name: as ``--figure`` takes it.
        key: of the published values in the data file.
        kind: of all its quantities.
        unit: of its numbers; empty for none.
        cells: makes them; a generator, since some take seconds.
        assumptions: what ours assume.
        above, below: why ours may be larger, or smaller, than the published value. A difference in
            a direction without a reason is reported as unexplained.
        plot: draws its title and rows as SVG; None: no plot in the paper.
    """

    name: str
    title: str
    key: str
    kind: Kind
    unit: str
    cells: Callable[[], Iterable[Cell]]
    assumptions: tuple[str, ...] = ()
    above: str = ""
    below: str = ""
    plot: Callable[[str, Sequence[Row]], str] | None = None


class Paper(NamedTuple):
    """A paper's name in the command line, and its tables."""

    name: str
    tables: tuple[Table, ...]

    @property
    def data(self) -> dict[str, Any]:
        """What it publishes."""
        data: dict[str, Any] = published()[self.name]
        return data

    def source(self, table: Table) -> str:
        """Paper, place, and how sure the number is."""
        entry = self.data["tables"][table.key]
        return f"{self.data['reference']}, {entry['source']} ({entry['certainty']})"


@cache
def published() -> dict[str, Any]:
    """The data file."""
    text = Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


UNEXPLAINED = "differs, unexplained"


def judged(paper: Paper, table: Table, cell: Cell) -> Row:
    """The row of a cell."""
    difference, verdict = _verdict(table, cell)
    values = cell.published, cell.ours, difference, table.unit, verdict
    source = paper.source(table)
    return Row(paper.name, table.name, cell.row, *values, source, table.kind, cell.note)


def _verdict(table: Table, cell: Cell) -> tuple[float | None, str]:
    kind, value, ours = table.kind, cell.published, cell.ours
    if kind is Kind.MEASURED:
        return None, "needs a GPU"
    if isinstance(value, str) or isinstance(ours, str) or value is None or ours is None:
        reason = cell.reason or table.above or table.below
        return None, "reproduced" if value == ours else _differs(reason)
    low, high = value if isinstance(value, tuple) else (value, value)
    nearest = min(max(ours, low), high)
    absolute = ours - nearest
    relative = 100 * absolute / abs(nearest) if nearest else (0.0 if not absolute else None)
    shown = absolute if kind is Kind.GAIN else relative
    if _reproduces(kind, nearest, ours, cell.digits):
        return shown, "reproduced"
    if kind is Kind.ORDER and ours < nearest:
        return shown, "better"
    return shown, _differs(cell.reason or (table.above if absolute > 0 else table.below))


def _reproduces(kind: Kind, value: float, ours: float, digits: int) -> bool:
    off = abs(ours - value)
    if kind is Kind.EXACT:
        return off <= 0.5 * 10.0**-digits * (1 + 1e-9)
    if kind is Kind.ORDER:
        return off <= 0.01 * abs(value)
    if kind is Kind.BYTES:
        return off <= max(0.1 * abs(value), 0.5)
    if kind is Kind.GAIN:
        close = value * ours > 0 and 2 / 3 <= ours / value <= 3 / 2
        return off <= 2 or close
    return off <= 0.1 * abs(value)


def _differs(reason: str) -> str:
    return f"differs because {reason}" if reason else UNEXPLAINED
