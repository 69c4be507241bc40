"""The page of benchmarks/moe.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import page as pages
from benchmarks.moe_emulated import ALPHA_MS, IN_FLIGHT
from benchmarks.moe_shapes import FLOPS, HOST, NETWORK, PEER
from benchmarks.moe_shapes import TOKENS as SHAPE_TOKENS
from benchmarks.page import Row

Cell = Callable[[Row], str]


def page(parts: dict[str, Row]) -> str:
    """The results in Markdown; each part with its run."""
    found: list[Any] = [
        "# MoE layers in chunks, emulated",
        "`python -m benchmarks.moe`: Megatron's own MoE layer, stock and ours, on gloo ranks. "
        "Experts, messages and copies to the host sleep as long as given rates make them; they "
        "do not slow each other down, and chunks cost only what is listed below. **Nothing here "
        "was run on a GPU.** A plan is *chunks strategy lookahead*. Auto tried plans in training, "
        "steps of four calls, Megatron's own layer first.",
    ]
    for part, (title, text, columns) in TABLES.items():
        if part in parts:
            data = parts[part]
            rows = data["rows"]
            found += [f"## {title}", _run_text(data), text(rows), pages.table(columns(rows), rows)]
    return pages.text_of(*found)


def _run_text(data: Row) -> str:
    return (
        f"{data['date']}, {data['ranks']} ranks, {ALPHA_MS} ms for every message and expert "
        f"call beside what rates make them; median of {data['repeats']} alternating rounds, "
        f"slowest rank; {data['machine']}, load {data['load']}; torch {data['torch']}, "
        f"megatron-core {data['megatron']}."
    )


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f}" if row.get("name") else f"{row['ratio']:g}"


def _faster(name: str, than: str) -> Cell:
    """How many times as fast one way is as another; ``s4`` is the best one."""

    def cell(row: Row) -> str:
        median = row["median_ms"]
        return f"{median[than] / median[_best_s4(row) if name == 's4' else name]:.2f}"

    return cell


def _best_s4(row: Row) -> str:
    """Of the plans that need no more than recompute, the fastest; if none does, the smallest."""
    median, peak = row["median_ms"], row["peak_bytes"]
    every = [name for name in median if " s4 " in name]
    fitting = [name for name in every if peak[name] <= peak["recompute"]]
    if not fitting:
        return min(every, key=lambda name: peak[name])
    return min(fitting, key=lambda name: median[name])


def _both(name: str, searched: bool = False) -> Cell:
    """Time, and memory over stock's; with the plan that was chosen, where it was searched for."""

    def cell(row: Row) -> str:
        peak = row["peak_bytes"]
        text = f"{row['median_ms'][name]:.{1 if row['name'] else 2}f}"
        text += f", {peak[name] / peak['stock']:.0%}"
        return f"{text} ({row['chosen'][name]})" if searched else text

    return cell


def _s4(row: Row) -> str:
    """Of the best s4; marked where even that needs more than recompute."""
    best, peak = _best_s4(row), row["peak_bytes"]
    more = "" if peak[best] <= peak["recompute"] else ", needs more"
    return f"{_both(best)(row)} ({best}{more})"


def _shapes_text(_: Sequence[Row]) -> str:
    return (
        f"One layer's forward and backward pass in ms of the described device ({FLOPS / 1e12:g} "
        f"TFLOP/s in the experts, {NETWORK / 1e9:g} GB/s a device between nodes, {PEER / 1e9:g} in "
        f"one, {HOST / 1e9:g} to the host; {SHAPE_TOKENS} tokens a rank, bf16), and the most bytes "
        f"at once with {IN_FLIGHT} calls in flight, over stock's. *Recompute* is "
        "`--recompute-modules moe`. The emulation is slower by a constant a row, sends fewer rows, "
        "and keeps as many bytes inside the experts for each of their input as fused SwiGLU does."
    )


def _shapes(_: Sequence[Row]) -> pages.Columns:
    return {
        "layer": "{name}",
        "communication / computation": _ratio,
        "stock": _both("stock"),
        "stock, recompute": _both("recompute"),
        "best `s4` that needs no more": _s4,
        "auto within the memory of recompute": _both("auto in it", searched=True),
        "recompute / `s4`": _faster("s4", "recompute"),
        "recompute / auto": _faster("auto in it", "recompute"),
        "auto, nothing restored": _both("auto", searched=True),
        "stock / auto": _faster("auto", "stock"),
        "steps tried": "{steps[auto in it]}, {steps[auto]}",
    }


def _balances_text(rows: Sequence[Row]) -> str:
    least = min(
        row["median_ms"]["recompute"] / row["median_ms"][_best_s4(row)]
        for row in rows
        if row["ratio"] >= 0.5
    )
    return (
        "Top 8, as many bytes inside the experts as in their input; in units of the experts' "
        "forward pass. `s4` against recompute where communication is at least half of computation: "
        f"{least:.2f} times as fast or more."
    )


def _balances(_: Sequence[Row]) -> pages.Columns:
    return {
        "communication / computation": _ratio,
        "stock": _both("stock"),
        "stock, recompute": _both("recompute"),
        "best `s4` that needs no more": _s4,
        "recompute / `s4`": _faster("s4", "recompute"),
        "stock / `s4`": _faster("s4", "stock"),
    }


def _memory_text(_: Sequence[Row]) -> str:
    return (
        "Real experts with F = 4M, forward and backward of one layer; everything but parameters, "
        "by storage, the shared buffers included. Less than: `none` in as many chunks. Bytes of "
        "`s1` and `s2` vary between runs, by up to two chunks' tensors on their way to the host."
    )


def _memory(rows: Sequence[Row]) -> pages.Columns:
    peak = {row["way"]: row["peak_bytes"] for row in rows}

    def way(row: Row) -> list[str]:
        return ("1 stock" if row["way"] == "stock" else row["way"]).split()

    def less(row: Row, than: str) -> str:
        return f"{1 - row['peak_bytes'] / peak[than]:.0%}"

    return {
        "chunks": lambda row: way(row)[0],
        "strategy": lambda row: way(row)[1],
        "bytes": "{peak_bytes:,}",
        "of them shared buffers": "{buffers_bytes:,}",
        "on the host": "{host_bytes:,}",
        "less than stock": lambda row: less(row, "stock"),
        "less than `none`": lambda row: less(
            row, "stock" if way(row)[0] == "1" else f"{way(row)[0]} none"
        ),
    }


# Part: its title, text and columns.
TABLES: dict[
    str, tuple[str, Callable[[Sequence[Row]], str], Callable[[Sequence[Row]], pages.Columns]]
] = {
    "shapes": ("Layers that people train", _shapes_text, _shapes),
    "balances": ("Memory of recomputation", _balances_text, _balances),
    "memory": ("Most bytes at once", _memory_text, _memory),
}
