"""Import and export of torch.distributed.pipelining's CSV form of a schedule, compute only.

One row a rank, one cell an action: stage, letter, microbatch, as in ``0F0``. F is a forward pass,
I an input-gradient backward (here B), W a weight-gradient one, B a whole backward (here BW); an
empty cell is idle. Torch's loader is ``PipelineScheduleMulti._load_csv`` (seen in torch 2.15);
there column t of all rows is one time step, at the end of which neighbours exchange. The form keeps
no costs and no name.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from .._input import shown
from .actions import Action, Op
from .costs import Durations
from .placement import Placement
from .schedule import Schedule, ScheduleError
from .simulate import run_times

_LETTERS = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}
_OPS = {letter: op for op, letter in _LETTERS.items()}
_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)
_OTHER = re.compile(r"\d+[A-Z_]{2,}\d*|\(.*\).*")  # what torch's other forms hold
_EXPECTED = "expected stage, F, I, W or B, microbatch, e.g. 0F0, or nothing for idle"


def to_csv(schedule: Schedule) -> str:
    """The schedule in torch's form, one row a rank, all rows of equal length.

    Every action stands in the first column in which its inputs of earlier columns let it, which is
    what torch's step-by-step executor needs.

    Raises:
        ScheduleError: the schedule is lowered, or its order cannot progress.
    """
    if schedule.is_lowered or schedule.has_offload:
        raise ScheduleError(
            "torch's CSV compute form has no transfers or offloads, but the schedule is lowered; "
            "write its compute actions only"
        )
    n = schedule.placement.num_stages
    # Every action one column; a BW is a B and a W, so where both are used it has two.
    split = int(any(action.op is Op.W for row in schedule.ranks for action in row))
    steps = Durations((1,) * n, (1,) * n, (split,) * n, 0, 1)
    start, end = run_times(schedule, steps)
    width = max((row[-1] for row in end if row), default=0)
    lines = []
    for row, columns in zip(schedule.ranks, start):
        cells = [""] * width
        for action, column in zip(row, columns):
            cells[column] = f"{action.stage}{_LETTERS[action.op]}{action.microbatch}"
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def from_csv(text: str) -> Schedule:
    """Reverse of ``to_csv``; any CSV of torch's compute form will do.

    Ranks, chunks, placement and microbatches are what the cells say. Says nothing on whether the
    order can run: see ``check``.

    Raises:
        ScheduleError: a cell is no compute action, or the stages do not fit together; rows and
            columns are counted from 1.
    """
    rows: list[list[Action]] = []
    owner: dict[int, int] = {}
    seen: dict[Action, tuple[int, int]] = {}
    for number, row in enumerate(_rows(text), 1):
        rows.append([])
        for column, cell in enumerate(row, 1):
            if not cell.strip():
                continue
            where = f"row {number}, column {column}, cell {shown(cell.strip())}"
            action = _parse(cell.strip(), where)
            if owner.setdefault(action.stage, number) != number:
                raise ScheduleError(
                    f"{where}: stage {action.stage} is also in row {owner[action.stage]}, but a "
                    "stage lies on one rank, which is one row"
                )
            if action in seen:
                first = "row {}, column {}".format(*seen[action])
                raise ScheduleError(f"{where}: the same pass stands in {first} already")
            seen[action] = number, column
            rows[-1].append(action)
    if not seen:
        raise ScheduleError(f"the file holds no action; {_EXPECTED}")
    microbatches = 1 + max(action.microbatch for action in seen)
    ranks = tuple(tuple(row) for row in rows)
    return Schedule("file", _placement(owner, len(rows)), microbatches, ranks)


def _rows(text: str) -> Iterator[list[str]]:
    """Cells row by row, without empty lines at the end."""
    try:
        yield from csv.reader(text.rstrip().splitlines())
    except csv.Error as error:
        raise ScheduleError(f"not CSV: {error}") from None


def _parse(cell: str, where: str) -> Action:
    match = _CELL.fullmatch(cell)
    if match is not None:
        return Action(_OPS[match[2]], int(match[1]), int(match[3]))
    if _OTHER.fullmatch(cell):
        raise ScheduleError(
            f"{where}: only compute actions can be imported, and overlapped pairs only as two "
            f"cells; {_EXPECTED}"
        )
    raise ScheduleError(f"{where}: {_EXPECTED}")


def _placement(owner: dict[int, int], pp: int) -> Placement:
    """The placement in which ``owner[stage]`` is the row, from 1, of each stage."""
    gap = next((stage for stage in range(len(owner)) if stage not in owner), None)
    if gap is not None:
        raise ScheduleError(f"no row holds stage {gap}, but stages go up to {max(owner)}")
    held = [sorted(stage for stage, row in owner.items() if row == r) for r in range(1, pp + 1)]
    for number, stages in enumerate(held, 1):
        if len(stages) != len(held[0]):
            raise ScheduleError(
                f"row {number} holds {len(stages)} stages {shown(stages)}, but row 1 holds "
                f"{len(held[0])} {shown(held[0])}; every rank needs equally many"
            )
    return Placement(held)
