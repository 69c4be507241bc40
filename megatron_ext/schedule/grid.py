"""Plain-text pictures of a fault in a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .actions import AnyAction

_AROUND = 3  # ranks and positions shown on each side of a fault


def around(ranks: Sequence[Sequence[AnyAction]], rank: int, position: int) -> str:
    """The ranks x positions grid around one action; that action stands in brackets.

    Args:
        ranks: every rank's actions, in order.
        rank: row of the fault.
        position: index into ``ranks[rank]``; the list's length marks a missing last action.
    """
    first = max(0, position - _AROUND)
    rows = range(max(0, rank - _AROUND), min(len(ranks), rank + _AROUND + 1))
    end = max(position + 1, *(len(ranks[r]) for r in rows))
    columns = range(first, min(end, position + _AROUND + 1))
    lines = [["position", *(str(c) for c in columns)]]
    for r in rows:
        cells = [str(ranks[r][c]) if c < len(ranks[r]) else "" for c in columns]
        if r == rank:
            cells[position - first] = f"[{cells[position - first] or 'end'}]"
        lines.append([f"rank {r}", *cells])
    texts = _align(lines)
    texts[1 + rank - rows.start] += "  <-- here"
    return "\n".join(texts)


def stuck(
    ranks: Sequence[Sequence[AnyAction]], positions: Sequence[int], reasons: Iterable[str]
) -> str:
    """Every rank's last actions, the blocked one in brackets, and those that follow.

    Args:
        ranks: every rank's actions, in order.
        positions: index of the action each rank cannot execute; its list's length if it is done.
        reasons: one text a rank, why it is blocked.
    """
    lines = []
    for rank, (row, at) in enumerate(zip(ranks, positions)):
        cells = [str(row[c]) if 0 <= c < len(row) else "" for c in range(at - 2, at + 3)]
        cells[2] = f"[{cells[2] or 'done'}]"
        lines.append([f"rank {rank}", *cells])
    return "\n".join(f"{text}  <-- {why}" for text, why in zip(_align(lines), reasons))


def wait_cycle(waits_for: Sequence[int | None]) -> list[int]:
    """Ranks that wait for each other in a circle, in that order; else the last of a chain.

    Args:
        waits_for: per rank, the rank it waits for, itself included; None if it has finished.
    """
    path: list[int] = []
    rank: int | None = next(r for r, other in enumerate(waits_for) if other is not None)
    while rank is not None and waits_for[rank] is not None:
        if rank in path:
            return path[path.index(rank) :]
        path.append(rank)
        rank = waits_for[rank]
    return path[-1:]


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    texts = []
    for head, *cells in lines:
        row = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths[1:]))
        texts.append(f"{head.ljust(widths[0])} | {row}".rstrip())
    return texts
