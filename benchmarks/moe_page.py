"""The page of benchmarks/moe.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.moe_emulated import ALPHA_MS, EXPERTS, IN_FLIGHT, KAPPA, TOKENS, TOP_K


def page(parts: dict[str, Any]) -> str:
    """The results in Markdown; each part with its run."""
    lines = [
        "# MoE layers in chunks, emulated",
        "",
        "`python -m benchmarks.moe`: Megatron's own MoE layer, stock and ours, on gloo ranks. "
        f"{EXPERTS} experts, top {TOP_K}, {TOKENS} tokens a rank; experts and messages sleep. "
        "A plan is *chunks strategy lookahead*. Auto tried plans in training, a step of four calls "
        "each, Megatron's own layer first.",
    ]
    for part, (title, table) in TABLES.items():
        if part in parts:
            about = parts[part]
            lines += ["", f"## {title}", "", _run_text(about), "", *table(about["rows"])]
    return "\n".join(lines) + "\n"


def _run_text(about: dict[str, Any]) -> str:
    return (
        f"{about['date']}, {about['ranks']} ranks, experts {about['compute_ms']:g} ms forward and "
        f"twice that backward, {ALPHA_MS} ms more for every message and expert call; median of "
        f"{about['repeats']} alternating rounds (strategies: 3 at most), slowest rank; "
        f"{about['machine']}, load {about['load']}; torch {about['torch']}, megatron-core "
        f"{about['megatron']}."
    )


def _speed_table(rows: list[dict[str, Any]]) -> list[str]:
    return [
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
        "by storage, the shared buffers included. Less than: `none` in as many chunks.",
        "",
        "| chunks | strategy | bytes | of them shared buffers | on the host | less than stock "
        "| less than `none` |",
        "|--:|---|--:|--:|--:|--:|--:|",
        *_memory_lines(rows),
    ]


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[str]]]] = {
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
