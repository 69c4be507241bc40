"""The profiler: collects the times of the first steps and agrees on them over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ....plan.profile import MODEL, Profile
from ....plan.times import PassTimes
from ....runtime.trace import Recorder
from ....runtime.wgrad import WeightGradStore
from ....schedule.actions import Action, Op
from ....schedule.placement import Placement
from ....schedule.schedule import Schedule
from ...callbacks import Callback, Duration, PlanInputs, Step
from ...measuring import Seconds, hop_seconds, host_rates, pass_seconds
from ...utils import gather_over, unwrapped
from .set_sizes import SetSizes

logger = logging.getLogger(__name__)


class Profiler(Callback):
    """Measures the first training steps; the device is waited for once, when they are over.

    Args:
        inputs: of plans; gets the profile.
        steps: how many steps the user wants measured; 0: none.
        path: of the file for the profile, or None.
        cheap_recompute: the run has ``--pp-cheap-recompute``.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        store: WeightGradStore,
        steps: int = 0,
        path: str | None = None,
        cheap_recompute: bool = False,
    ) -> None:
        self._inputs, self._store = inputs, store
        inputs.reorder = steps > 0
        self._path, self._cheap = path, cheap_recompute
        self._left = steps
        self._recorders: list[tuple[Recorder, Placement]] = []
        self._sizes: SetSizes | None = None

    # --- events ---

    def times(self, training: bool) -> bool:
        return training and self._left > 0

    def holds_next(self) -> bool:
        return self._left > 0

    def before_plan(self, step: Step) -> None:
        if step.training:
            self._left = max(self._left, self._inputs.steps_to_measure)
            self._inputs.steps_to_measure = 0

    def planned(self, plan: Schedule) -> None:
        replanned = self._inputs.reorder and self._inputs.profile is not None
        if replanned and plan.note and dist.get_rank() == 0:  # a quick order has no note
            logger.info("%s", plan.note)

    def begin(self, step: Step) -> None:
        if self.times(step.training) and self._inputs.reorder and self._sizes is None:
            models = [unwrapped(model) for model in step.call.iteration.models]
            step.observer = self._sizes = SetSizes(models, self._store)

    def end(self, step: Step) -> None:
        if self.times(step.training) and self.add(step.recorder, step.plan.placement):
            self._finish(step)

    def _finish(self, step: Step) -> None:
        """Take the times and sizes of the measured steps into the plans of those that follow."""
        group, channel, durations = step.call.group, step.channel, self.take()
        rates = step.note("host_rates")
        if self._path is not None and rates is None:
            rates = host_rates(channel.device, step.call.groups)
        profile = self._inputs.profile = self.agree(
            step.plan.placement,
            step.rank,
            pass_seconds(durations),
            hop_seconds(channel, group) if self._inputs.reorder else 0.0,
            [unwrapped(model) for model in step.call.iteration.models],
            step.call.batch,
            step.call.groups,
            step.note("set_bytes"),
            rates,
        )
        self._inputs.changed = True
        self._save(profile)
        for callback in step.callbacks:
            callback.profiled(step, durations)

    # --- measuring ---

    def add(self, recorder: Recorder, placement: Placement) -> bool:
        """Take a step's passes; True if it was the last one."""
        self._recorders.append((recorder, placement))
        self._left -= 1
        return self._left == 0

    def take(self) -> list[Duration]:
        """All passes, once; waits for the device. Joint actions, whose passes have no times of
        their own, do not count."""
        recorders, self._recorders = self._recorders, []
        return [
            (placement.chunk_of(action.stage), action.op, action.microbatch, seconds)
            for recorder, placement in recorders
            for action, seconds in recorder.durations()
            if isinstance(action, Action) and isinstance(action.op, Op)
        ]

    def agree(
        self,
        placement: Placement,
        rank: int,
        seconds: Seconds,
        hop: float,
        models: Sequence[Any],
        shape: tuple[int, int],
        groups: Sequence[Any],
        set_bytes: Mapping[int, int] | None = None,
        rates: tuple[float, float] | None = None,
    ) -> Profile:
        """The measurements of all stages; all ranks of a call do this together.

        Args:
            hop: seconds of a message between neighbours.
            models: this rank's chunks, without wrappers.
            shape: sequence length and microbatch size.
            groups: of the call.
            set_bytes: of this rank's sets, by chunk, if the offload engine counted them.
            rates: to this rank's host and back, in bytes/s.

        Returns:
            The same on all ranks: of ranks that hold the same stage, the slowest and largest.
        """
        counted = ({}, {}) if self._sizes is None else (self._sizes.until_b, self._sizes.until_w)
        until_b, until_w = set_bytes or counted[0], counted[1]
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
            cheap_recompute=self._cheap,
            set_bytes=_largest(found, 2),
            weight_set_bytes=_largest(found, 3),
            hop=max(h for _, h, _ in every),
            to_host=min(r[0] for r in known) if known else None,
            to_device=min(r[1] for r in known) if known else None,
            model={name: value for name, value in about.items() if value is not None},
        )

    def _save(self, profile: Profile) -> None:
        """Write the file, on the first rank of the job, if one was asked for."""
        if self._path is None or dist.get_rank() != 0:
            return
        try:
            profile.save(self._path)
        except OSError as error:
            # Hours of training are worth more than the file.
            logger.warning("--pp-profile %s cannot be written: %s", self._path, error.strerror)
            return
        logger.info("the measured profile is in %s", self._path)


def _largest(found: Sequence[Sequence[Sequence[Any]]], column: int) -> tuple[int, ...] | None:
    """Of every stage the largest number that its ranks have; None if a stage has none."""
    sizes = [[row[column] for row in rows if row[column] is not None] for rows in found]
    return tuple(map(max, sizes)) if all(sizes) else None
