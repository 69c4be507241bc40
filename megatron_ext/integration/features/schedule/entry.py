"""The way into the pipeline from Megatron's own functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...callbacks import Callback
from ...hooks import Hook, around
from ...model_classes import require_chunks
from ...takeover import FUNCTIONS, SCHEDULES, require_megatrons_own

if TYPE_CHECKING:
    from ...pipeline import ScheduledPipeline


class Entry(Callback):
    """A run's, with the checks of its training script."""

    def __init__(self, pipeline: ScheduledPipeline, training: bool, name: str, chunks: int) -> None:
        self._pipeline, self._training = pipeline, training
        self._name, self._chunks = name, chunks

    def hooks(self) -> Sequence[Hook]:
        hooks = entry_hooks(self._pipeline)
        if self._training:
            hooks += [
                Hook(
                    ("megatron.training.training:train_step",),
                    around(self._pipeline.watched),
                    ("forward_step_func", "optimizer"),
                    "a rank that waits before or behind its passes would not be watched",
                ),
                Hook(
                    ("megatron.training.training:get_model",),
                    self._checked,
                    ("model_provider_func",),
                    "a script that cannot build model chunks would end in a TypeError",
                ),
            ]
        return hooks

    def _checked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        name, chunks = self._name, self._chunks

        @functools.wraps(original)
        def get_model(model_provider_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            require_chunks(model_provider_func, name, chunks)
            return original(model_provider_func, *args, **kwargs)

        return get_model


def entry_hooks(pipeline: Callable[..., Any]) -> list[Hook]:
    """Those that let Megatron's two pipeline functions be ``pipeline``.

    Raises:
        ConfigError: another extension has replaced them.
    """
    require_megatrons_own()

    # Not by ``around``: the check before a second ``enable`` refuses closures over Megatron's
    # function.
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_backward(**kwargs: Any) -> Any:
            return pipeline(**kwargs)

        return forward_backward

    return [
        Hook(
            (f"{SCHEDULES}:{name}",),
            make,
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "forward_only"),
            "stock's schedule would run",
        )
        for name in FUNCTIONS
    ]
