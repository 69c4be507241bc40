"""B and W as two passes: linear layers leave their weight gradients to the store."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ....runtime.weight_hooks import foreign_hooks
from ....runtime.wgrad import WeightGradStore
from ... import split_local as local
from ... import split_te as wgrad_te
from ...callbacks import Callback, Step
from ...feature import Feature, Run
from ...gradients import require_gradient_hooks
from ...hooks import Hook
from ...utils import LastModels, gather, unwrapped
from .report import WgradReport, wgrad_report

logger = logging.getLogger(__name__)

_LISTED = 8  # weights that a line of the log names


class SplitBackward(Feature):
    """On for schedules with W passes.

    It puts the hooks in place that belong to a model's modules, beside those in Megatron, and logs
    one line of what they split.

    Attributes:
        report: of this rank's chunks; None before the first iteration.
    """

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.request.splits_backward:
            return ()
        assert run.store is not None
        self._store: WeightGradStore = run.store
        self._library = run.library
        self._attached: weakref.WeakSet[wgrad_te.SplitStore] = weakref.WeakSet()
        self._prepared = LastModels()
        # Pipelines of which the log has a line; another model's may have other ranks.
        self._logged: weakref.WeakSet[Any] = weakref.WeakSet()
        self.report: WgradReport | None = None
        return (self,)

    def hooks(self) -> Sequence[Hook]:
        return local.hooks(self._store)

    def begin(self, step: Step) -> None:
        if step.plan.splits_backward:
            self._prepare(step)
        step.notes["wgrad"] = lambda: None if self.report is None else self.report.as_dict()

    def close(self) -> None:
        while self._attached:
            self._attached.pop().detach(self._store)
        self._prepared = LastModels()

    def _prepare(self, step: Step) -> None:
        """Hook the models, once; global rank 0 logs how much is split."""
        models = step.call.iteration.models
        if self._prepared.are(models):
            return
        if self._library:  # which may wrap a model when it has been evaluated, or again
            require_gradient_hooks(models)
        self._prepared.set(models)
        for model in models:
            self._attached.update(wgrad_te.attach(model, self._store))
        hooked = {id(p): foreign_hooks(p) for model in models for p in model.parameters()}
        hooked = self._store.hooked = {one: hooks for one, hooks in hooked.items() if hooks}
        if hooked:
            logger.warning("%s", _hooked_text(step, models, hooked))
        self.report = wgrad_report(models, self._store.fused_experts(), hooked)
        group = step.call.group
        if group not in self._logged:
            self._logged.add(group)
            every: list[WgradReport] = gather(self.report, group)
            if dist.get_rank() == 0:
                total = sum(every, WgradReport())
                level = logging.WARNING if total.advises else logging.INFO
                logger.log(level, "%s", total.text(step.plan.name))


def _hooked_text(step: Step, models: Iterable[Any], found: Mapping[int, Sequence[str]]) -> str:
    """Which weights are not postponed, by their names in the model, and why."""
    said = [
        f"{name} ({', '.join(found[id(p)])})"
        for model in models
        for name, p in unwrapped(model).named_parameters()
        if id(p) in found
    ]
    more = f" and {len(said) - _LISTED} more" if len(said) > _LISTED else ""
    return (
        f"{step.plan.name}: on pipeline rank {step.rank} layers compute their weight gradients in "
        "B, not in W, because hooks that are not Megatron's wait for them there: "
        f"{', '.join(said[:_LISTED])}{more}"
    )
