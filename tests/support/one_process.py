"""One process that runs slices: what a pipeline that runs them is compared with.

F of a microbatch's slices from first to last, then their backward passes from last to first, one
microbatch after another. So every weight adds its gradients in the order that pipelines keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.integration.features.slices.model import SlicedModel
from megatron_ext.integration.features.slices.run import Batches, SliceRunner, require_nothing_left
from megatron_ext.integration.features.slices.state import Cuts
from megatron_ext.integration.features.slices.wanted import Wanted
from megatron_ext.integration.hooks import Hooks, declared, hooked
from megatron_ext.integration.pipeline import finalize
from megatron_ext.integration.runner import Iteration
from megatron_ext.integration.targets import NO_PIPELINE
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.units import units_of


def install(wanted: Wanted, version: str) -> Hooks:
    """Let Megatron's training without a pipeline run in slices, until the hooks are reverted."""
    hooks = Hooks(version)
    hooks.apply(declared(_Alone(wanted)))
    return hooks


class _Alone(SlicedModel):
    implementations = ("local",)

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        self._wanted = wanted

    @hooked(NO_PIPELINE, "whole sequences would run")
    def _forward_backward(
        self,
        original: Callable[..., Any],
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        forward_only: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        if forward_only:
            found: list[Any] = original(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                forward_only=True,
                **kwargs,
            )
            return found
        from megatron.core.utils import get_model_config

        (chunk,) = model if isinstance(model, list) else [model]
        (batches,) = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunk)
        iteration = Iteration(
            forward_step_func,
            [Batches(batches)],
            [chunk],
            config,
            num_microbatches,
            cp_size=1,
            forward_only=False,
            collect_non_loss_data=False,
            first_val_step=None,
        )
        of = functools.cache(functools.partial(self._wanted.cut, config=config))
        cuts = Cuts([of] * num_microbatches, seq_length)
        store, one, own = WeightGradStore(), Placement.loop(1), iteration.data_iterators
        runner = SliceRunner(iteration, one, 0, store, slicing=self.slicing, cuts=cuts, batches=own)
        count = self._wanted.count
        units = units_of([count] * num_microbatches)
        for first in range(0, len(units), count):
            for unit in units[first : first + count]:
                runner.forward(0, unit, None)
            for unit in reversed(units[first : first + count]):
                runner.backward(0, unit, None, split=False)
        runner.check_finished()
        require_nothing_left(self.slicing, 0)
        group = kwargs.get("pg_collection")
        finalize(iteration, runner.num_tokens, group, kwargs.get("force_all_reduce", False))
        return runner.losses
