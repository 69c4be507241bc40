"""Sections as JSON, as text for a terminal, and as a Markdown page with plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .papers import Section
from .rows import UNEXPLAINED, Kind, Row, Value

REPRODUCED, BETTER, DIFFERS, GPU = "reproduced", "better", "differs", "needs a GPU"


def to_json(sections: Sequence[Section]) -> dict[str, Any]:
    """The rows, and the assumptions of every table."""
    return {
        "rows": [row.to_json() for section in sections for row in section.rows],
        "assumptions": {
            f"{section.paper.name} {section.table.name}": list(section.table.assumptions)
            for section in sections
        },
    }


def verdict(row: Row) -> str:
    """Without its reason."""
    return DIFFERS if row.verdict.startswith(DIFFERS) else row.verdict


def tally(rows: Sequence[Row]) -> Counter[str]:
    """How many rows have which verdict."""
    return Counter(map(verdict, rows))


def number(value: Value) -> str:
    """A value for people: four digits at most; ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"{value[0]:.4g} to {value[1]:.4g}"
    return f"{value:.4g}"


def ours(row: Row) -> str:
    """Our value, with what is noted on it."""
    return number(row.ours) + _note(row)


def difference(row: Row) -> str:
    """In per cent of the published value, or in points of a gain."""
    if row.difference is None:
        return "-"
    return f"{round(row.difference, 1) + 0.0:+.1f}{' points' if _gain(row) else ' %'}"


def _gain(row: Row) -> bool:
    return row.kind is Kind.GAIN


def summary(rows: Sequence[Row]) -> str:
    """One line: verdicts, and the mean and the largest difference."""
    found = tally(rows)
    parts = [f"{found[name]} {name}" for name in (REPRODUCED, BETTER, DIFFERS, GPU) if found[name]]
    shares = [row.difference for row in rows if row.difference is not None]
    if any(shares):
        unit = "points" if _gain(rows[0]) else "%"
        mean, worst = sum(shares) / len(shares), max(shares, key=abs)
        parts.append(f"difference {mean:+.1f} {unit} on average, {worst:+.1f} at most")
    return ", ".join(parts)


def reasons(rows: Sequence[Row]) -> list[str]:
    """Every reason once, in the order of the rows."""
    return list(dict.fromkeys(row.verdict for row in rows if verdict(row) == DIFFERS))


def text(sections: Sequence[Section]) -> str:
    """For a terminal."""
    lines: list[str] = []
    for section in sections:
        table, rows = section.table, section.rows
        unit = f", {table.unit}" if table.unit else ""
        lines += ["", f"{section.paper.name} {table.name}: {table.title}{unit}"]
        lines.append(f"  {section.paper.source(table)}")
        lines += [f"  ours: {one}" for one in table.assumptions]
        wide = max(len(row.row) for row in rows)
        for row in rows:
            values = f"{number(row.published):>12} {number(row.ours):>12} {difference(row):>13}"
            lines.append(f"    {row.row:<{wide}} {values}  {verdict(row)}{_note(row)}")
        lines += [f"  {one}" for one in reasons(rows)]
        lines.append(f"  {summary(rows)}")
    every = [row for section in sections for row in section.rows]
    lines += ["", f"{len(every)} rows: {summary_of_all(every)}", *rules()]
    return "\n".join(lines[1:])


def _note(row: Row) -> str:
    return f" ({row.note})" if row.note else ""


def summary_of_all(rows: Sequence[Row]) -> str:
    """Verdicts alone."""
    found = tally(rows)
    return ", ".join(f"{found[name]} {name}" for name in (REPRODUCED, BETTER, DIFFERS, GPU))


def rules() -> list[str]:
    """When a row counts as reproduced, by kind of quantity."""
    return [f"  {one.name.lower()}: {one.value}" for one in Kind]


_HEAD = """\
# The papers, reproduced

    {command}
    megatron-ext reproduce pipeoffload --figure fig16     # one figure, in the terminal
    megatron-ext reproduce all --json                     # every row

Every table and figure of the papers that simulation or the planner can answer: the published
value, the value of megatron_ext, the difference, and a verdict. The first command wrote this page;
it needs a bare Python, no torch and no GPU. **No value of megatron_ext is a measurement**: orders
are simulated, times and bytes are the planner's. Published values are in one file,
`megatron_ext/reproduce/published.json`, with the place in the paper and how sure each is.

A verdict follows from the kind of quantity alone:

"""


def page(sections: Sequence[Section], images: dict[str, str]) -> str:
    """The Markdown page with all rows.

    Args:
        images: by ``<paper>-<table>``, the path of its plot beside the page.
    """
    lines = _opening(sections, "megatron-ext reproduce all --output PAGE.md     # this page")
    lines += ["| paper | table | what | rows | verdicts and difference |", "|---|---|---|--:|---|"]
    lines += [
        table_row(section, f"[{section.table.name}](#{anchor(section)})") for section in sections
    ]
    paper = None
    for section in sections:
        if section.paper is not paper:
            paper = section.paper
            lines += ["", f"## {paper.data['title']}", "", f"{paper.data['reference']}."]
        lines += section_lines(section, images)
    return "\n".join(lines) + "\n"


def summary_page(sections: Sequence[Section]) -> str:
    """The Markdown page with one line for each table, and why rows differ."""
    command = "megatron-ext reproduce all --summary --output docs/reference/papers.md"
    lines = _opening(sections, f"{command}     # this page")
    lines += ["Without `--summary` the page has every row, and plots.", ""]
    lines += ["| paper | table | what | rows | verdicts and difference |", "|---|---|---|--:|---|"]
    lines += [table_row(section, section.table.name) for section in sections]
    lines += ["", "## Why rows differ", "", *why(sections)]
    return "\n".join(lines) + "\n"


def why(sections: Sequence[Section]) -> list[str]:
    """A list item for every reason, with the tables whose rows have it."""
    found: dict[str, list[str]] = {}
    for section in sections:
        for reason in reasons(section.rows):
            found.setdefault(reason, []).append(_heading(section))
    return [f"- {', '.join(tables)}: {reason}" for reason, tables in found.items()]


def _opening(sections: Sequence[Section], command: str) -> list[str]:
    every = [row for section in sections for row in section.rows]
    head = _HEAD.format(command=command)
    return [
        head + "\n".join(f"- *{one.name.lower()}*: {one.value}" for one in Kind),
        "",
        f'What is outside differs because of a stated reason, or is "{UNEXPLAINED}". Differences '
        "are relative to the published value; of gains, in points.",
        "",
        f"**{len(every)} rows: {summary_of_all(every)}.**",
        "",
    ]


def table_row(section: Section, name: str) -> str:
    """A table in one row; ``name`` may be a link to its rows."""
    return (
        f"| {section.paper.name} | {name} | {section.table.title} | {len(section.rows)} | "
        f"{summary(section.rows)} |"
    )


def anchor(section: Section) -> str:
    """As GitHub makes it of the section's heading."""
    words = _heading(section).lower().replace(" ", "-")
    return "".join(c for c in words if c.isalnum() or c in "-_")


def _heading(section: Section) -> str:
    return f"{section.paper.name} {section.table.name}"


def section_lines(section: Section, images: dict[str, str]) -> list[str]:
    """A section of the page; ``images`` as ``page``."""
    table, rows = section.table, section.rows
    unit = f" ({table.unit})" if table.unit else ""
    lines = ["", f"### {_heading(section)}", "", f"{table.title}{unit}. Published:"]
    lines[-1] += f" {section.paper.source(table)}. Verdict by *{table.kind.name.lower()}*."
    if table.assumptions:
        lines += ["", "Ours:", "", *(f"- {one}" for one in table.assumptions)]
    lines += ["", f"{summary(rows)[:1].upper()}{summary(rows)[1:]}."]
    lines += ["", *(f"- {one}" for one in reasons(rows))] if reasons(rows) else []
    image = images.get(f"{section.paper.name}-{table.name}")
    if image is not None:
        lines += ["", f"![{table.title}]({image})"]
    lines += ["", "| row | published | ours | difference | verdict |", "|---|--:|--:|--:|---|"]
    lines += [
        f"| {row.row} | {number(row.published)} | {ours(row)} | {difference(row)} | "
        f"{verdict(row)} |"
        for row in rows
    ]
    return lines
