"""Block files: a building block of a user's own, in a few lines of JSON.

    {"format": "megatron-ext-block/1", "placement": [[0, 3], [1, 2]], "interval": 6,
     "offsets": {"F": [0, 1, 2, 3], "B": [7, 6, 5, 4], "W": [8, 9, 10, 5]}}

``placement`` lists the stages of every rank. Offsets are by stage, in passes of one chunk: F, and
B and W or in place of both BW, which takes 2. With ``group`` microbatches every ``interval``, they
run ``step`` apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._input import parse_json, read_text, shown, whole
from .actions import Op
from .generators.building_block import Block
from .placement import Placement

BLOCK_FORMAT = "megatron-ext-block/1"
_MOST_BYTES = 1 << 20
_LATEST = 10**6  # offset and interval
_MOST_PARTS = 4096  # stages times microbatches of a group
_NEEDED = ("format", "placement", "interval", "offsets")
_FIELDS = (*_NEEDED, "group", "step", "report")  # report: of show --json, not read


def load_block(path: str | Path) -> Block:
    """Read a block file.

    Raises:
        ValueError: it cannot be read, is no block, or its offsets cannot be executed.
    """
    try:
        text = read_text(path, "utf-8-sig", _MOST_BYTES)
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        return block_from_json(data)
    except OSError as error:
        raise ValueError(f"cannot read block file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"block file {path}: {error}") from None


def block_from_json(data: Any) -> Block:
    """The block of a file's content.

    Raises:
        ValueError: a field is missing, unknown or of the wrong kind, or the offsets cannot be
            executed as they are.
    """
    if not isinstance(data, dict) or data.get("format") != BLOCK_FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f'expected "format": "{BLOCK_FORMAT}", found {shown(found)}')
    for wrong, what in ((set(data) - set(_FIELDS), "unknown"), (set(_NEEDED) - set(data), "no")):
        if wrong:
            raise ValueError(f"{what} field {shown(min(wrong))}; fields are {', '.join(_FIELDS)}")
    rows = data["placement"]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f'"placement" must list the stages of every rank, got {shown(rows)}')
    placement = Placement([[whole(s, "a stage", 0, _MOST_PARTS) for s in row] for row in rows])
    group = whole(data.get("group", 1), '"group"', 1, _MOST_PARTS // placement.num_stages or 1)
    interval = whole(data["interval"], '"interval"', 1, _LATEST)
    least, most = (1, (interval - 1) // (group - 1)) if group > 1 else (0, 0)
    step = whole(data.get("step", 0), '"step" within a group', least, most)
    block = Block(placement, interval, _offsets(data["offsets"], placement), group, step)
    block.validate()
    return block


def _offsets(data: Any, placement: Placement) -> dict[tuple[Op, int], int]:
    if not isinstance(data, dict) or set(data) not in ({"F", "B", "W"}, {"F", "BW"}):
        raise ValueError(f'"offsets" must be of F, B and W, or of F and BW; got {shown(data)}')
    for name, row in data.items():
        if not isinstance(row, list) or len(row) != placement.num_stages:
            raise ValueError(
                f'"{name}" must list {placement.num_stages} offsets, one a stage, got {shown(row)}'
            )
    return {
        (Op(name), stage): whole(at, f"{name} of stage {stage}", 0, _LATEST)
        for name, row in data.items()
        for stage, at in enumerate(row)
    }


def block_to_json(block: Block) -> dict[str, Any]:
    """Reverse of ``block_from_json``."""
    stages, ops = range(block.placement.num_stages), (Op.F, Op.B, Op.W, Op.BW)
    return {
        "format": BLOCK_FORMAT,
        "placement": [list(row) for row in block.placement.stages],
        "interval": block.interval,
        **({"group": block.group, "step": block.step} if block.group > 1 else {}),
        "offsets": {
            op.value: [block.offsets[op, s] for s in stages]
            for op in ops
            if (op, 0) in block.offsets
        },
    }
