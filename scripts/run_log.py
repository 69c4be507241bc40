"""Files of a training run: the launcher's exact losses, Megatron's log, traces of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """A line of Megatron's log about one iteration ``of`` so many, and what it says by name."""

    iteration: int
    of: int
    values: dict[str, str]


_STEP = re.compile(r"iteration +(\d+)/ +(\d+)(.*?)(?= iteration +\d+/|$)")
_VALUE = re.compile(r"\| ([^|:]+?)(?: value)?: +([^ |]+)")


def values(line: str) -> dict[str, str]:
    """Every ``| name: value`` of a line of Megatron's log."""
    return dict(_VALUE.findall(line))


def steps(text: str) -> Iterator[Step]:
    """The iterations in a log.

    Ranks write to one log, so a line may be split by another's: only the order is relied on.
    """
    for found in _STEP.finditer(text.replace("\n", " ")):
        yield Step(int(found[1]), int(found[2]), values(found[3]))


def lm_losses(path: Path) -> dict[int, float]:
    """Iteration -> loss of the launcher's ``--loss-log``, without any rounding; empty if there is
    no such file."""
    entries = [json.loads(x) for x in path.read_text().splitlines()] if path.is_file() else []
    return {x["iteration"]: float.fromhex(x["losses"]["lm loss"]) for x in entries}


def peak_sets(folder: Path) -> list[int]:
    """Most activation sets that each rank held at once, as ``--pp-trace`` counted them."""
    found = []
    for path in sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem[4:])):
        trained = [json.loads(line) for line in path.read_text().splitlines()]
        found.append(max(x["peak_sets"] for x in trained if not x["forward_only"]))
    return found
