"""``--pp-profile-steps``: times of passes, messages and activation bytes, measured in training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from ....plan.model import PlanError
from ....plan.profile import Profile
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Flag, Run
from ...utils import file_contents
from .profiler import Profiler


class ProfileSteps(Feature):
    """``--pp-profile-steps`` and ``--pp-profile``."""

    per_model = True

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
        if run.request.file is not None:
            flag = f"--pp-profile-steps {steps}" if steps is not None else f"--pp-profile {path}"
            raise ConfigError(
                f"--pp-schedule {run.request.name}: a file's order is fixed; drop {flag}"
            )
        if steps is not None and path is not None:
            _require_writable(path, steps, run.args.rank)
        elif path is not None and run.args.pp_cost is not None:
            raise ConfigError(
                f"--pp-cost {run.args.pp_cost} and --pp-profile {path} both give pass times; keep "
                "one, or measure again with --pp-profile-steps"
            )

    def check(self, run: Run) -> None:
        args, path = run.args, run.args.pp_profile
        if run.request is None or path is None or args.pp_profile_steps is not None:
            return
        own = SimpleNamespace(**vars(args), cheap_recompute=bool(args.pp_cheap_recompute))
        try:
            run.profile = Profile.load(path)
            run.profile.require(own)
        except PlanError as error:
            raise ConfigError(
                f"--pp-profile {path}: {error} (without --pp-profile-steps it is read)"
            ) from None

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None:
            return ()
        args = run.args
        steps = args.pp_profile_steps or 0
        assert run.store is not None
        path = args.pp_profile if steps else None
        return (Profiler(run.inputs, run.store, steps, path, bool(args.pp_cheap_recompute)),)


def _require_writable(path: str, steps: int, rank: int) -> None:
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
    if rank == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"--pp-profile {path} cannot be written after {steps} steps: {folder} is no folder "
            "that this user may write in; make it, or give another name"
        )
