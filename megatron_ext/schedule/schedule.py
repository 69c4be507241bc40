"""The schedule object: for every rank, an ordered list of actions, and its file format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .._input import parse_json, read_text, shown, whole
from . import grid
from .actions import ALL_VALIDATION_OPS, COMMUNICATION_OPS, OFFLOAD_OPS, VALIDATION_OPS, Action, Op
from .costs import Costs
from .link import Link
from .placement import Placement

_LOWERED = COMMUNICATION_OPS | VALIDATION_OPS  # added by ``lower``
FILE_FORMAT = "megatron-ext-schedule/1"


def is_csv(path: str | Path) -> bool:
    """True if a schedule file is in torch.distributed.pipelining's form, by its suffix."""
    return Path(path).suffix.lower() == ".csv"


class ScheduleError(ValueError):
    """A schedule, or a schedule file, that cannot be executed; the text says where and why."""


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order. One object is generated, checked, simulated and executed.

    Attributes:
        name: the generator's name, or ``file``.
        placement: stage <-> (rank, chunk).
        microbatches: m, the number of microbatches of one iteration.
        ranks: one tuple of actions per pipeline rank, in execution order.
        costs: what the order was made for; a file keeps them.
        note: why it is this one, where something was chosen (``auto``); else empty.
        link: how offloaded sets travel; None if none are.
    """

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    costs: Costs = field(default_factory=Costs)
    note: str = ""
    link: Link | None = None

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.pp

    @property
    def chunks(self) -> int:
        """Model chunks per rank."""
        return self.placement.chunks

    @property
    def is_lowered(self) -> bool:
        """True if the lists hold what ``lower`` adds."""
        return any(action.op in _LOWERED for row in self.ranks for action in row)

    @cached_property
    def is_validated(self) -> bool:
        """True if the lists hold optimizer post-validation."""
        return any(action.op in ALL_VALIDATION_OPS for row in self.ranks for action in row)

    @property
    def has_offload(self) -> bool:
        """True if the lists hold offload actions."""
        return any(action.op in OFFLOAD_OPS for row in self.ranks for action in row)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some weight gradients have passes of their own. Looked up every iteration."""
        return any(action.op is Op.W for row in self.ranks for action in row)

    def compute(self) -> Schedule:
        """This schedule with its compute actions only."""
        rows = [[a for a in row if a.is_compute] for row in self.ranks]
        return replace(self.with_ranks(rows), link=None)

    def unlowered(self) -> Schedule:
        """This schedule without what ``lower`` adds: transfers and post-validation."""
        rows = [[a for a in row if a.op not in _LOWERED] for row in self.ranks]
        return self.with_ranks(rows)

    def with_ranks(self, ranks: Sequence[Sequence[Action]]) -> Schedule:
        """The same schedule with other lists of actions."""
        return replace(self, ranks=tuple(tuple(row) for row in ranks))

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, position on the rank, action), rank by rank."""
        for rank, row in enumerate(self.ranks):
            for position, action in enumerate(row):
                yield rank, position, action

    def fault(self, rank: int, position: int, text: str) -> ScheduleError:
        """What is wrong at one place, with a picture of it."""
        picture = grid.around(self.ranks, rank, position)
        return ScheduleError(f"rank {rank}, position {position}: {text}\n{picture}")

    def fingerprint(self) -> str:
        """Hex digest over placement, microbatches and all actions: equal plans, equal digest."""
        body = self.to_json()
        del body["cost"], body["name"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The file's content (design contract ``megatron-ext-schedule/1``).

        ``offload``, how sets travel, is there if some are offloaded.
        """
        return {
            "format": FILE_FORMAT,
            "name": self.name,
            "pp": self.pp,
            "chunks": self.chunks,
            "microbatches": self.microbatches,
            "placement": [list(row) for row in self.placement.stages],
            "cost": self.costs.to_json(),
            **({} if self.link is None else {"offload": self.link.to_json()}),
            "ranks": [[str(action) for action in row] for row in self.ranks],
        }

    def save(self, path: str | Path) -> None:
        """Write the schedule file, one rank's list a line, so that a diff can be read.

        A path that ends in ``.csv`` gets torch's form, see ``torch_csv``: no costs, no transfers.

        Raises:
            ScheduleError: the path ends in ``.csv`` and the schedule has no such form.
        """
        if is_csv(path):
            from .torch_csv import to_csv

            Path(path).write_text(to_csv(self), encoding="utf-8")
            return
        body = self.to_json()
        ranks = ",\n  ".join(json.dumps(row) for row in body.pop("ranks"))
        head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in body.items())
        Path(path).write_text(f'{{{head},\n "ranks": [\n  {ranks}\n ]}}\n')

    @classmethod
    def from_json(cls, data: Any) -> Schedule:
        """Reverse of ``to_json``. Says nothing on whether the order can run: see ``check``.

        Raises:
            ScheduleError: a field is missing, of the wrong kind, or contradicts another.
        """
        if not isinstance(data, dict) or data.get("format") != FILE_FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ScheduleError(f'expected "format": "{FILE_FORMAT}", found {shown(found)}')
        missing = [
            k for k in ("pp", "chunks", "microbatches", "placement", "ranks") if k not in data
        ]
        if missing:
            raise ScheduleError(f"schedule file lacks {', '.join(missing)}")
        try:
            placement = Placement(
                [[whole(s, "a stage") for s in row] for row in _rows(data, "placement")]
            )
            ranks = tuple(tuple(map(Action.parse, row)) for row in _rows(data, "ranks"))
            costs = Costs.from_json(data.get("cost", {}))
            microbatches = whole(data["microbatches"], "microbatches", 1)
            sizes = [whole(data[key], key, 1) for key in ("pp", "chunks")]
            name = _name(data.get("name", "file"))
            way = data.get("offload")
            link = None if way is None else Link.from_json(way, placement.pp)
        except (TypeError, ValueError, AttributeError) as error:
            raise ScheduleError(f"schedule file: {error}") from None
        if [placement.pp, placement.chunks] != sizes:
            raise ScheduleError(
                f"placement is for pp={placement.pp}, chunks={placement.chunks} but the file says "
                f"pp={sizes[0]}, chunks={sizes[1]}"
            )
        if len(ranks) != placement.pp:
            raise ScheduleError(f"{len(ranks)} action lists for pp={placement.pp}; give one a rank")
        return cls(name, placement, microbatches, ranks, costs, link=link)

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule file; one that ends in ``.csv`` in torch's form, see ``torch_csv``.

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
        try:
            if is_csv(path):
                from .torch_csv import from_csv

                return from_csv(text)
            data = parse_json(text)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None
        except ValueError as error:
            raise ScheduleError(f"schedule file {path} is not JSON: {error}") from None
        try:
            return cls.from_json(data)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None


def _rows(data: dict[str, Any], key: str) -> list[list[Any]]:
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


_LONGEST_NAME = 200
