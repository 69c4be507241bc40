"""Prepares a run's model for B and W passes, and says once what they split."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....runtime.wgrad import WeightGradStore
from ...utils import gather
from . import te as wgrad_te
from .report import WgradReport, wgrad_report

logger = logging.getLogger(__name__)


class Splitter:
    """Puts the per-module hooks in place, which need a model; the others are hooks.

    Attributes:
        report: of this rank's chunks; None before ``prepare``, so for schedules without W.
    """

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store
        self._attached: list[wgrad_te.SplitStore] = []
        self._prepared: list[Any] = []
        self._said = False
        self.report: WgradReport | None = None

    def prepare(self, models: Sequence[torch.nn.Module], group: Any, schedule: str) -> None:
        """Hook ``models``, once, and let global rank 0 log how much is split.

        All ranks of ``group``, the pipeline's, must call this together.
        """
        if len(models) == len(self._prepared) and all(
            new is old for new, old in zip(models, self._prepared)
        ):
            return
        self._prepared = list(models)
        for model in models:
            self._attached += wgrad_te.attach(model, self._store)
        self.report = wgrad_report(models, self._store.fused_experts())
        if self._said:
            return
        self._said = True
        every: list[WgradReport] = gather(self.report, group)
        if dist.get_rank() == 0:
            logger.warning("megatron_ext: %s", sum(every, WgradReport()).text(schedule))

    def summary(self) -> dict[str, Any] | None:
        """For the trace file: how this rank's parameters divide."""
        return None if self.report is None else self.report.as_dict()

    def release(self) -> None:
        """Give the modules their own stores back."""
        while self._attached:
            self._attached.pop().detach()
        self._prepared = []
