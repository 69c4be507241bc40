"""``--pp-microbatch-costs lengths``: every step is planned for the lengths of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from ...._conflict import Conflict
from ....schedule.select import IN_PAIRS
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Flag, Needs, Run, require_no_conflict
from .read import FLAG

LENGTHS = "lengths"
_EQUAL = "its plan is one for equal microbatches; drop one of them"
_OFFLOAD = "which sets leave is decided for all steps; drop one of them"
_COUNTED = "it counts microbatches as they come; drop it, or --pp-reorder-microbatches"
_CAPTURED = "a captured pass has one place in one order; drop it"


class Lengths(Feature):
    """On with ``--pp-microbatch-costs lengths``."""

    flags = (
        Flag(
            FLAG,
            "equal (default), or lengths: read the lengths of a training step's microbatches ahead "
            "on the first stage, send them to all stages, and run an order for them; for data of "
            "varying length, and packed documents",
            choices=("equal", LENGTHS),
            idle="equal",
        ),
        Flag(
            "--pp-reorder-microbatches",
            f"with {FLAG} {LENGTHS}: let the microbatches of a step run in another order, short "
            "ones at both ends; losses come back in the order given",
            switch=True,
            needs=Needs({FLAG: (LENGTHS,)}, f"{FLAG} {LENGTHS}"),
        ),
    )
    conflicts = (
        Conflict("--pp-offload", _OFFLOAD),
        Conflict("--pp-offload-chunks", _OFFLOAD),
        Conflict("--pp-vocab-parallel", _EQUAL),
        Conflict("--pp-slice-weights", "every slice of a step's own order has its W; drop one of "
                 "them", values=("joined",)),
        Conflict("--pp-post-validation", "it begins a step before its data is known; drop one of "
                 "them"),
        Conflict("--pp-profile-steps", "it measures equal microbatches; measure in a run of its "
                 "own, and give --pp-profile"),
        Conflict("--overlap-moe-expert-parallel-comm", "pairs take equal microbatches; drop one of "
                 "them"),
        Conflict("--cuda-graph-impl", _CAPTURED),
        Conflict("--enable-cuda-graph", _CAPTURED),
        Conflict("--external-cuda-graph", _CAPTURED),
        Conflict("--logits-save-dir", _COUNTED, beside="--pp-reorder-microbatches"),
        Conflict("--logits-load-dir", _COUNTED, beside="--pp-reorder-microbatches"),
    )  # fmt: skip
    per_model = True

    def check_flags(self, run: Run) -> None:
        if not wanted(run.args) or run.request is None:
            return
        if run.request.file is not None or run.request.name in IN_PAIRS:
            why = "the order in it is fixed" if run.request.file else "its passes run in pairs"
            raise ConfigError(
                f"{FLAG} {LENGTHS} makes orders for single steps, but --pp-schedule "
                f"{run.request.name} cannot: {why}; use e.g. v-zb, or drop it"
            )

    def check(self, run: Run) -> None:
        if wanted(run.args) and run.request is not None:
            require_no_conflict(run.args, self.conflicts, {"": f"{FLAG} {LENGTHS}"})

    def start(self, run: Run) -> Sequence[Callback]:
        if not wanted(run.args) or run.pipeline is None:
            return ()
        from .run import StepLengths

        return (StepLengths(run),)


def wanted(args: MegatronArgs) -> bool:
    """True if steps are planned for their lengths."""
    return args.pp_microbatch_costs == LENGTHS
