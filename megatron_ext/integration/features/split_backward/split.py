"""The model of a run prepared for B and W passes, and one log line of what they split."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ....runtime.wgrad import WeightGradStore
from ...callbacks import Callback, Step
from ...hooks import Hook
from ...utils import gather
from . import local
from . import te as wgrad_te
from .report import WgradReport, wgrad_report

logger = logging.getLogger(__name__)


class Splitter(Callback):
    """Puts the hooks in place that belong to a model's modules, beside those in Megatron.

    Attributes:
        report: of this rank's chunks; None before the first iteration.
    """

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store
        self._attached: list[wgrad_te.SplitStore] = []
        self._prepared: list[Any] = []
        self.report: WgradReport | None = None

    def hooks(self) -> Sequence[Hook]:
        return local.hooks(self._store)

    def begin(self, step: Step) -> None:
        if step.plan.splits_backward:
            self._prepare(step)
        step.notes["wgrad"] = lambda: None if self.report is None else self.report.as_dict()

    def close(self) -> None:
        while self._attached:
            self._attached.pop().detach()
        self._prepared = []

    def _prepare(self, step: Step) -> None:
        """Hook the models, once; global rank 0 logs how much is split."""
        models = step.call.iteration.models
        if [id(model) for model in models] == [id(model) for model in self._prepared]:
            return
        self._prepared = list(models)
        for model in models:
            self._attached += wgrad_te.attach(model, self._store)
        first = self.report is None
        self.report = wgrad_report(models, self._store.fused_experts())
        if first:
            every: list[WgradReport] = gather(self.report, step.call.group)
            if dist.get_rank() == 0:
                total = sum(every, WgradReport())
                logger.warning("megatron_ext: %s", total.text(step.plan.name))
