"""Plain-text pictures of the place where a schedule is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .actions import Action

_AROUND = 3  # ranks and positions shown on each side of a fault


def around(ranks: Sequence[Sequence[Action]], rank: int, position: int) -> str:
    """The ranks x positions grid around one action; that action stands in brackets.

    Args:
        ranks: every rank's actions, in order.
        rank: row of the fault.
        position: index into ``ranks[rank]``; the list's length marks a missing last action.
    """
    first = max(0, position - _AROUND)
    columns = range(first, position + _AROUND + 1)
    rows = range(max(0, rank - _AROUND), min(len(ranks), rank + _AROUND + 1))
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
    ranks: Sequence[Sequence[Action]], positions: Sequence[int], reasons: Iterable[str]
) -> str:
    """Where every rank stands: what it did last, the blocked action in brackets, what follows.

    Args:
        ranks: every rank's actions, in order.
        positions: index of the action each rank cannot execute; its list's length if it is done.
        reasons: one text a rank, what it waits for.
    """
    lines = []
    for rank, (row, at) in enumerate(zip(ranks, positions)):
        cells = [str(row[c]) if 0 <= c < len(row) else "" for c in range(at - 2, at + 3)]
        cells[2] = f"[{cells[2] or 'done'}]"
        lines.append([f"rank {rank}", *cells])
    return "\n".join(f"{text}  <-- {why}" for text, why in zip(_align(lines), reasons))


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    return [
        " | ".join(
            [row[0].ljust(widths[0]), "  ".join(c.ljust(w) for c, w in zip(row[1:], widths[1:]))]
        )
        for row in lines
    ]
