"""``--pp-profile-steps``: times of passes, messages and activation bytes, measured in training."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from ....plan.defaults import precision, recompute
from ....plan.model import PlanError
from ....plan.profile import Profile
from ....runtime.trace import Recorder
from ....schedule.placement import Placement
from ....schedule.schedule import Schedule
from ...callbacks import Callback, Step
from ...feature import Feature, Flag, Run
from ...measuring import hop_seconds, host_rates, pass_seconds
from ...rules import FREE_ORDER, Rule
from ...utils import file_contents, unwrapped
from .measured import SetSizes, agree, durations

logger = logging.getLogger(__name__)

ONE_SOURCE = Rule(
    "{flag} does not support --pp-cost {cost}",
    "both give pass times",
    "keep one, or measure again with --pp-profile-steps",
)
READ = Rule(
    "--pp-profile {path} needs measurements of such a run, which are read without "
    "--pp-profile-steps",
    "{error}",
    "give another file, or measure again",
)
NO_PROFILE = Rule(
    "--pp-profile {path} needs a new file or a profile to overwrite",
    "this one is none ({error})",
    "give another name",
)
WRITABLE = Rule(
    "--pp-profile {path} needs a folder to be written to after {steps} steps",
    "{folder} is none that this user may write in",
    "make it, or give another name",
)


class ProfileSteps(Feature):
    """``--pp-profile-steps`` and ``--pp-profile``."""

    per_model = True
    rules = (FREE_ORDER, ONE_SOURCE, READ, NO_PROFILE, WRITABLE)

    flags = (
        Flag(
            "--pp-profile-steps",
            "measure F, B, W of every stage and the hop for N steps, then plan again for them, "
            "if the new order is faster",
            "N",
            int,
            least=1,
        ),
        Flag(
            "--pp-profile",
            "with --pp-profile-steps: write the measurements to FILE, for `megatron-ext plan "
            "--profile` and later runs; without: plan with the measurements of a former run, from "
            "the first step on",
            "FILE",
            compared=lambda value, args: (
                value if args.pp_profile_steps is not None else file_contents(value)
            ),
            not_in_library="it is compared with Megatron's arguments; measure again with "
            "--pp-profile-steps, or give --pp-cost",
            not_in_library_as=("FILE", lambda value, args: args.pp_profile_steps is None),
        ),
    )

    def check_flags(self, run: Run) -> None:
        steps, path = run.args.pp_profile_steps, run.args.pp_profile
        if run.request is None or (steps is None and path is None):
            return
        flag = f"--pp-profile-steps {steps}" if steps is not None else f"--pp-profile {path}"
        FREE_ORDER.require(run.request.file is None, flag=flag, schedule=run.request.name)
        if steps is not None and path is not None:
            _require_writable(path, steps, run.args.rank)
        elif path is not None:
            ONE_SOURCE.require(run.args.pp_cost is None, flag=flag, cost=run.args.pp_cost)

    def check(self, run: Run) -> None:
        args, path = run.args, run.args.pp_profile
        if run.request is None or path is None or args.pp_profile_steps is not None:
            return
        given = {**vars(args), "cheap_recompute": bool(args.pp_cheap_recompute)}
        try:
            run.profile = Profile.load(path)
            run.profile.require(SimpleNamespace(**given | precision(given) | recompute(given)))
        except PlanError as error:
            raise READ.broken(path=path, error=error) from None

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None:
            return ()
        assert run.store is not None
        args, self._inputs, self._store = run.args, run.inputs, run.store
        self._left: int = args.pp_profile_steps or 0
        self._inputs.reorder = self._left > 0
        self._path = args.pp_profile if self._left else None
        self._cheap = bool(args.pp_cheap_recompute)
        self._recorders: list[tuple[Recorder, Placement]] = []
        self._sizes: SetSizes | None = None
        return (self,)

    # --- an iteration; the device is waited for once, when all measured ones are over ---

    def times(self, training: bool) -> bool:
        return training and self._left > 0

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
        if not self.times(step.training):
            return
        self._recorders.append((step.recorder, step.plan.placement))
        self._left -= 1
        if self._left == 0:
            self._finish(step)

    def _finish(self, step: Step) -> None:
        """Take the times and sizes of the measured steps into the plans of those that follow."""
        group, channel, call = step.call.group, step.channel, step.call
        found = durations(self._recorders)
        self._recorders = []
        rates = step.note("host_rates")
        if self._path is not None and rates is None:
            rates = host_rates(channel.device, call.groups)
        counted = ({}, {}) if self._sizes is None else (self._sizes.until_b, self._sizes.until_w)
        profile = self._inputs.profile = agree(
            step.plan.placement,
            step.rank,
            pass_seconds(found),
            hop_seconds(channel, group) if self._inputs.reorder else 0.0,
            [unwrapped(model) for model in call.iteration.models],
            call.batch,
            call.groups,
            set_bytes=(step.note("set_bytes") or counted[0], counted[1]),
            rates=rates,
            cheap_recompute=self._cheap,
        )
        self._inputs.changed = True
        self._save(profile)
        for callback in step.callbacks:
            callback.profiled(step, found)

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


def _require_writable(path: str, steps: int, rank: int) -> None:
    target = Path(path)
    if target.exists():
        try:
            Profile.load(path)
        except PlanError as error:
            raise NO_PROFILE.broken(path=path, error=error) from None
    folder = target.absolute().parent
    kept = rank != 0 or (folder.is_dir() and os.access(folder, os.W_OK))
    WRITABLE.require(kept, path=path, steps=steps, folder=folder)
