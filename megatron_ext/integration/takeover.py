"""The way into our pipeline from Megatron's own functions, which nobody else may have taken."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..runtime import communicators
from .errors import ConfigError
from .hooks import Hook, around
from .targets import DESTROY_GROUP, FUNCTIONS, PIPELINES, SCHEDULES


def entry_hooks(pipeline: Callable[..., Any], in_force: Callable[[], bool]) -> list[Hook]:
    """Those that let Megatron's two pipeline functions be ``pipeline``, and end its communicators
    with those of the process groups.

    Args:
        in_force: false when somebody still holds what took their place and it is over: then
            Megatron's functions are called.

    Raises:
        ConfigError: another extension has replaced them.
    """
    _require_megatrons_own()

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


def _with_communicators(original: Callable[..., None], group: Any = None) -> None:
    communicators.close(None if group in (None, dist.group.WORLD) else group)
    original(group)


def _require_megatrons_own() -> None:
    """Refuse to take the place of functions that another extension has put there.

    Raises:
        ConfigError: it names the other.
    """
    module = importlib.import_module(SCHEDULES)
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        code = getattr(function, "__code__", None)
        ours = code is not None and Path(__file__).parent in Path(code.co_filename).parents
        if function is None or ours or (code and code.co_filename == module.__file__):
            continue
        other = getattr(function, "__module__", None) if code is None else code.co_filename
        raise ConfigError(
            f"{SCHEDULES}.{name} is no longer Megatron's own: {other} has replaced it; two "
            "extensions cannot both run the pipeline, so leave one of them out"
        )
