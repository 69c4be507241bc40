"""V placement: rank r holds stages r and 2p-1-r, whatever Megatron derives from its rank."""

from __future__ import annotations

from collections.abc import Sequence

from ...callbacks import Callback
from ...feature import Feature, Run


class VPlacement(Feature):
    """On for schedules with V placement."""

    def start(self, run: Run) -> Sequence[Callback]:
        if run.schedule is None or not run.schedule.vee:
            return ()
        from .vee import VeeCallback

        return (VeeCallback(run.training),)
