"""The page of benchmarks/moe.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.moe_emulated import ALPHA_MS, EXPERTS, IN_FLIGHT, KAPPA, TOKENS, TOP_K
from benchmarks.moe_shapes import FLOPS, HOST, NETWORK, PEER
from benchmarks.moe_shapes import TOKENS as SHAPE_TOKENS


def page(parts: dict[str, Any]) -> str:
    """The results in Markdown; each part with its run."""
    lines = [
        "# MoE layers in chunks, emulated",
        "",
        "`python -m benchmarks.moe`: Megatron's own MoE layer, stock and ours, on gloo ranks. "
        "Experts, messages and copies to the host sleep as long as given rates make them; they "
        "do not slow each other down, and chunks cost only what is listed below. **Nothing here "
        "was run on a GPU.** A plan is *chunks strategy lookahead*. Auto tried plans in training, "
        "steps of four calls, Megatron's own layer first.",
    ]
    for part, (title, table) in TABLES.items():
        if part in parts:
            about = parts[part]
            lines += ["", f"## {title}", "", _run_text(about), "", *table(about["rows"])]
    return "\n".join(lines) + "\n"


def _run_text(about: dict[str, Any]) -> str:
    return (
        f"{about['date']}, {about['ranks']} ranks, {ALPHA_MS} ms for every message and expert "
        "call beside what rates make them; median of "
        f"{about['repeats']} alternating rounds, slowest rank; "
        f"{about['machine']}, load {about['load']}; torch {about['torch']}, megatron-core "
        f"{about['megatron']}."
    )


def _shape_table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"One layer's forward and backward pass in ms of the described device ({FLOPS / 1e12:g} "
        f"TFLOP/s in the experts, {NETWORK / 1e9:g} GB/s a device between nodes, {PEER / 1e9:g} in "
        f"one, {HOST / 1e9:g} to the host; {SHAPE_TOKENS} tokens a rank, bf16), and the most bytes "
        f"at once with {IN_FLIGHT} calls in flight, over stock's. *Recompute* is "
        "`--recompute-modules moe`. The emulation is slower by a constant a row, sends fewer rows, "
        "and keeps as many bytes inside the experts for each of their input as fused SwiGLU does.",
        "",
        "| layer | communication / computation | stock | stock, recompute | best `s4` that needs "
        "no more | auto within the memory of recompute | recompute / `s4` | recompute / auto | "
        "auto, nothing restored | stock / auto | steps tried |",
        "|---|--:|---|---|---|---|--:|--:|---|--:|--:|",
        *map(_shape_line, rows),
    ]


def _balance_table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "Top 8, as many bytes inside the experts as in their input; in units of the experts' "
        "forward pass. `s4` against recompute where communication is at least half of computation: "
        f"{_least_gain(rows):.2f} times as fast or more.",
        "",
        "| communication / computation | stock | stock, recompute | best `s4` that needs no more | "
        "recompute / `s4` | stock / `s4` |",
        "|--:|---|---|---|--:|--:|",
        *map(_balance_line, rows),
    ]


def _least_gain(rows: list[dict[str, Any]]) -> float:
    return min(
        row["median_ms"]["recompute"] / row["median_ms"][_best_s4(row)]
        for row in rows
        if row["ratio"] >= 0.5
    )


def _best_s4(row: dict[str, Any]) -> str:
    """Of the plans that need no more than recompute, the fastest; if none does, the smallest."""
    median, peak = row["median_ms"], row["peak_bytes"]
    every = [name for name in median if " s4 " in name]
    fitting = [name for name in every if peak[name] <= peak["recompute"]]
    if not fitting:
        return min(every, key=lambda name: peak[name])
    return min(fitting, key=lambda name: median[name])


def _cell(row: dict[str, Any], name: str, plan: str = "") -> str:
    """Time, and memory over stock's."""
    peak = row["peak_bytes"]
    text = f"{row['median_ms'][name]:.{1 if row['name'] else 2}f}, {peak[name] / peak['stock']:.0%}"
    return f"{text} ({plan})" if plan else text


def _s4_cell(row: dict[str, Any]) -> str:
    """Of the best s4; marked where even that needs more than recompute."""
    best, peak = _best_s4(row), row["peak_bytes"]
    more = "" if peak[best] <= peak["recompute"] else ", needs more"
    return _cell(row, best, best + more)


def _shape_line(row: dict[str, Any]) -> str:
    median, chosen, best, within = row["median_ms"], row["chosen"], _best_s4(row), "auto in it"
    cells = [row["name"], f"{row['ratio']:.2f}", _cell(row, "stock"), _cell(row, "recompute")]
    cells += [_s4_cell(row), _cell(row, within, chosen[within])]
    cells += [f"{median['recompute'] / median[name]:.2f}" for name in (best, within)]
    cells += [_cell(row, "auto", chosen["auto"]), f"{median['stock'] / median['auto']:.2f}"]
    cells += [f"{row['steps'][within]}, {row['steps']['auto']}"]
    return f"| {' | '.join(cells)} |"


def _balance_line(row: dict[str, Any]) -> str:
    median, best = row["median_ms"], _best_s4(row)
    cells = [f"{row['ratio']:g}", _cell(row, "stock"), _cell(row, "recompute")]
    cells += [_s4_cell(row)]
    cells += [f"{median[name] / median[best]:.2f}" for name in ("recompute", "stock")]
    return f"| {' | '.join(cells)} |"


def _speed_table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{EXPERTS} experts, top {TOP_K}, {TOKENS} tokens a rank.",
        "",
        "| communication / computation | stock | `2` | `4` | dispatch-first, best n | chosen | "
        "best of all | stock / chosen | chosen / best | steps tried |",
        "|--:|--:|--:|--:|--:|---|---|--:|--:|--:|",
        *map(_speed_line, rows),
    ]


def _strategy_table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"The budget is half of what stock keeps for {IN_FLIGHT} microbatches in flight. *Link* is "
        "a copy of the experts' input over their forward pass; what lies inside takes "
        f"{KAPPA} times as long.",
        "",
        "| communication / computation | link | stock, over the budget | chosen | best that "
        "fits | worst that fits | chosen / best | steps tried |",
        "|--:|--:|--:|---|---|---|--:|--:|",
        *map(_strategy_line, rows),
    ]


def _memory_table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "Real experts with F = 4M, forward and backward of one layer; everything but parameters, "
        "by storage, the shared buffers included. Less than: `none` in as many chunks. Bytes of "
        "`s1` and `s2` vary between runs, by up to two chunks' tensors on their way to the host.",
        "",
        "| chunks | strategy | bytes | of them shared buffers | on the host | less than stock "
        "| less than `none` |",
        "|--:|---|--:|--:|--:|--:|--:|",
        *_memory_lines(rows),
    ]


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[str]]]] = {
    "shapes": ("Layers that people train", _shape_table),
    "balances": ("Memory of recomputation", _balance_table),
    "speed": ("Nothing restored", _speed_table),
    "strategies": ("Half the memory", _strategy_table),
    "memory": ("Most bytes at once", _memory_table),
}


def _ms(row: dict[str, Any], name: str) -> str:
    return f"{row['median_ms'][name]:.0f}"


def _speed_line(row: dict[str, Any]) -> str:
    median, best, chosen = row["median_ms"], row["best"], row["chosen"]
    first = min((n for n in median if n in ("4 none 4", "8 none 8")), key=lambda n: median[n])
    cells = [f"{row['ratio']:g}", *(_ms(row, n) for n in ("stock", "2 none 2", "4 none 2", first))]
    cells += [f"{_ms(row, 'auto')} ({chosen})", f"{_ms(row, best)} ({best})"]
    cells += [f"{median['stock'] / median['auto']:.2f}", f"{median['auto'] / median[best]:.3f}"]
    cells += [str(row["steps_to_settle"])]
    return f"| {' | '.join(cells)} |"


def _strategy_line(row: dict[str, Any]) -> str:
    median, best, chosen = row["median_ms"], row["best"], row["chosen"]
    worst = row["worst"]
    cells = [f"{row['ratio']:g}", f"{row['link']:g}", _ms(row, "stock")]
    cells += [f"{_ms(row, 'auto')} ({chosen})", f"{_ms(row, best)} ({best})"]
    cells += [f"{_ms(row, worst)} ({worst})", f"{median['auto'] / median[best]:.3f}"]
    cells += [str(row["steps_to_settle"])]
    return f"| {' | '.join(cells)} |"


def _memory_lines(rows: list[dict[str, Any]]) -> list[str]:
    peak = {row["way"]: row["peak_bytes"] for row in rows}
    lines = []
    for row in rows:
        chunks, strategy = ("1 stock" if row["way"] == "stock" else row["way"]).split()
        like = peak["stock" if chunks == "1" else f"{chunks} none"]
        cells = [chunks, strategy, f"{row['peak_bytes']:,}", f"{row['buffers_bytes']:,}"]
        cells += [f"{row['host_bytes']:,}", f"{1 - row['peak_bytes'] / peak['stock']:.0%}"]
        cells += [f"{1 - row['peak_bytes'] / like:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
