"""``--overlap-moe-expert-parallel-comm``, an option of Megatron's, with our schedules.

A forward and a backward pass that the schedule has as a pair run layer by layer in one another, so
that the all-to-all of one is hidden behind the computation of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....plan.overlap import CONFLICTS, FLAG
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Conflict, Feature, Run, require_no_conflict

DELAY = "--delay-wgrad-compute"


class Overlap(Feature):
    """On with Megatron's flag."""

    conflicts = CONFLICTS

    def check(self, run: Run) -> None:
        args, request = run.args, run.request
        if request is None:
            return
        if not wanted(args):
            _refuse_delay(args, run.library)
            return
        require_no_conflict(args, self.conflicts, {"": FLAG})
        if run.library:
            _refuse_delay(args, True)
            return  # the rest is in the model's configuration
        _require(args)
        if args.delay_wgrad_compute:
            if not request.splits_backward:
                raise ConfigError(
                    f"--pp-schedule {request.name} has no passes for weight gradients; drop "
                    f"{DELAY}, or use a schedule that has, e.g. zb-h1"
                )
            args.delay_wgrad_compute = False
            run.notices.append(f"megatron_ext: {DELAY}: the schedule's W passes do it")

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not (run.library or wanted(run.args)):
            return ()
        from .run import PairedPasses

        return (PairedPasses(),)


def wanted(args: MegatronArgs) -> bool:
    """True if Megatron's flag is given."""
    return bool(getattr(args, "overlap_moe_expert_parallel_comm", False))


def _refuse_delay(args: MegatronArgs, library: bool) -> None:
    what = "the model's layers would delay weight gradients themselves" if library else ""
    conflict = Conflict(
        DELAY, f"{what or 'the schedule itself delays weight gradients'}, to where they fill gaps"
    )
    require_no_conflict(args, (conflict,), {"": "--pp-schedule"})


def _require(args: MegatronArgs) -> None:
    """Raise for what Megatron asserts of its own schedule, before it does."""
    experts, ranks = args.num_experts, args.expert_model_parallel_size
    facts: Mapping[str, bool] = {
        f"experts, but --num-experts is {experts}": bool(experts),
        f"experts on several ranks, but --expert-model-parallel-size is {ranks}": ranks > 1,
        "16-bit parameters; add --bf16 or --fp16": bool(
            getattr(args, "bf16", False) or getattr(args, "fp16", False)
        ),
        f"one layer for multi-token prediction at most, but --mtp-num-layers is "
        f"{args.mtp_num_layers}": (args.mtp_num_layers or 0) <= 1,
    }
    for need, holds in facts.items():
        if not holds:
            raise ConfigError(f"{FLAG} needs {need}")
