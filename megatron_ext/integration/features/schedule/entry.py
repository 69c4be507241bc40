"""The way into the pipeline from Megatron's own functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ....runtime import communicators
from ...building import Building
from ...callbacks import Callback
from ...hooks import Hook, around
from ...model_classes import require_chunks
from ...takeover import require_megatrons_own
from ...targets import DESTROY_GROUP, FUNCTIONS, PARALLEL_STATE, PIPELINES, SCHEDULES, TRAIN_STEP

if TYPE_CHECKING:
    from ...pipeline import ScheduledPipeline


class Entry(Callback):
    """A run's, with the checks of its training script."""

    def __init__(self, pipeline: ScheduledPipeline, training: bool, name: str, chunks: int) -> None:
        self._pipeline, self._training = pipeline, training
        self._name, self._chunks = name, chunks
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def hooks(self) -> Sequence[Hook]:
        hooks = entry_hooks(self._pipeline, lambda: not self._closed)
        if self._training:
            hooks += [
                Hook(
                    TRAIN_STEP,
                    around(self._pipeline.watched),
                    "a rank that waits before or behind its passes would not be watched",
                ),
                *Building(
                    "a script that cannot build model chunks would end in a TypeError",
                    before=lambda provider: require_chunks(provider, self._name, self._chunks),
                ).hooks(),
            ]
        return hooks


def entry_hooks(pipeline: Callable[..., Any], in_force: Callable[[], bool]) -> list[Hook]:
    """Those that let Megatron's two pipeline functions be ``pipeline``, and end its communicators
    with those of the process groups.

    Args:
        in_force: false when somebody still holds what took their place and it is over: then
            Megatron's functions are called.

    Raises:
        ConfigError: another extension has replaced them.
    """
    require_megatrons_own()

    # Not by ``around``: the check before a second ``enable`` refuses closures over Megatron's
    # function.
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__

        @functools.wraps(original)
        def forward_backward(**kwargs: Any) -> Any:
            if in_force():
                return pipeline(**kwargs)
            return getattr(sys.modules[SCHEDULES], name)(**kwargs)

        return forward_backward

    return [
        *(Hook(PIPELINES[name], make, "stock's schedule would run") for name in FUNCTIONS),
        Hook(
            DESTROY_GROUP,
            around(_with_communicators),
            "communicators of messages would outlive their process group",
        ),
    ]


def size_hook(check: Callable[..., Any]) -> Hook:
    """``check`` around the making of a job's groups."""
    return Hook(PARALLEL_STATE, around(check), "a job without a pipeline would not be noticed")


def _with_communicators(original: Callable[..., None], group: Any = None) -> None:
    communicators.close(None if group in (None, dist.group.WORLD) else group)
    original(group)
