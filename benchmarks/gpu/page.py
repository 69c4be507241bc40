"""The page of the GPU suite's results, one table a question; and what is wrong with them."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
NOISE = 1.03  # work over step that is no error of measuring

# Part: title, text, and by list of rows in its result the columns, as formats of a row's cells.
SECTIONS: dict[str, tuple[str, str, dict[str, dict[str, str]]]] = {
    "equality": (
        "Do schedules compute the same?",
        "Measured: losses of three steps and the weights after them, bit for bit against `1f1b`.",
        {"rows": {"schedule": "{schedule}", "processes": "{ranks}", "messages": "{messages}",
                  "losses and weights": "{equal}", "sets moved a step": "{moved_sets}"}},
    ),
    "row": (
        "What do schedules gain and hold, and what does offload cost?",
        "The fullest of eight ranks, 16 microbatches, 4 layers a rank, bf16 with float32 gradients."
        " Speed, pipeline and rank (its end) are simulated; rows with offload take the passes of "
        "`po` without. Step, work, sets and peak (above weights and gradients, GiB) are measured, "
        "with messages that arrive when simulated peers send them: a step beyond *rank* is a wait "
        "that nothing absorbs. Planned: the sets alone.",
        {"rows": {"schedule": "{size}: {schedule}", "speed": "{speed}",
                  "pipeline ms": "{pipeline_ms}", "rank ms": "{simulated_rank_ms}",
                  "step ms": "{step_ms}", "work ms": "{work_ms}", "sets": "{sets}",
                  "peak": "{peak_bytes}", "planned": "{planned_bytes}", "MHz": "{mhz}"}},
    ),
    "graphs": (
        "Does the host keep up?",
        "Measured, milliseconds a step of one rank's list: issued by the host, and done, eager and "
        "as one CUDA graph; losses and all gradients of three new batches against eager's. TP: one "
        "rank's part of the layers, without the all-reduces.",
        {"rows": {"schedule": "{size}: {schedule}", "host": "{host_ms}", "step": "{step_ms}",
                  "graph: host": "{graph_host_ms}", "graph: step": "{graph_step_ms}",
                  "numbers": "{equal}", "GiB more": "{gib_more}"}},
    ),
    "slices": (
        "What do slices cost?",
        "Measured: F, B and W of one layer, against the whole sequence with torch's own choice of a"
        " kernel. Simulated: speed of eight ranks of such layers under `v-zb`, against `1f1b` of"
        " whole sequences. *Peak* in microbatches.",
        {"rows": {"slices": "{size}: {slices}", "ms": "{ms}", "over whole": "{over_whole}",
                  "gradients apart": "{difference:.1e}", "`v-zb`, m 4": "{speed_4}",
                  "m 8": "{speed_8}", "peak, m 8": "{peak_8}"}},
    ),
    "te": (
        "What does Transformer Engine's split cost?",
        "Measured: one layer, stock's F and BW against F, B and W through our split; core attention"
        " in slices (`causal_bottom_right`); grouped experts.",
        {"rows": {"layer": "{layer}, {size}, {precision}", "stock F": "{stock_F}",
                  "BW": "{stock_BW}", "our F": "{ours_F}", "B": "{ours_B}", "W": "{ours_W}",
                  "gradients apart": "{difference:.1e}"},
         "slices": {"attention": "{size}: {slices}", "ms": "{ms}", "over whole": "{over_whole}"},
         "experts": {"experts": "{layer}: {way}", "ms": "{ms}", "speed": "{speed}"}},
    ),
    "transfers": (
        "How fast are copies?", "Measured.",
        {"rates": {"copies": "{copies}", "GB/s": "{gb_per_s}"},
         "rows": {"beside": "{case}", "matrix products ms": "{ms}", "TFLOP/s": "{tflops}",
                  "GB/s each way": "{gb_per_s_each_way}"}},
    ),
    "moe": (
        "What do MoE layers in chunks gain?",
        "Measured, with grouped products for all and emulated messages on 16 multiprocessors; "
        "peak with two calls in flight, GiB.",
        {"rows": {"layer": "{layer}: {way}", "ms": "{ms}", "speed": "{speed}",
                  "peak": "{peak_bytes}"}},
    ),
    "overhead": (
        "What does the executor add?", "Measured: the host's microseconds an action.",
        {"rows": {"schedule": "{schedule}", "actions": "{actions}", "executor": "{executor_us}",
                  "plain loop": "{loop_us}"}},
    ),
}  # fmt: skip


def page(data: Row, link: str) -> str:
    """Markdown; a part that is not there has no section."""
    about = data["about"]
    lines = [
        "# One GPU",
        "",
        f"`python -m benchmarks.gpu.run`, {data['date']}: {about.get('gpu') or 'no GPU'}; torch "
        f"{about.get('torch')}, megatron-core {about.get('megatron')}. All rows: [{link}]({link}). "
        "Times are medians of alternating rounds, with the range in brackets; a difference within "
        "it means nothing. *Simulated*: from measured passes, without messages.",
    ]
    if data["tiny"]:
        lines += ["", "**No GPU figure is in here**: everything ran with next to nothing to do."]
    if problems := wrong(data["parts"]):
        lines += ["", "**Wrong**:", "", *(f"- {problem}" for problem in problems)]
    for name, part in data["parts"].items():
        title, text, tables = SECTIONS[name]
        lines += ["", f"## {title}", "", text]
        if "skipped" in part:
            lines += ["", f"Not run: {part['skipped']}."]
        for key, columns in tables.items():
            rows = [_shown(row) for row in part.get(key, ()) if "failed" not in row]
            if rows:
                marks = f"|---|{'--:|' * (len(columns) - 1)}"
                lines += ["", f"| {' | '.join(columns)} |", marks]
                lines += [f"| {' | '.join(columns.values())} |".format_map(row) for row in rows]
    return "\n".join(lines) + "\n"


class _Cells(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return ""


def _shown(row: Row) -> _Cells:
    """A row's cells: medians with their ranges, bytes in GiB, equality in words."""
    cells = _Cells()
    for key, value in row.items():
        if isinstance(value, list) and len(value) == 3:
            cells[key] = "{:.2f} ({:.2f}..{:.2f})".format(*value)
        elif key.endswith("_bytes"):
            cells[key] = f"{value / 2**30:.2f}"
        elif key == "equal":
            cells[key] = "equal" if value else "**different**"
        else:
            cells[key] = "" if value is None else value
    return cells


def wrong(parts: dict[str, Row]) -> list[str]:
    """What must not be, one line each. Times are looked at by people."""
    found = [f"{name}: {part['failed']}" for name, part in parts.items() if "failed" in part]
    for name, part in parts.items():
        for row in (row for rows in part.values() if isinstance(rows, list) for row in rows):
            words = ("ranks", "size", "layer", "schedule", "slices", "precision", "way")
            what = ", ".join([name, *(str(row[word]) for word in words if word in row)])
            step = row.get("step_ms", [0])[0] * NOISE
            checks = {
                row.get("failed"): "failed" in row,
                "other numbers": not row.get("equal", True),
                "the loss never changed": not row.get("learns", True),
                "other sets than planned": row.get("sets") != row.get("planned_sets"),
                "its work exceeds its step": row.get("work_ms", [0])[0] > step,
                "other gradients": row.get("difference", 0) > 0.05,
            }
            found += [f"{what}: {why}" for why, is_wrong in checks.items() if is_wrong]
    return found
