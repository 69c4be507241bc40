"""Files that a timeline can be written to, by suffix."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from . import page, svg, text, trace
from .timeline import Timeline

# Each takes one run, a planned and its measured one, or runs of several schedules.
RENDERERS: dict[str, Callable[[Sequence[Timeline]], str]] = {
    ".svg": lambda runs: svg.render(*runs),
    ".html": lambda runs: page.render(*runs),
    ".json": lambda runs: json.dumps(trace.to_trace(list(runs))) + "\n",
    ".txt": lambda runs: "\n".join(text.render(run) for run in runs),
}
