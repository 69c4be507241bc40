"""All papers, and the rows that a request asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from . import (
    controllable_memory,
    dualpipe,
    large_scale,
    mpipemoe,
    pipeoffload,
    vocabulary_parallelism,
    zero_bubble,
)
from .rows import Paper, Row, Table, judged

PAPERS = (
    pipeoffload.PAPER,
    controllable_memory.PAPER,
    mpipemoe.PAPER,
    zero_bubble.PAPER,
    vocabulary_parallelism.PAPER,
    dualpipe.PAPER,
    large_scale.PAPER,
)
ALL = "all"


class Section(NamedTuple):
    """A table with its rows."""

    paper: Paper
    table: Table
    rows: list[Row]


class UnknownFigure(ValueError):
    """No table or figure of that name."""


def wanted(paper: str, figure: str | None) -> list[tuple[Paper, Table]]:
    """The tables of one paper or of ``all``, in their order.

    Args:
        figure: only tables of this name, or whose names begin with it and a hyphen.

    Raises:
        UnknownFigure: there is none.
    """
    every = [(p, t) for p in PAPERS if paper in (ALL, p.name) for t in p.tables]
    if figure is None:
        return every
    found = [(p, t) for p, t in every if t.name == figure or t.name.startswith(f"{figure}-")]
    if not found:
        names = ", ".join(dict.fromkeys(t.name for _, t in every))
        raise UnknownFigure(f"no table or figure {figure!r} of {paper}; give one of {names}")
    return found


def sections(
    tables: Sequence[tuple[Paper, Table]], progress: Callable[[str], None] = lambda line: None
) -> Iterator[Section]:
    """Compute them one after the other.

    Args:
        progress: called with a line for every row.
    """
    for number, (paper, table) in enumerate(tables, 1):
        rows: list[Row] = []
        for cell in table.cells(paper.data["tables"][table.key]):
            rows.append(judged(paper, table, cell))
            progress(
                f"{paper.name} {table.name}, table {number} of {len(tables)}, {len(rows)} rows"
            )
        yield Section(paper, table, rows)
