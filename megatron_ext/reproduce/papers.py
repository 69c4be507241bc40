"""All papers' tables from ``compared.json``, and the rows that a request asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import grid_search, jobs, moe, orders
from .plots import DRAWN
from .quantities import DERIVED, closed_forms
from .rows import Cell, Kind, Paper, Row, Table, judged, published


def _measured(data: dict[str, Any]) -> Iterator[Cell]:
    """Published values that only a run can be compared with."""
    return (Cell(row, value, None) for row, value in data["rows"].items())


_MAKERS = (*orders.CELLS, *jobs.CELLS, *grid_search.CELLS, *moe.CELLS, closed_forms, _measured)
_CELLS = {make.__name__.strip("_"): make for make in _MAKERS}


def _cells(
    make: Callable[[dict[str, Any]], Iterator[Cell]], data: dict[str, Any]
) -> Iterator[Cell]:
    """What ``data`` derives of them, with its ``reasons`` for rows that have such a part."""
    cells = make(data)
    if "derived" in data:
        cells = DERIVED[data["derived"]](cells, data.get("base", ""))
    for cell in cells:
        parts = cell.row.split(", ")
        reasons = (text for part, text in data.get("reasons", {}).items() if part in parts)
        yield cell._replace(reason=next(reasons, cell.reason))


def _table(paper: dict[str, Any], key: str, name: str, given: dict[str, Any]) -> Table:
    data = {"models": paper.get("models"), **paper["tables"][key], **given}
    texts = (one if isinstance(one, list) else [one] for one in given.get("assumptions", ()))
    plot, *axes = given.get("plot", [""])
    return Table(
        name,
        given["title"],
        key,
        Kind[given["kind"].upper()],
        given.get("unit", ""),
        partial(_cells, _CELLS[given["cells"]], data),
        tuple(text for several in texts for text in several),
        given.get("above", ""),
        given.get("below", ""),
        DRAWN[plot](*axes) if plot else None,
    )


def _papers() -> Iterator[Paper]:
    """An entry is a table, or has several and what these have alike.

    ``{"same": NAME}`` stands for what several tables share.
    """
    file = Path(__file__).with_name("compared.json").read_text(encoding="utf-8")
    shared = json.loads(file)["shared"]

    def same(one: dict[str, Any]) -> Any:
        return shared[one["same"]] if "same" in one else one

    for name, entries in json.loads(file, object_hook=same)["papers"].items():
        tables = []
        for key, entry in entries.items():
            several = entry.pop("tables", {entry.get("name", key): {}})
            for table, given in several.items():
                tables.append(_table(published()[name], key, table, entry | given))
        yield Paper(name, tuple(tables))


PAPERS = tuple(_papers())
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
        for cell in table.cells():
            rows.append(judged(paper, table, cell))
            progress(
                f"{paper.name} {table.name}, table {number} of {len(tables)}, {len(rows)} rows"
            )
        yield Section(paper, table, rows)
