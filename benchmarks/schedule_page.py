"""The page of benchmarks/schedules.py: claims, losses, the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Claim
from benchmarks.schedule_scope import ATTENTION, UNIT, Scope
from benchmarks.schedule_sweep import (
    V_FAMILY,
    Row,
    Setting,
    dominated,
    faster_rivals,
    from_json,
    losses,
)


def what(data: dict[str, Any]) -> str:
    """What was run."""
    torch = "with torch's own action lists" if data["torch"] else "without torch"
    return f"`{data['scope']}`, {torch}; the load matters to the generation times alone"


def body(data: dict[str, Any]) -> list[Any]:
    """The page."""
    rows = from_json(data["rows"])
    claims = [Claim(**claim) for claim in data["claims"]]
    failed = sum(claim.holds is False for claim in claims)
    checked = sum(claim.holds is not None for claim in claims)
    return [
        "Run it again, from the repository's root; only the comparison with torch needs "
        "anything installed:",
        [
            "    python3 -m benchmarks.schedules            # this page, its plots, results/",
            "    python3 -m benchmarks.schedules --resume   # go on where it was interrupted",
            "    python3 -m benchmarks.schedules --scope quick --output DIR   # under a minute",
            "    python3 -m benchmarks.schedules --times-again FILE   # only generation times",
        ],
        "Times are simulated, in units of F; nothing here was measured on a GPU. A pass of one "
        "of v chunks counts 1/v of its rank's, so what more and smaller passes cost in kernel "
        "launches and messages is not in here, and `interleaved` at v = 8 looks better than "
        "it will be. *Peak* is the worst rank's activation in microbatches, or as a share of "
        "1F1B's p.",
        f"## Claims: {checked - failed} of {checked} hold",
        *_claims(claims),
        "## Bubble against memory",
        *(f"![Bubble against memory]({plot})" for plot in data["plots"]),
        "## Losses",
        *_losses(rows, bool(data["torch"])),
        "## Where a rival is faster at no less memory than ours",
        *_faster(rows),
        "## Table",
        *_tables(rows),
    ]


def _claims(claims: Sequence[Claim]) -> Iterator[Any]:
    for group in dict.fromkeys(claim.group for claim in claims):
        yield f"**{group}**"
        yield pages.verdicts([claim for claim in claims if claim.group == group])


def _losses(rows: Sequence[Row], with_torch: bool) -> Iterator[Any]:
    def table(names: Sequence[str], winners: str) -> list[str]:
        columns: pages.Columns = {
            "loses": "`{loser}`",
            "settings lost": "{lost} of {settings}",
            "of them to one with no more memory": "{at_no_more_memory}",
            "worst": lambda one: f"{100 * one['worst']:.1f} % longer" if one["lost"] else "never",
            "there": "{where}",
            "memory of winner and loser": "{memory}",
        }
        return pages.table(columns, [losses(rows, name, winners) for name in names])

    yield (
        f"In how many of the {len({row.setting for row in rows})} settings some order of "
        "`interleaved` (Megatron's, whole backward passes; the best of v = 2, 3, 4, 8) has the "
        "shorter makespan than the V schedules. It buys that with more memory than 1F1B's, so none "
        "of these is a loss at equal memory; it is what the memory costs."
    )
    yield table(V_FAMILY, "interleaved v=")
    yield "And `interleaved-zb` (ours, loop placement, 1F1B's memory, v = 2 and 4):"
    yield table(V_FAMILY, "interleaved-zb")
    if with_torch:
        yield (
            "And the four orders of torch.distributed.pipelining, simulated under the same costs "
            "(an order is never made for costs there; DualPipeV's overlapped pairs run one after "
            "the other):"
        )
        yield table([*V_FAMILY, "interleaved-zb v=2", "zb-h1"], "torch")
    yield "Settings in which another row of the table is both faster and no larger:"
    found = sorted(dominated(rows).items(), key=lambda item: item[1][0] / item[1][1])
    cells = ((name, f"{count} of {total}") for name, (count, total) in found)
    yield pages.grid(("schedule", "dominated in"), cells)


def _faster(rows: Sequence[Row]) -> Iterator[Any]:
    """Every cell of the grid that is lost to a rival, worst first for each rival."""
    found, count = faster_rivals(rows)
    yield (
        "Rivals are stock Megatron's orders (`1f1b`, `interleaved`) and PyTorch's; against each, "
        "in each setting, stands the fastest of our other schedules that takes no more memory "
        f"than it. In {count - len(found)} of {count} comparisons ours is at least as fast"
        + ("; these are the others, all of them:" if found else ". There is no other.")
    )
    if found:
        yield pages.table(
            {
                "rival": lambda one: one[0].name,
                "p": lambda one: one[0].setting.pp,
                "m": lambda one: one[0].setting.microbatches,
                "costs": lambda one: ",".join(one[0].setting.cost),
                "hop": lambda one: one[0].setting.hop,
                "ours": lambda one: one[1].name if one[1] else "none takes as little",
                "ours is longer by": lambda one: f"{100 * one[2]:.2f} %" if one[1] else "",
                "memory of both": lambda one: ", ".join(
                    f"{row.memory:.2f}" for row in one[:2] if row
                ),
            },
            sorted(found, key=lambda one: (one[0].name, -one[2])),
        )


def _tables(rows: Sequence[Row]) -> Iterator[Any]:
    """Bubble and peak by schedule for two costs; the rest is in the JSON file."""
    yield "Bubble in percent by m, and the peak at the largest m. All costs and hops: JSON."
    for cost, hop in ((UNIT, "0"), (ATTENTION, "0.05")):
        here = [row for row in rows if row.setting.cost == cost and row.setting.hop == hop]
        for pp in sorted({row.setting.pp for row in here}):
            yield f"**p = {pp}, costs {','.join(cost)}, hop {hop}**"
            yield _table([row for row in here if row.setting.pp == pp])


def _table(rows: Sequence[Row]) -> list[str]:
    sizes = sorted({row.setting.microbatches for row in rows})
    by = {(row.name, row.setting.microbatches): row for row in rows}
    last = {row.name: row for row in sorted(rows, key=lambda row: row.setting.microbatches)}

    def bubble(m: int) -> Callable[[str], str]:
        return lambda name: f"{100 * by[name, m].bubble:.1f}" if (name, m) in by else ""

    columns: dict[str, Callable[[str], str]] = {
        "": str,
        **{f"m = {m}": bubble(m) for m in sizes},
        "peak": lambda name: f"{last[name].peak:g}",
        "of p": lambda name: f"{100 * last[name].memory:.0f} %",
    }
    return pages.table(columns, list(dict.fromkeys(row.name for row in rows)))


def plot_settings(scope: Scope) -> list[Setting]:
    """What is drawn: p = 8 or the next smaller one, m = 4p or the next smaller one."""
    p = max(p for p in scope.ranks if p <= 8)
    m = p * max(k for k in scope.factors if k <= 4)
    wanted = ((UNIT, "0"), (ATTENTION, "0.05"))
    return [Setting(p, m, c, h) for c, h in wanted if c in scope.costs and h in scope.hops]
