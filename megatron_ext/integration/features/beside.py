"""Ends what is searched for beside training when the run is over."""

from __future__ import annotations

from collections.abc import Sequence

from ..callbacks import Callback
from ..feature import Feature, Run
from ..plans import Plans


class SearchBeside(Feature):
    """On with every schedule of ours (``later``)."""

    per_model = True

    def start(self, run: Run) -> Sequence[Callback]:
        return () if run.pipeline is None else (_End(run.pipeline.plans),)


class _End(Callback):
    """Closes the plans."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans

    def close(self) -> None:
        self._plans.close()
