"""V placement: rank r holds stages r and 2p-1-r, whatever Megatron derives from its rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...callbacks import Callback
from ...feature import Feature, Run


class VPlacement(Feature):
    """On for schedules with V placement."""

    def check_model(self, run: Run) -> None:
        if run.request is not None and run.request.vee:
            from .vee import require_embedding_ranks

            require_embedding_ranks(run.request.name)

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.request.vee:
            return ()
        from .tied import TiedCopies
        from .vee import VeeCallback

        training = run.training or "megatron.training" in sys.modules
        return (VeeCallback(training, run.request.name), TiedCopies())
