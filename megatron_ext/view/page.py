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
.box, .area, .line, .peak, .axis { vector-effect: non-scaling-stroke; }
#plot .area, #plot .peak, #plot .axis { stroke-width: 1; stroke-dasharray: none; }
#plot .peak { stroke-dasharray: 5 3; }
#plot .line { stroke-width: 1.5; }
.margin { fill: #fff; }
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
// Zooming stretches time only: shapes are scaled, their texts moved, the rest stays in sight.
const all = selector => [...picture.querySelectorAll(selector)];
const TIMED = ".box,.copy,.row,.strip,.area,.line,.peak,.axis";
const shapes = all(TIMED), groups = all(".n");
const number = (element, name) => Number(element.getAttribute(name));
const texts = all(".n text,.tick").map(text => [text, number(text, "x")]);
const strip = picture.querySelector(".strip");
const row = number(picture.querySelector(".row"), "height");
const left = number(strip, "x"), width = number(strip, "width");
const [, , full, height] = picture.getAttribute("viewBox").split(" ").map(Number);
const font = groups.length ? number(groups[0], "font-size") : 0;
const still = [...picture.children].filter(element => element.matches(
  `text:not(.tick,.right), rect[class]:not(${TIMED})`));
const margin = strip.cloneNode(), cover = [["x", 0], ["y", 0], ["width", left - 6]];
for (const [key, value] of [...cover, ["height", height], ["class", "margin"]])
  margin.setAttribute(key, value);
let zoom = 1;
function scale(factor) {
  const before = zoom, px = plot.clientWidth / full;
  const middle = (plot.scrollLeft + plot.clientWidth / 2) / px - left;
  zoom = Math.min(Math.max(zoom * factor, 1), 64);
  const more = width * (zoom - 1), size = Math.min(font * zoom, Math.max(font, row * 0.5));
  picture.setAttribute("viewBox", `0 0 ${full + more} ${height}`);
  picture.setAttribute("width", full + more);  // with the height, the ratio that CSS keeps
  picture.style.width = `${100 * (full + more) / full}%`;
  const shape = `translate(${left * (1 - zoom)} 0) scale(${zoom} 1)`;
  shapes.forEach(element => element.setAttribute("transform", shape));
  groups.forEach(group => group.setAttribute("font-size", size));
  texts.forEach(([text, x]) => {
    const down = text.classList.contains("tick") ? 0 : 0.36 * (size - font);
    text.setAttribute("transform", `translate(${(x - left) * (zoom - 1)} ${down})`);
  });
  all(".right").forEach(text => text.setAttribute("transform", `translate(${more} 0)`));
  picture.append(margin, ...still);
  plot.scrollLeft = (left + middle * zoom / before) * px - plot.clientWidth / 2;
  follow();
}
function follow() {
  const moved = `translate(${plot.scrollLeft * full / plot.clientWidth} 0)`;
  [margin, ...still].forEach(element => element.setAttribute("transform", moved));
}
plot.onscroll = follow;
plot.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  scale(event.deltaY < 0 ? 1.2 : 1 / 1.2);
}, {passive: false});
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
        for _ in box.action.parts
    ]
    data = json.dumps(passes, separators=(",", ":")).replace("<", "\\u003c")
    unit = f" {runs[0].unit}" if runs[0].unit else ""
    name = html.escape(f"{schedule.name}, pp {schedule.pp}, microbatches {schedule.microbatches}")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            '<div id="bar"><button id="out" title="zoom out, or ctrl and wheel">−</button>',
            '<button id="in" title="zoom in, or ctrl and wheel">+</button>',
            '<span id="about">point at a pass for its action, rank, start and end</span></div>',
            f'<div id="plot">\n{svg.render(timeline, measured)}</div>',
            f"<script>\nconst PASSES = {data};\nconst UNIT = {json.dumps(unit)};",
            f"{_SCRIPT.strip()}\n</script>\n</body>\n</html>\n",
        ]
    )
