"""The timeline as one HTML file: data, and the viewer that draws, zooms and explains it."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .data import view_data
from .timeline import Timeline, names_of, on_one_axis
from .web import document


def render(*runs: Timeline, rows: Sequence[Sequence[str]] = ()) -> str:
    """HTML text of runs on one time axis, as ``svg.render`` takes them.

    Nothing is loaded from elsewhere.

    Args:
        runs: one above the other.
        rows: a table above them, its heads first.
    """
    runs = on_one_axis(runs)
    return document(
        names_of(runs),
        f'<main>{_table(rows)}<div id="timeline"></div></main>',
        _STYLES,
        'const VIEWER = new Viewer(document.getElementById("timeline"), TIMELINE);',
        {"TIMELINE": view_data(runs)},
    )


_STYLES = """main { padding: 8px 12px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: 2px 8px; white-space: nowrap; }
th { color: var(--soft); }
td { border-top: 1px solid var(--panel); }
th:first-child, td:first-child { text-align: left; }
"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * len(rows), rows)
    ]
    return f'<div class="scroll"><table><tr>{"<tr>".join(lines)}</table></div>'
