"""The timeline as one HTML file: the SVG, and a few lines of script for hovering and zooming."""

from __future__ import annotations

import html
import json

from . import svg
from .timeline import Timeline, decimal

_STYLE = """
body { margin: 0; font: 14px Helvetica, Arial, "DejaVu Sans", sans-serif; color: #1f2933; }
#bar { position: sticky; top: 0; left: 0; padding: 8px 12px; background: #f5f6f8; }
#bar button { width: 2em; }
#about { margin-left: 12px; font-variant-numeric: tabular-nums; }
#plot { overflow-x: auto; }
#plot svg { display: block; width: 100%; height: auto; }
.box:hover { stroke: #16202a; stroke-width: 2; }
"""

# PASSES holds one row a box of the picture, in the order in which they are drawn.
_SCRIPT = """
const about = document.getElementById("about"), plot = document.getElementById("plot");
const picture = plot.querySelector("svg"), hint = about.textContent;
picture.querySelectorAll(".box").forEach((box, i) => {
  const [action, rank, start, end, run] = PASSES[i];
  const text = `${action}  rank ${rank}  ${start} to ${end}${UNIT}  ${run}`;
  box.querySelector("title")?.remove();
  box.onmouseenter = () => { about.textContent = text; };
  box.onmouseleave = () => { about.textContent = hint; };
});
picture.querySelectorAll(".n").forEach(g => { g.style.pointerEvents = "none"; });
let zoom = 1;
function scale(factor) {
  const middle = (plot.scrollLeft + plot.clientWidth / 2) / plot.scrollWidth;
  zoom = Math.min(Math.max(zoom * factor, 1), 64);
  picture.style.width = `${100 * zoom}%`;
  plot.scrollLeft = middle * plot.scrollWidth - plot.clientWidth / 2;
}
document.getElementById("in").onclick = () => scale(1.5);
document.getElementById("out").onclick = () => scale(1 / 1.5);
"""


def render(timeline: Timeline, measured: Timeline | None = None) -> str:
    """HTML text of one run, or of a planned and a measured run, as ``svg.render`` draws them.

    Nothing is loaded from elsewhere. Without script it still is the picture.
    """
    schedule = timeline.schedule
    runs = [timeline] if measured is None else [timeline.scaled_to(measured), measured]
    # svg.render draws the boxes run by run and rank by rank, each row in order.
    passes = [
        [str(box.action), rank, decimal(box.start), decimal(box.end), run.label]
        for run in runs
        for rank, row in enumerate(run.boxes)
        for box in row
    ]
    data = json.dumps(passes, separators=(",", ":")).replace("<", "\\u003c")
    unit = f" {runs[0].unit}" if runs[0].unit else ""
    name = html.escape(f"{schedule.name}, pp {schedule.pp}, microbatches {schedule.microbatches}")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            '<div id="bar"><button id="out" title="zoom out">−</button>',
            '<button id="in" title="zoom in">+</button>',
            '<span id="about">point at a pass for its action, rank, start and end</span></div>',
            f'<div id="plot">\n{svg.render(timeline, measured)}</div>',
            f"<script>\nconst PASSES = {data};\nconst UNIT = {json.dumps(unit)};",
            f"{_SCRIPT.strip()}\n</script>\n</body>\n</html>\n",
        ]
    )
