"""Schedule files: JSON, ``megatron-ext-schedule/1``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._input import fraction, only_known, parse_json, read_text, shown, whole
from .actions import parse
from .costs import Costs
from .link import Link
from .placement import Placement
from .schedule import FILE_FORMAT, Arrangement, Schedule, ScheduleError
from .units import check_slices, units_of

_LONGEST_NAME = 200
_FIELDS = (
    *("format", "name", "pp", "chunks", "microbatches", "placement", "cost", "offload"),
    *("vocabulary_barriers", "slices", "joined", "microbatch_order", "saved_by_order", "ranks"),
)


def save(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule file, one rank's list a line, so that a diff can be read."""
    body = schedule.to_json()
    ranks = ",\n  ".join(json.dumps(row) for row in body.pop("ranks"))
    head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in body.items())
    Path(path).write_text(f'{{{head},\n "ranks": [\n  {ranks}\n ]}}\n')


def load(path: str | Path) -> Schedule:
    """Read a schedule file.

    Raises:
        ScheduleError: it cannot be read, is not JSON, or is not a schedule.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ScheduleError(f"cannot read schedule file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"schedule file {path} is not text: {error}") from None
    except ValueError as error:
        raise ScheduleError(f"schedule file {path}: {error}") from None
    return read(text, path)


def read(text: str, path: str | Path) -> Schedule:
    """The schedule in a file's text.

    Raises:
        ScheduleError: as ``load``; the text names ``path``.
    """
    try:
        return from_json(parse_json(text))
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
    if barriers > 1:
        raise ScheduleError(f"vocabulary_barriers must be 0 or 1, got {barriers}")
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
