"""Generators: from a name, a pipeline size and a number of microbatches to a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..costs import Costs
from ..placement import Placement
from ..schedule import Schedule
from .forward import forward_only
from .plain import Orders, interleaved, one_f_one_b, zb_h1
from .vee import v_half, v_zb

__all__ = ["GENERATORS", "NAMES", "Generator", "forward_only", "generate"]


@dataclass(frozen=True)
class Generator:
    """One named schedule.

    Attributes:
        orders: (pp, microbatches, chunks) -> every rank's compute actions.
        placement: ``loop`` (stage = chunk * pp + rank) or ``vee`` (see ``Placement``).
        default_chunks: chunks per rank if none are asked for.
        any_chunks: any number >= ``default_chunks`` is possible, not just that one.
        split_backward: uses B and W, so the runtime must be able to delay weight gradients.
        description: one line for people.
    """

    orders: Callable[[int, int, int], Orders]
    placement: Literal["loop", "vee"]
    default_chunks: int
    any_chunks: bool
    split_backward: bool
    description: str


GENERATORS: dict[str, Generator] = {
    "1f1b": Generator(
        one_f_one_b, "loop", 1, False, False, "one forward, one backward; Megatron's default"
    ),
    "interleaved": Generator(
        interleaved, "loop", 2, True, False, "1F1B over several chunks a rank; more memory"
    ),
    "zb-h1": Generator(
        zb_h1, "loop", 1, False, True, "split backward at 1F1B's memory; a third of its bubble"
    ),
    "v-half": Generator(
        v_half, "vee", 2, False, True, "split backward, V placement: about half of 1F1B's memory"
    ),
    "v-zb": Generator(
        v_zb, "vee", 2, False, True, "split backward, V placement: 1F1B's memory, least bubble"
    ),
}

NAMES: tuple[str, ...] = tuple(GENERATORS)

_EQUAL = Costs()


def generate(
    name: str, pp: int, microbatches: int, chunks: int | None = None, costs: Costs = _EQUAL
) -> Schedule:
    """The schedule ``name`` for one pipeline and number of microbatches.

    Args:
        name: one of ``NAMES``.
        pp: pipeline ranks, >= 2.
        microbatches: of one iteration, >= 1.
        chunks: model chunks per rank; default what the schedule uses.
        costs: kept in the schedule, for simulation and lowering. The orders are made for equal
            costs: they do not depend on them.

    Returns:
        Compute actions only; see ``lower`` for transfers.

    Raises:
        ValueError: unknown name, or numbers the schedule does not exist for.
    """
    generator = GENERATORS.get(name)
    if generator is None:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(NAMES)}")
    if pp < 2:
        raise ValueError(f"{name} needs at least 2 pipeline ranks, got pp={pp}")
    if microbatches < 1:
        raise ValueError(f"{name} needs at least 1 microbatch, got {microbatches}")
    chunks = generator.default_chunks if chunks is None else chunks
    _check_chunks(name, generator, chunks)
    vee = generator.placement == "vee"
    placement = Placement.vee(pp) if vee else Placement.loop(pp, chunks)
    costs.durations(placement)  # per-stage costs must fit the number of stages
    ranks = generator.orders(pp, microbatches, chunks)
    return Schedule(name, placement, microbatches, tuple(tuple(row) for row in ranks), costs)


def _check_chunks(name: str, generator: Generator, chunks: int) -> None:
    least = generator.default_chunks
    if generator.any_chunks and chunks < least:
        fix = "use 1f1b for one chunk" if chunks == 1 else f"give chunks={least} or more"
        raise ValueError(f"{name} needs at least {least} chunks per rank, got {chunks}; {fix}")
    if not generator.any_chunks and chunks != least:
        plural = "" if least == 1 else "s"
        raise ValueError(
            f"{name} has exactly {least} chunk{plural} per rank, got {chunks}; "
            f"give chunks={least} or leave it out"
        )
