"""The schedule object: an ordered list of actions for every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from . import grid
from .actions import Action, AnyAction, Op
from .costs import Costs, number_to_json
from .effects import passes, peak_host_sets, peak_sets
from .link import Link
from .placement import Placement
from .units import UnitCosts, even_costs, integers, joined, units_of
from .vocabulary import E, Vocabulary

FILE_FORMAT = "megatron-ext-schedule/1"


class ScheduleError(ValueError):
    """A schedule, or a schedule file, that cannot be executed; the text says where and why."""


def whole_only(what: str, name: str, units: int, microbatches: int) -> ScheduleError:
    """The error where ``what`` does not know slices and costs of single microbatches."""
    return ScheduleError(
        f"{what} takes whole microbatches of equal costs, but {name} has {units} units of "
        f"{microbatches} microbatches; leave slices and costs of single microbatches out"
    )


class Arrangement(NamedTuple):
    """Microbatches that were free to run in another order than given.

    Attributes:
        order: the given number of the microbatch in every place.
        saved: share of the time that the step takes in the given order; None: that does not keep
            the cap.
    """

    order: tuple[int, ...]
    saved: Fraction | None

    def __str__(self) -> str:
        if list(self.order) == sorted(self.order):
            return "as given; no other order of them is faster"
        gain = (
            ""
            if self.saved is None
            else f", {float(100 * self.saved):.3g} % less time than as given"
        )
        return f"in the order {' '.join(map(str, self.order))}{gain}"


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
        link: transfer times of offloaded sets; None if there are none.
        barriers: 1 if the vocabulary is sharded over all ranks (``vocabulary``), else 0.
        slices: that each microbatch is cut into (``units``); empty: none is.
        joined: all slices of a microbatch have one W, named after the first slice, whose B is the
            last.
        arrangement: of its microbatches, whose numbers are places; None: they run as given.
    """

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[AnyAction, ...], ...]
    costs: Costs = field(default_factory=Costs)
    note: str = ""
    link: Link | None = None
    barriers: int = 0
    slices: tuple[int, ...] = ()
    joined: bool = False
    arrangement: Arrangement | None = None

    @cached_property
    def units(self) -> Sequence[int]:
        """What stands in the place of the microbatch in actions, by its number."""
        return units_of(self.slices) if self.slices else range(self.microbatches)

    @property
    def has_units(self) -> bool:
        """True if microbatches are cut into slices, or differ in their costs."""
        return bool(self.slices) or self.costs.units is not None

    def unit_costs(self, costs: Costs | None = None) -> tuple[Sequence[UnitCosts], int]:
        """What every unit takes of a whole microbatch, as integers, and the whole.

        Args:
            costs: default its own.

        Raises:
            ValueError: the costs are for another number of units.
        """
        shares = (self.costs if costs is None else costs).units
        counts = self.slices or (1,) * self.microbatches
        if shares is not None and len(shares) != len(self.units):
            raise ValueError(
                f"costs are given for {len(shares)} units, but {self.microbatches} microbatches "
                f"have {len(self.units)}; give one row F,B,W,size per unit"
            )
        found, whole = even_costs(counts) if shares is None else integers(shares)
        return joined(found, counts) if self.joined else found, whole

    def peak_activation(self) -> list[Fraction]:
        """Most that each rank holds at once, in whole microbatches; depends on the order only.

        0 everywhere if no rank has a backward action: a forward-only schedule keeps no sets.
        """
        if not self.has_units:
            return [Fraction(sets, self.chunks) for sets in peak_sets(self.ranks)]
        costs, whole = self.unit_costs()
        held = peak_sets(self.ranks, costs)
        return [Fraction(sizes, whole * self.chunks) for sizes in held]

    def peak_host_activation(self) -> list[Fraction]:
        """Most that each rank has on the host at once, in whole microbatches."""
        costs, whole = self.unit_costs()
        held = peak_host_sets(self.ranks, costs)
        return [Fraction(sizes, whole * self.chunks) for sizes in held]

    def peak_sets(self) -> list[int]:
        """Most sets of each rank, one a unit and chunk; 0 everywhere as ``peak_activation``."""
        every = [UnitCosts()] * len(self.units)
        return peak_sets(self.ranks, joined(every, self.slices) if self.joined else None)

    def require_whole(self, what: str) -> None:
        """Refuse slices and costs of single microbatches where ``what`` does not know them.

        Raises:
            ScheduleError: it has some.
        """
        if self.has_units:
            raise whole_only(what, self.name, len(self.units), self.microbatches)

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
        """True if the lists hold more than compute and offload actions."""
        return any(not (a.is_compute or a.is_copy) for row in self.ranks for a in row)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """What its vocabulary passes wait for; None: the vocabulary is not sharded."""
        if not self.barriers:
            return None
        embeddings = any(a.op is E for row in self.ranks for a in passes(row))
        return Vocabulary(self.placement, embeddings, not self.is_forward_only)

    @cached_property
    def is_forward_only(self) -> bool:
        """True if no rank has a backward pass, as in evaluation."""
        backward = (Op.B, Op.W, Op.BW)
        return not any(action.op in backward for row in self.ranks for action in passes(row))

    @property
    def has_offload(self) -> bool:
        """True if the lists hold offload actions."""
        return any(action.is_copy for row in self.ranks for action in row)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some weight gradients have passes of their own. Looked up every iteration."""
        return any(action.op is Op.W for row in self.ranks for action in passes(row))

    @cached_property
    def has_pairs(self) -> bool:
        """True if a forward and a backward pass run in one another somewhere."""
        return any(len(action.parts) > 1 for row in self.ranks for action in row)

    def compute(self) -> Schedule:
        """This schedule with its compute actions only."""
        rows = [[a for a in row if a.is_compute] for row in self.ranks]
        return replace(self.with_ranks(rows), link=None)

    def unlowered(self) -> Schedule:
        """This schedule with its compute and offload actions only."""
        return self.with_ranks([[a for a in r if a.is_compute or a.is_copy] for r in self.ranks])

    def with_ranks(self, ranks: Sequence[Sequence[AnyAction]]) -> Schedule:
        """The same schedule with other lists of actions."""
        return replace(self, ranks=tuple(tuple(row) for row in ranks))

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, position on the rank, action), rank by rank; joint actions as their passes."""
        for rank, row in enumerate(self.ranks):
            for position, action in enumerate(row):
                if type(action) is Action:
                    yield rank, position, action
                else:
                    for part in action.parts:
                        yield rank, position, part

    def fault(self, rank: int, position: int, text: str) -> ScheduleError:
        """An error at one place, with a picture of it."""
        picture = grid.around(self.ranks, rank, position)
        return ScheduleError(f"rank {rank}, position {position}: {text}\n{picture}")

    def fingerprint(self) -> str:
        """Hex digest over placement, microbatches and all actions: equal plans, equal digest."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        body = self.to_json()
        del body["cost"], body["name"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The content of a schedule file (see ``io``).

        ``offload``, the host links, is there if sets are offloaded.
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
            **({"vocabulary_barriers": self.barriers} if self.barriers else {}),
            **({"slices": self.slices_json} if self.slices else {}),
            **({"joined": True} if self.joined else {}),
            **self.arrangement_json,
            "ranks": [[str(action) for action in row] for row in self.ranks],
        }

    @property
    def arrangement_json(self) -> dict[str, Any]:
        """``microbatch_order`` and ``saved_by_order``, where the order was free."""
        if self.arrangement is None:
            return {}
        order, saved = self.arrangement
        share = None if saved is None else number_to_json(saved)
        return {"microbatch_order": list(order), "saved_by_order": share}

    @property
    def slices_json(self) -> int | list[int]:
        """Of every microbatch, if they are equal, else of each."""
        return self.slices[0] if len(set(self.slices)) == 1 else list(self.slices)
