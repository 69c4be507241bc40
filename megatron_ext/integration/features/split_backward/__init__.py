"""B and W as two passes: linear layers leave their weight gradients to the store."""

from __future__ import annotations

from collections.abc import Sequence

from ...callbacks import Callback
from ...feature import Feature, Run


class SplitBackward(Feature):
    """On for schedules with W passes."""

    def start(self, run: Run) -> Sequence[Callback]:
        if run.schedule is None or not run.schedule.splits_backward:
            return ()
        from .split import Splitter

        assert run.store is not None
        return (Splitter(run.store),)
