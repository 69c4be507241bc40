"""Measured passes of all ranks of a call, as one profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....plan.profile import MODEL, Profile
from ....plan.times import PassTimes
from ....runtime.trace import Recorder
from ....schedule.actions import Action, Op
from ....schedule.placement import Placement
from ...callbacks import Duration
from ...measuring import Seconds
from ...utils import gather_over


def durations(recorders: Iterable[tuple[Recorder, Placement]]) -> list[Duration]:
    """All passes of these iterations; waits for the device. Joint actions, whose passes have no
    times of their own, do not count."""
    return [
        (placement.chunk_of(action.stage), action.op, action.microbatch, seconds)
        for recorder, placement in recorders
        for action, seconds in recorder.durations()
        if isinstance(action, Action) and isinstance(action.op, Op)
    ]


def agree(
    placement: Placement,
    rank: int,
    seconds: Seconds,
    hop: float,
    models: Sequence[Any],
    shape: tuple[int, int],
    groups: Sequence[Any],
    *,
    set_bytes: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
    rates: tuple[float, float] | None = None,
    cheap_recompute: bool = False,
) -> Profile:
    """The measurements of all stages; all ranks of a call do this together.

    Args:
        hop: seconds of a message between neighbours.
        models: this rank's chunks, without wrappers.
        shape: sequence length and microbatch size.
        groups: of the call.
        set_bytes: of this rank's sets, by chunk, until B and until W, as far as they are known.
        rates: to this rank's host and back, in bytes/s.
        cheap_recompute: the run has ``--pp-cheap-recompute``.

    Returns:
        The same on all ranks: of ranks that hold the same stage, the slowest and largest.
    """
    until_b, until_w = set_bytes
    mine = {
        stage: (
            [seconds.get((chunk, op), 0.0) for op in (Op.F, Op.B, Op.W)],
            len(getattr(getattr(models[chunk], "decoder", None), "layers", ())),
            until_b.get(chunk),
            until_w.get(chunk),
        )
        for chunk, stage in enumerate(placement.stages[rank])
    }
    every = gather_over((mine, hop, rates), groups)
    stages = range(placement.num_stages)
    found = [[part[stage] for part, _, _ in every if stage in part] for stage in stages]
    config, (length, size) = models[0].config, shape
    about = {name: getattr(config, name, None) for name in MODEL}
    about["seq_length"] = length
    known = [r for _, _, r in every if r is not None]
    return Profile(
        micro_batch_size=size,
        layers=tuple(rows[0][1] for rows in found),
        stages=tuple(
            PassTimes(*(max(1e-9, *column) for column in zip(*(row[0] for row in rows))))
            for rows in found
        ),
        cheap_recompute=cheap_recompute,
        set_bytes=_largest(found, 2),
        weight_set_bytes=_largest(found, 3),
        hop=max(h for _, h, _ in every),
        to_host=min(r[0] for r in known) if known else None,
        to_device=min(r[1] for r in known) if known else None,
        model={name: value for name, value in about.items() if value is not None},
    )


def _largest(found: Sequence[Sequence[Sequence[Any]]], column: int) -> tuple[int, ...] | None:
    """Of every stage the largest number that its ranks have; None if a stage has none."""
    sizes = [[row[column] for row in rows if row[column] is not None] for rows in found]
    return tuple(map(max, sizes)) if all(sizes) else None
