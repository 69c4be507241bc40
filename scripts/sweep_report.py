#!/usr/bin/env python3
"""The table at the end of a sweep: times, memory and losses of every run, from logs and traces."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_ext.view.table import columns

from . import run_log

TIME = "elapsed time per iteration (ms)"
MEMORY = re.compile(r"\(after \d+ iterations\) memory \(MB\).*?max allocated: ([\d.]+)")


def read_run(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """What one run's files say.

    Args:
        folder: of the sweep.
        name: of the run.
        steps: that it should have made; the first quarter is left out of the times.

    Returns:
        ``complete``; ``losses`` (iteration -> float), ``times_ms`` of the steps that count,
        ``max_allocated_mib`` of the worst rank (None without a GPU), ``peak_sets`` of the worst
        rank as the runtime counted them (None for stock).
    """
    losses, log = run_log.lm_losses(folder / f"{name}.jsonl"), folder / f"{name}.log"
    text = log.read_text(errors="replace") if log.is_file() else ""
    times = {step.iteration: step.values.get(TIME) for step in run_log.steps(text)}
    counted = [float(time) for step, time in times.items() if time and step > steps // 4]
    memory = max(map(float, MEMORY.findall(text.replace("\n", " "))), default=0.0)
    return {
        "complete": len(losses) == steps and bool(counted),
        "losses": losses,
        "times_ms": counted,
        "max_allocated_mib": memory or None,
        "peak_sets": max(run_log.peak_sets(folder / f"{name}.trace"), default=None),
    }


def plan_of(name: str, pp: int, microbatches: int) -> tuple[float, Fraction, int]:
    """(bubble, peak of the worst rank in microbatches, chunks a rank) at F = B = W, simulated."""
    from megatron_ext.schedule import generate, simulate

    chunks = None
    if found := re.fullmatch(r"stock-interleaved-v(\d+)", name):
        name, chunks = "interleaved", int(found[1])
    plan = simulate(generate(name.removeprefix("stock-"), pp, microbatches, chunks))
    return float(plan.bubble), max(plan.peak_activation), plan.schedule.chunks


def row_of(name: str, run: dict[str, Any], first: dict[str, Any], options: Any) -> dict[str, Any]:
    """One row: ``run`` against ``first``, the stock run whose losses the others must have."""
    row = {"schedule": name, "complete": run["complete"], "stock": name.startswith("stock-")}
    if not run["complete"]:
        return row
    row["bubble"], peak, chunks = plan_of(name, options.pp, options.microbatches)
    row["peak_microbatches"] = float(peak)
    if run["peak_sets"] is not None:
        row["peak_microbatches"] = run["peak_sets"] / chunks
        row["peak_planned_microbatches"] = float(peak)
    row["median_ms"] = statistics.median(run["times_ms"])
    row["least_ms"], row["most_ms"] = min(run["times_ms"]), max(run["times_ms"])
    row["max_allocated_mib"] = run["max_allocated_mib"]
    differ = [abs(run["losses"][s] - x) / abs(x) for s, x in first["losses"].items()]
    row["loss_difference"] = max(differ)
    row["last_loss"] = run["losses"][options.steps]
    return row


def table(rows: list[dict[str, Any]], best: float) -> list[str]:
    """The rows as text, fastest first; ``best``: stock's fastest, in milliseconds."""
    heads = ("schedule", "ms a step", "least..most", "speed", "peak", "GiB", "bubble", "losses")
    cells = [heads]
    for row in sorted(rows, key=lambda row: row.get("median_ms", float("inf"))):
        if not row["complete"]:
            cells.append((row["schedule"], "failed", "", "", "", "", "", ""))
            continue
        memory, away = row["max_allocated_mib"], row["loss_difference"]
        cells.append(
            (
                row["schedule"],
                f"{row['median_ms']:.1f}",
                f"{row['least_ms']:.0f}..{row['most_ms']:.0f}",
                f"{best / row['median_ms']:.3f}",
                f"{row['peak_microbatches']:g}",
                f"{memory / 1024:.2f}" if memory else "-",
                f"{100 * row['bubble']:.1f} %",
                "equal" if away == 0 else f"differ by {away:.1e}",
            )
        )
    return columns(cells)


def main() -> int:
    """Print the table; exit status 0 if all runs ended and all losses are stock's."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    for name in ("pp", "microbatches", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    names = (options.folder / "runs.txt").read_text().split()
    runs = {name: read_run(options.folder, name, options.steps) for name in names}
    stock = [n for n in names if n.startswith("stock-") and runs[n]["complete"]]
    if not stock:
        print("sweep: no stock run was completed, so there is nothing to compare", file=sys.stderr)
        return 1
    rows = [row_of(name, runs[name], runs[stock[0]], options) for name in names]
    fastest = min((r for r in rows if r["stock"] and r["complete"]), key=lambda r: r["median_ms"])
    best = fastest["median_ms"]
    print(f"\npp {options.pp}, microbatches {options.microbatches}, {options.steps} steps a run\n")
    print("\n".join(table(rows, best)))
    print(
        f"\nspeed: against stock's best, {fastest['schedule']}; above 1 is faster."
        "\npeak: activations on the worst rank, in microbatches: as the runtime counted, stock's"
        " simulated."
        "\nGiB: most that a rank's allocator held in the first steps. bubble: simulated, F = B = W."
        f"\nlosses: of all steps, bit for bit, against {stock[0]}'s."
    )
    if options.device == "cpu":
        print("CPU ranks share cores: these times say nothing of a GPU's.")
    path = options.folder / "table.json"
    path.write_text(json.dumps({"best_stock": fastest["schedule"], "rows": rows}, indent=1) + "\n")
    print(f"table, logs and traces: {options.folder}")
    return 0 if all(r["complete"] and r["loss_difference"] == 0 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
