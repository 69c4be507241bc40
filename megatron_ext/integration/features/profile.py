"""``--pp-profile-steps``: times of passes, messages and activation bytes, measured in training."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ...plan.model import PlanError
from ...plan.profile import MODEL, Profile
from ...plan.times import PassTimes
from ...runtime.trace import Recorder
from ...runtime.wgrad import WeightGradStore
from ...schedule.actions import Op
from ...schedule.placement import Placement
from ...schedule.schedule import Schedule
from ..arguments import MegatronArgs
from ..callbacks import Callback, Duration, PlanInputs, Step
from ..errors import ConfigError
from ..feature import Feature, Flag, Run
from ..measuring import Seconds, hop_seconds, host_rates, pass_seconds
from ..utils import file_contents, gather, unwrapped

logger = logging.getLogger(__name__)

# Of this rank, by chunk: bytes of a set from F to B, and from B to W.
Sizes = tuple[Mapping[int, int], Mapping[int, int]]


class ProfileSteps(Feature):
    """``--pp-profile-steps`` and ``--pp-profile``."""

    flags = (
        Flag(
            "--pp-profile-steps",
            "measure F, B, W of every stage and the hop for N steps, then make the order anew for "
            "them, if that is faster",
            "N",
            int,
        ),
        Flag(
            "--pp-profile",
            "with --pp-profile-steps: write there what was measured, for `megatron-ext plan "
            "--profile` and later runs; without: plan with what a former run wrote, from the first "
            "step on",
            "FILE",
            compared=lambda value, args: (
                value if args.pp_profile_steps is not None else file_contents(value)
            ),
        ),
    )

    def check(self, run: Run) -> None:
        if run.schedule is not None:
            run.profile = former_profile(run.args, run.schedule.file is not None)

    def start(self, run: Run) -> Sequence[Callback]:
        if run.schedule is None:
            return ()
        args = run.args
        steps = args.pp_profile_steps or 0
        assert run.store is not None
        path = args.pp_profile if steps else None
        return (Profiler(run.inputs, run.store, steps, path, bool(args.pp_cheap_recompute)),)


def former_profile(args: MegatronArgs, fixed: bool) -> Profile | None:
    """Check the profile's flags, and read a former run's profile if this one is not to measure.

    Args:
        args: Megatron's.
        fixed: the schedule is a file, whose order cannot change.

    Raises:
        ConfigError: flags that contradict each other, or a profile of another model.
    """
    steps, path = args.pp_profile_steps, args.pp_profile
    if steps is not None and steps < 1:
        raise ConfigError(
            f"--pp-profile-steps must be 1 or more, got {steps}; drop it to keep the order"
        )
    flag = f"--pp-profile-steps {steps}" if steps is not None else f"--pp-profile {path}"
    if fixed and (steps is not None or path is not None):
        raise ConfigError(f"--pp-schedule {args.pp_schedule}: a file's order is fixed; drop {flag}")
    if path is None:
        return None
    if steps is None:
        if args.pp_cost is not None:
            raise ConfigError(
                f"--pp-cost {args.pp_cost} and --pp-profile {path} both say what passes take; give "
                "one, or measure anew with --pp-profile-steps"
            )
        own = SimpleNamespace(**vars(args), cheap_recompute=bool(args.pp_cheap_recompute))
        try:
            profile = Profile.load(path)
            profile.require(own)
        except PlanError as error:
            raise ConfigError(
                f"--pp-profile {path}: {error} (without --pp-profile-steps it is read)"
            ) from None
        return profile
    target = Path(path)
    if target.exists():
        try:
            Profile.load(path)
        except PlanError as error:
            raise ConfigError(
                f"--pp-profile {path} would be overwritten, but it is no profile ({error}); give "
                "another name"
            ) from None
    folder = target.absolute().parent
    if args.rank == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"--pp-profile {path} cannot be written after {steps} steps: {folder} is no folder "
            "that this user may write in; make it, or give another name"
        )
    return None


class Profiler(Callback):
    """Measures the first training steps; the device is waited for once, when they are over.

    Args:
        inputs: of plans; gets the profile.
        store: of delayed weight gradients.
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
        if self._inputs.reorder and self._inputs.profile is not None and dist.get_rank() == 0:
            logger.warning("megatron_ext: %s", plan.note)

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
            rates = host_rates(channel.device, group)
        profile = self._inputs.profile = self.agree(
            step.plan.placement,
            step.rank,
            pass_seconds(durations),
            hop_seconds(channel, group) if self._inputs.reorder else 0.0,
            [unwrapped(model) for model in step.call.iteration.models],
            step.call.batch,
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
        """All passes, once; waits for the device."""
        recorders, self._recorders = self._recorders, []
        return [
            (placement.chunk_of(action.stage), action.op, action.microbatch, seconds)
            for recorder, placement in recorders
            for action, seconds in recorder.durations()
        ]

    def agree(
        self,
        placement: Placement,
        rank: int,
        seconds: Seconds,
        hop: float,
        models: Sequence[Any],
        shape: tuple[int, int],
        set_bytes: Mapping[int, int] | None = None,
        rates: tuple[float, float] | None = None,
    ) -> Profile:
        """The measurements of all stages; all ranks of the job call this together.

        Args:
            placement: of the stages.
            rank: this one's, in the pipeline.
            seconds: of this rank's passes.
            hop: seconds of a message between neighbours.
            models: this rank's chunks, without wrappers.
            shape: sequence length and microbatch size.
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
        every = gather((mine, hop, rates))
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
            logger.warning(
                "megatron_ext: --pp-profile %s cannot be written: %s", self._path, error.strerror
            )
            return
        logger.warning("megatron_ext: the measured profile is in %s", self._path)


def _largest(found: Sequence[Sequence[Sequence[Any]]], column: int) -> tuple[int, ...] | None:
    """Of every stage the largest number that its ranks have; None if a stage has none."""
    sizes = [[row[column] for row in rows if row[column] is not None] for rows in found]
    return tuple(map(max, sizes)) if all(sizes) else None


class SetSizes:
    """Counts what the first microbatch's set of each chunk keeps alive, in bytes.

    Storages count once and whole, those of parameters and buffers not at all.

    Args:
        models: of this rank, by chunk.
        store: of postponed weight gradients.

    Attributes:
        until_b: by chunk, what autograd keeps from F on; not there if it cannot be known.
        until_w: by chunk, what the store keeps from B on; not there if it cannot be known.
    """

    def __init__(self, models: Sequence[torch.nn.Module], store: WeightGradStore) -> None:
        self._own = {
            tensor.untyped_storage().data_ptr()
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
        }
        self._store = store
        self.until_b: dict[int, int] = {}
        self.until_w: dict[int, int] = {}

    def forward(self, chunk: int, microbatch: int, output: torch.Tensor) -> None:
        """After F; ``output`` still has its history."""
        if microbatch != 0:
            return
        # A graph that will not be looked into is no reason to end training.
        with contextlib.suppress(RuntimeError):
            self.until_b[chunk] = self._bytes(_saved(output))

    def postponed(self, chunk: int, microbatch: int) -> None:
        """Between B and W."""
        tensors = self._store.tensors((chunk, microbatch)) if microbatch == 0 else None
        if tensors is not None:
            self.until_w[chunk] = self._bytes(tensors)

    def _bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        sizes: dict[int, int] = {}
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # has parts (quantised), no storage
                sizes[id(tensor)] = tensor.nbytes
        return sum(size for pointer, size in sizes.items() if pointer not in self._own)


def _saved(output: torch.Tensor) -> list[torch.Tensor]:
    """What the graph behind ``output`` keeps for backward.

    Not by hooks on what autograd saves: with them a weight comes back as another tensor, and its
    gradient would go there.
    """
    found: list[torch.Tensor] = []
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                value = getattr(node, name)
                values = value if isinstance(value, list | tuple) else [value]
                found += [x for x in values if isinstance(x, torch.Tensor)]
    return found
