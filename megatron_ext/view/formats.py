"""Files that a timeline can be written to, by suffix."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from . import page, svg, text, trace
from .palette import THEMES
from .timeline import Timeline

__all__ = ["RENDERERS", "THEMES"]

# Each takes one run, a planned and its measured one, or runs of several schedules; and the theme.
RENDERERS: dict[str, Callable[[Sequence[Timeline], str], str]] = {
    ".svg": lambda runs, theme: svg.render(*runs, theme=theme),
    ".html": lambda runs, _: page.render(*runs),
    ".json": lambda runs, _: json.dumps(trace.to_trace(list(runs))) + "\n",
    ".txt": lambda runs, _: "\n".join(text.render(run) for run in runs),
}
