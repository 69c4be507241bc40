"""B and W as two passes: linear layers leave their weight gradients to the store."""

from __future__ import annotations

from collections.abc import Sequence

from ...callbacks import Callback
from ...feature import Feature, Run


class SplitBackward(Feature):
    """On for schedules with W passes."""

    def check_model(self, run: Run) -> None:
        if run.request is not None and run.request.splits_backward:
            from ...gradients import require_gradient_hooks

            require_gradient_hooks(run.models)

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.request.splits_backward:
            return ()
        from .split import Splitter

        assert run.store is not None
        return (Splitter(run.store),)
