"""``--overlap-moe-expert-parallel-comm``, an option of Megatron's, with our schedules.

A forward and a backward pass that the schedule has as a pair run layer by layer in one another, so
that the all-to-all of one is hidden behind the computation of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....plan.overlap import CONFLICTS, FLAG, unmet
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Run, require_no_conflict

DELAY = "--delay-wgrad-compute"


class Overlap(Feature):
    """On with Megatron's flag."""

    conflicts = CONFLICTS

    def check(self, run: Run) -> None:
        if run.request is not None and not run.library:
            _check(run)

    def check_model(self, run: Run) -> None:
        _check(run)
        assert run.request is not None
        run.request = replace(run.request, overlap=wanted(run.args))

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not (run.library or wanted(run.args)):
            return ()
        from .run import PairedPasses

        return (PairedPasses(),)


def wanted(args: MegatronArgs) -> bool:
    """True if Megatron's flag is given."""
    return bool(getattr(args, "overlap_moe_expert_parallel_comm", False))


def _check(run: Run) -> None:
    args, request = run.args, run.request
    assert request is not None
    delays = bool(getattr(args, "delay_wgrad_compute", False))
    if wanted(args):
        require_no_conflict(args, Overlap.conflicts, {"": FLAG})
        _require(args)
    elif delays:
        raise ConfigError(
            f"--pp-schedule {request.name} does not support {DELAY} without {FLAG}: the schedule "
            "itself delays weight gradients, to where they fill gaps; drop it"
        )
    if not delays:
        return
    if run.library:
        raise ConfigError(
            f"{DELAY}: the model's layers delay weight gradients already, and the schedule does "
            "that itself; build the model without it"
        )
    if not request.splits_backward:
        raise ConfigError(
            f"--pp-schedule {request.name} has no passes for weight gradients; drop {DELAY}, or "
            "use a schedule that has, e.g. zb-h1"
        )
    args.delay_wgrad_compute = False
    run.notices.append(f"{DELAY}: the schedule's W passes do it")


def _require(args: MegatronArgs) -> None:
    """Raise for what Megatron asserts of its own schedule, before it does."""
    half = bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))
    depths = args.mtp_num_layers or 0
    need = unmet(args.num_experts, args.expert_model_parallel_size, depths, half)
    if need is not None:
        raise ConfigError(f"{FLAG} needs {need}")
