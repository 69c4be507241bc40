"""The timeline as one HTML file: data, and the viewer that draws, zooms and explains it."""

from __future__ import annotations

from .data import view_data
from .timeline import Timeline, names_of, on_one_axis
from .web import document


def render(*runs: Timeline) -> str:
    """HTML text of runs on one time axis, as ``svg.render`` takes them.

    Nothing is loaded from elsewhere.
    """
    runs = on_one_axis(runs)
    return document(
        names_of(runs),
        '<main id="timeline"></main>',
        "#timeline { padding: 8px 12px; }\n",
        'const VIEWER = new Viewer(document.getElementById("timeline"), TIMELINE);',
        {"TIMELINE": view_data(runs)},
    )
