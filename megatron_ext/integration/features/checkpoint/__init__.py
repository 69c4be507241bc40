"""Checkpoints that any schedule loads, whatever schedule saved them."""

from __future__ import annotations

from collections.abc import Sequence

from ....checkpoints.layout import Layout
from ...callbacks import Callback
from ...feature import Feature, Run


class Checkpoint(Feature):
    """On for every schedule inside Megatron's training loop."""

    def check(self, run: Run) -> None:
        if run.request is not None and not run.library:
            from .hooks import choose_formats

            notice = choose_formats(run.args, run.request.name, run.request.vee)
            run.notices += [] if notice is None else [notice]

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.training:
            return ()
        from .hooks import Checkpoints

        return (Checkpoints(run.request.name, Layout.of(run.args)),)
