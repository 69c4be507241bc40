"""``--pp-microbatch-costs lengths``: every step is planned for the lengths of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from ....plan.lengths import CONFLICTS, FLAG, LENGTHS, wanted
from ....schedule.select import IN_PAIRS
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Flag, Needs, Run, require_no_conflict


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
    conflicts = CONFLICTS
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
