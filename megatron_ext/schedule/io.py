"""Schedule files: JSON (``megatron-ext-schedule/1``), and the CSV of torch.distributed.pipelining.

The CSV has one row a rank and one cell an action: stage, letter, microbatch, as in ``0F0``. F is a
forward pass, I an input-gradient backward (here B), W a weight-gradient one, B a whole backward
(here BW), ``(0F3;7B1)OVERLAP_F_B`` a joint action; an empty cell is idle. Torch's loader is
``PipelineScheduleMulti._load_csv`` (seen in torch 2.15); there column t of all rows is one time
step, at the end of which neighbours exchange. The form keeps no costs and no name.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._input import fraction, only_known, parse_json, read_text, shown, whole
from .actions import Action, AnyAction, Joint, Op, parse
from .costs import Costs, Durations
from .link import Link
from .placement import Placement
from .schedule import FILE_FORMAT, Arrangement, Schedule, ScheduleError
from .simulate import run_times
from .units import check_slices, units_of
from .vocabulary import BARRIERS

_LETTERS = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}
_OPS = {letter: op for op, letter in _LETTERS.items()}
_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)
_JOINT = re.compile(r"\((\d{1,9}F\d{1,9});(\d{1,9}[IB]\d{1,9})\)OVERLAP_F_B", re.ASCII)
_OTHER = re.compile(r"\d+[A-Z_]{2,}\d*|\(.*\).*")  # what torch's other forms hold
_EXPECTED = "expected stage, F, I, W or B, microbatch, e.g. 0F0, or nothing for idle"
_LONGEST_NAME = 200
_FIELDS = (
    *("format", "name", "pp", "chunks", "microbatches", "placement", "cost", "offload"),
    *("vocabulary_barriers", "slices", "joined", "microbatch_order", "saved_by_order", "ranks"),
)


def is_csv(path: str | Path) -> bool:
    """True if a schedule file is in torch.distributed.pipelining's form, by its suffix."""
    return Path(path).suffix.lower() == ".csv"


def save(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule file, one rank's list a line, so that a diff can be read.

    A path that ends in ``.csv`` gets torch's form: no costs, no transfers.

    Raises:
        ScheduleError: the path ends in ``.csv`` and the schedule has no such form.
    """
    if is_csv(path):
        Path(path).write_text(to_csv(schedule), encoding="utf-8")
        return
    body = schedule.to_json()
    ranks = ",\n  ".join(json.dumps(row) for row in body.pop("ranks"))
    head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in body.items())
    Path(path).write_text(f'{{{head},\n "ranks": [\n  {ranks}\n ]}}\n')


def load(path: str | Path) -> Schedule:
    """Read a schedule file; one that ends in ``.csv`` in torch's form.

    Raises:
        ScheduleError: it cannot be read, is not JSON or CSV, or is not a schedule.
    """
    try:
        # -sig: spreadsheets begin what they save with a byte order mark.
        text = read_text(path, "utf-8-sig")
    except OSError as error:
        raise ScheduleError(f"cannot read schedule file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"schedule file {path} is not text: {error}") from None
    except ValueError as error:
        raise ScheduleError(f"schedule file {path}: {error}") from None
    return read(text, path, csv_form=is_csv(path))


def read(text: str, path: str | Path, *, csv_form: bool = False) -> Schedule:
    """The schedule in a file's text; ``csv_form``: in torch's form.

    Raises:
        ScheduleError: as ``load``; the text names ``path``.
    """
    try:
        return from_csv(text) if csv_form else from_json(parse_json(text))
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    except ValueError as error:
        raise ScheduleError(f"schedule file {path} is not JSON: {error}") from None


def from_json(data: Any) -> Schedule:
    """Reverse of ``Schedule.to_json``. The order may be one that cannot run: see ``check``.

    Raises:
        ScheduleError: a field is missing, of the wrong kind, or contradicts another.
    """
    if not isinstance(data, dict) or data.get("format") != FILE_FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(f'expected "format": "{FILE_FORMAT}", found {shown(found)}')
    missing = [k for k in ("pp", "chunks", "microbatches", "placement", "ranks") if k not in data]
    if missing:
        raise ScheduleError(f"schedule file lacks {', '.join(missing)}")
    try:
        only_known(data, _FIELDS, "a schedule file")
        placement = Placement(
            [[whole(s, "a stage") for s in row] for row in _lists(data, "placement")]
        )
        microbatches = whole(data["microbatches"], "microbatches", 1)
        slices = _slices(data.get("slices", 1), microbatches)
        units = {str(unit): unit for unit in units_of(slices)} if slices else None
        joined = data.get("joined", False)
        if joined not in (True, False) or (joined and not slices):
            raise ValueError(f'"joined" must be true or false, and is for slices, got {joined!r}')
        ranks = tuple(tuple(parse(a, units) for a in row) for row in _lists(data, "ranks"))
        costs = Costs.from_json(data.get("cost", {}))
        barriers = whole(data.get("vocabulary_barriers", 0), "vocabulary_barriers", 0)
        sizes = [whole(data[key], key, 1) for key in ("pp", "chunks")]
        name = _name(data.get("name", "file"))
        arrangement = _arrangement(data, microbatches)
        offload = data.get("offload")
        link = None if offload is None else Link.from_json(offload, placement)
    except (TypeError, ValueError, AttributeError) as error:
        raise ScheduleError(f"schedule file: {error}") from None
    if [placement.pp, placement.chunks] != sizes:
        raise ScheduleError(
            f"placement is for pp={placement.pp}, chunks={placement.chunks} but the file says "
            f"pp={sizes[0]}, chunks={sizes[1]}"
        )
    if len(ranks) != placement.pp:
        raise ScheduleError(f"{len(ranks)} action lists for pp={placement.pp}; give one a rank")
    if barriers > max(BARRIERS):
        raise ScheduleError(f"vocabulary_barriers must be 1 or 2, got {barriers}")
    return Schedule(
        *(name, placement, microbatches, ranks, costs),
        link=link,
        barriers=barriers,
        slices=slices,
        joined=joined,
        arrangement=arrangement,
    )


def _slices(value: object, microbatches: int) -> tuple[int, ...]:
    """Of each microbatch; empty where none is cut."""
    if isinstance(value, list):
        return check_slices([whole(count, '"slices"', 1) for count in value], microbatches)
    return check_slices(whole(value, '"slices"', 1), microbatches)


def _arrangement(data: dict[str, Any], microbatches: int) -> Arrangement | None:
    order, saved = data.get("microbatch_order"), data.get("saved_by_order")
    if order is None:
        return None
    if not isinstance(order, list) or sorted(order) != list(range(microbatches)):
        raise ValueError(
            f'"microbatch_order" must have every number from 0 to {microbatches - 1} once, got '
            f"{shown(order)}"
        )
    return Arrangement(tuple(order), None if saved is None else fraction(saved))


def _lists(data: dict[str, Any], key: str) -> list[list[Any]]:
    rows = data[key]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f'"{key}" must be a list of lists, one a rank, got {shown(rows)}')
    return rows


def _name(value: object) -> str:
    """A name is printed and drawn, so it must not do anything to a terminal or a log."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME or not value.isprintable():
        raise ValueError(
            f'"name" must be printable text of at most {_LONGEST_NAME} characters, got '
            f"{shown(value)}"
        )
    return value


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
    schedule.require_whole("torch's CSV compute form")
    if schedule.barriers:
        raise ScheduleError("torch's CSV compute form has no vocabulary passes; write a .json")
    n = schedule.placement.num_stages
    # Every pass one column; a BW is a B and a W, so where both are used it has two.
    ones = (1,) * n
    start, end = run_times(
        schedule, Durations(ones, ones, (int(schedule.splits_backward),) * n, 0, 1)
    )
    width = max((row[-1] for row in end if row), default=0)
    lines = []
    for row, columns in zip(schedule.ranks, start):
        cells = [""] * width
        for action, column in zip(row, columns):
            parts = [f"{part.stage}{_LETTERS[part.op]}{part.microbatch}" for part in action.parts]  # type: ignore[index]
            cells[column] = parts[0] if len(parts) == 1 else f"({';'.join(parts)})OVERLAP_F_B"
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def from_csv(text: str) -> Schedule:
    """Reverse of ``to_csv``; any CSV of torch's compute form will do.

    Ranks, chunks, placement and microbatches follow from the cells. The order may be one that
    cannot run: see ``check``.

    Raises:
        ScheduleError: a cell is no compute action, or the stages do not fit together; rows and
            columns are counted from 1.
    """
    rows: list[list[AnyAction]] = []
    owner: dict[int, int] = {}
    seen: dict[Action, tuple[int, int]] = {}
    for number, row in enumerate(_cells(text), 1):
        rows.append([])
        for column, cell in enumerate(row, 1):
            if not cell.strip():
                continue
            where = f"row {number}, column {column}, cell {shown(cell.strip())}"
            action = _action(cell.strip(), where)
            rows[-1].append(action)
            for part in action.parts:
                if owner.setdefault(part.stage, number) != number:
                    raise ScheduleError(
                        f"{where}: stage {part.stage} is also in row {owner[part.stage]}, but a "
                        "stage lies on one rank, which is one row"
                    )
                if part in seen:
                    first = "row {}, column {}".format(*seen[part])
                    raise ScheduleError(f"{where}: the same pass stands in {first} already")
                seen[part] = number, column
    if not seen:
        raise ScheduleError(f"the file holds no action; {_EXPECTED}")
    microbatches = 1 + max(action.microbatch for action in seen)
    ranks = tuple(tuple(row) for row in rows)
    return Schedule("file", _placement(owner, len(rows)), microbatches, ranks)


def _cells(text: str) -> Iterator[list[str]]:
    """Cells row by row, without empty lines at the end."""
    try:
        yield from csv.reader(text.rstrip().splitlines())
    except csv.Error as error:
        raise ScheduleError(f"not CSV: {error}") from None


def _action(cell: str, where: str) -> AnyAction:
    if _CELL.fullmatch(cell):
        return _pass(cell)
    joint = _JOINT.fullmatch(cell)
    if joint is not None:
        return Joint(_pass(joint[1]), _pass(joint[2]))
    if _OTHER.fullmatch(cell):
        raise ScheduleError(
            f"{where}: only compute actions can be imported, and overlapped pairs as "
            f"(0F3;7B1)OVERLAP_F_B; {_EXPECTED}"
        )
    raise ScheduleError(f"{where}: {_EXPECTED}")


def _pass(cell: str) -> Action:
    match = _CELL.fullmatch(cell)
    assert match is not None
    return Action(_OPS[match[2]], int(match[1]), int(match[3]))


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
