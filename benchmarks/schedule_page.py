"""The short page about one run: tables with the losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.schedule_claims import Claim
from benchmarks.schedule_scope import ATTENTION, UNIT, Scope
from benchmarks.schedule_sweep import V_FAMILY, Loss, Row, Setting, dominated, faster_rivals, losses


def page(
    head: dict[str, Any], claims: Sequence[Claim], rows: Sequence[Row], plots: Sequence[str]
) -> str:
    """Markdown.

    Args:
        head: date, machine, python, torch, seconds, load, results.
        claims: all that were checked.
        rows: of the whole table.
        plots: file names of the Pareto plots, beside the page.
    """
    failed = [claim for claim in claims if claim.holds is False]
    checked = sum(claim.holds is not None for claim in claims)
    torch = f"torch {head['torch']}'s own action lists" if head["torch"] else "no torch"
    return "\n".join(
        [
            "# Schedules: claims, table, losses",
            "",
            f"Measured {head['date']} (`{head['scope']}`), Python {head['python']} "
            f"({head['machine']}) in "
            f"{head['seconds']:.0f} s, with {torch}. Load average around the generation times, the "
            f"only thing that depends on it: {head['load']}. All rows: "
            f"[{head['results']}]({head['results']}).",
            "",
            "Run it again, from the repository's root; only the comparison with torch needs "
            "anything installed:",
            "",
            "    python3 -m benchmarks.schedules            # this page, its plots, results/",
            "    python3 -m benchmarks.schedules --resume   # go on where it was interrupted",
            "    python3 -m benchmarks.schedules --quick --output DIR   # under a minute",
            "    python3 -m benchmarks.schedules --times-again FILE   # only generation times",
            "",
            "Times are simulated, in units of F; nothing here was measured on a GPU. A pass of one "
            "of v chunks counts 1/v of its rank's, so what more and smaller passes cost in kernel "
            "launches and messages is not in here, and `interleaved` at v = 8 looks better than "
            "it will be. *Peak* is the worst rank's activation in microbatches, or as a share of "
            "1F1B's p.",
            "",
            f"## Claims: {checked - len(failed)} of {checked} hold",
            "",
            *_claims(claims),
            "",
            "## Bubble against memory",
            "",
            *[f"![Bubble against memory]({plot})\n" for plot in plots],
            "## Losses",
            "",
            *_losses(rows, bool(head["torch"])),
            "",
            "## Where a rival is faster at no less memory than ours",
            "",
            *_faster(rows),
            "",
            "## Table",
            "",
            *_tables(rows),
        ]
    )


def _claims(claims: Sequence[Claim]) -> list[str]:
    lines: list[str] = []
    group = ""
    for claim in claims:
        if claim.group != group:
            group = claim.group
            lines += ["", f"**{group}**", "", "| | expected | measured | |", "|---|---|---|---|"]
        mark = {True: "holds", False: "**does not hold**", None: "measured"}[claim.holds]
        lines.append(f"| {claim.what} | {claim.expected} | {claim.measured} | {mark} |")
    return lines[1:]


def _losses(rows: Sequence[Row], with_torch: bool) -> list[str]:
    count = len({row.setting for row in rows})
    lines = [
        f"In how many of the {count} settings some order of `interleaved` (Megatron's, whole "
        "backward passes; the best of v = 2, 3, 4, 8) has the shorter makespan than the V "
        "schedules. It buys that with more memory than 1F1B's, so none of these is a loss at equal "
        "memory; it is what the memory costs.",
        "",
        *_loss_table([losses(rows, name, "interleaved v=") for name in V_FAMILY]),
        "",
        "And `interleaved-zb` (ours, loop placement, 1F1B's memory, v = 2 and 4):",
        "",
        *_loss_table([losses(rows, name, "interleaved-zb") for name in V_FAMILY]),
    ]
    if with_torch:
        names = [*V_FAMILY, "interleaved-zb v=2", "zb-h1"]
        lines += [
            "",
            "And the four orders of torch.distributed.pipelining, simulated under the same costs "
            "(an order is never made for costs there; DualPipeV's overlapped pairs run one after "
            "the other):",
            "",
            *_loss_table([losses(rows, name, "torch") for name in names]),
        ]
    return [*lines, "", *_dominated(rows)]


def _loss_table(found: Sequence[Loss]) -> list[str]:
    lines = [
        "| loses | settings lost | of them to one with no more memory | worst | there | memory of "
        "winner and loser |",
        "|---|--:|--:|--:|---|---|",
    ]
    for loss in found:
        memory = f"{loss.memory[0]:.2f}, {loss.memory[1]:.2f}" if loss.lost else ""
        worst = f"{100 * loss.worst:.1f} % longer" if loss.lost else "never"
        lines.append(
            f"| `{loss.loser}` | {loss.lost} of {loss.settings} | {loss.at_no_more_memory} | "
            f"{worst} | {loss.where} | {memory} |"
        )
    return lines


def _dominated(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Settings in which another row of the table is both faster and no larger:",
        "",
        "| schedule | dominated in |",
        "|---|--:|",
    ]
    found = sorted(dominated(rows).items(), key=lambda item: item[1][0] / item[1][1])
    return [*lines, *(f"| {name} | {n} of {total} |" for name, (n, total) in found)]


def _faster(rows: Sequence[Row]) -> list[str]:
    """Every cell of the grid that is lost to a rival, worst first for each rival."""
    found, count = faster_rivals(rows)
    lines = [
        "Rivals are stock Megatron's orders (`1f1b`, `interleaved`) and PyTorch's; against each, "
        "in each setting, stands the fastest of our other schedules that takes no more memory "
        f"than it. In {count - len(found)} of {count} comparisons ours is at least as fast; these "
        "are the others, all of them:",
        "",
    ]
    if not found:
        return [*lines[:1], "", "There is none."]
    lines += ["| rival | p | m | costs | hop | ours | ours is longer by | memory of both |"]
    lines += ["|---|--:|--:|---|--:|---|--:|---|"]
    for one in sorted(found, key=lambda one: (one.rival.name, -one.by)):
        rival, ours, at = one.rival, one.ours, one.rival.setting
        cells = (rival.name, at.pp, at.microbatches, ",".join(at.cost), at.hop)
        if ours is None:
            cells += ("none takes as little", "", f"{rival.memory:.2f}")
        else:
            memory = f"{rival.memory:.2f}, {ours.memory:.2f}"
            cells += (ours.name, f"{100 * one.by:.2f} %", memory)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _tables(rows: Sequence[Row]) -> list[str]:
    """Bubble and peak by schedule for two costs; the rest is in the JSON file."""
    lines = ["Bubble in percent by m, and the peak at the largest m. All costs and hops: JSON.", ""]
    for cost, hop in ((UNIT, "0"), (ATTENTION, "0.05")):
        here = [row for row in rows if row.setting.cost == cost and row.setting.hop == hop]
        for pp in sorted({row.setting.pp for row in here}):
            lines += _table(f"p = {pp}, costs {','.join(cost)}, hop {hop}", here, pp)
    return lines


def _table(title: str, rows: Sequence[Row], pp: int) -> list[str]:
    mine = [row for row in rows if row.setting.pp == pp]
    sizes = sorted({row.setting.microbatches for row in mine})
    names = list(dict.fromkeys(row.name for row in mine))
    lines = [f"**{title}**", "", f"| | {' | '.join(f'm = {m}' for m in sizes)} | peak | of p |"]
    lines.append("|---|" + "--:|" * (len(sizes) + 2))
    for name in names:
        by_m = {row.setting.microbatches: row for row in mine if row.name == name}
        cells = [f"{100 * by_m[m].bubble:.1f}" if m in by_m else "" for m in sizes]
        last = by_m[max(by_m)]
        cells += [f"{last.peak:g}", f"{100 * last.memory:.0f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def plot_settings(scope: Scope) -> list[Setting]:
    """What is drawn: p = 8 or the next smaller one, m = 4p or the next smaller one."""
    p = max(p for p in scope.ranks if p <= 8)
    m = p * max(k for k in scope.factors if k <= 4)
    wanted = ((UNIT, "0"), (ATTENTION, "0.05"))
    return [Setting(p, m, c, h) for c, h in wanted if c in scope.costs and h in scope.hops]
