"""The way into our pipeline from Megatron's own functions, which nobody else may have taken."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FrameType, FunctionType
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


def require_not_held() -> None:
    """Refuse to replace functions that someone has fetched already and will go on calling.

    Modules that imported a function by name are no obstacle: hooks bind there too.

    Raises:
        ConfigError: it names the holder.
    """
    module = sys.modules[SCHEDULES]
    for name in FUNCTIONS:
        holder = next(_holders(getattr(module, name)), None)
        if holder is not None:
            raise ConfigError(
                f"{holder} holds Megatron's {name}, fetched by get_forward_backward_func() before "
                "megatron_ext.enable(), and would keep calling it; call enable() first"
            )


def _holders(function: FunctionType) -> Iterator[str]:
    """Those that hold ``function``, in words: variables, attributes, containers, closures."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__ and frame.f_locals is not frame.f_globals:
            for name, value in frame.f_locals.items():
                if value is function:
                    yield f"the variable {name} of {frame.f_code.co_name}()"
        frame = frame.f_back
    modules = {id(getattr(m, "__dict__", None)) for m in list(sys.modules.values())}
    for referrer in gc.get_referrers(function):
        if id(referrer) in modules or isinstance(referrer, FrameType):
            continue
        if isinstance(referrer, dict) and set(referrer) == {"__wrapped__"}:
            continue  # of a wrapper, which nobody need call
        if isinstance(referrer, (dict, list, tuple, set, CellType)):
            owners = gc.get_referrers(referrer) if isinstance(referrer, dict) else []
            owner = next((x for x in owners if getattr(x, "__dict__", None) is referrer), None)
            kind = "a closure" if isinstance(referrer, CellType) else f"a {type(referrer).__name__}"
            yield kind if owner is None else _attribute(owner, function)
        elif not isinstance(referrer, type):
            yield _attribute(referrer, function)


def _attribute(owner: Any, function: FunctionType) -> str:
    values = getattr(owner, "__dict__", {})
    name = next((name for name, value in values.items() if value is function), None)
    kind = type(owner).__qualname__
    return f"a {kind}" if name is None else f"the attribute {name} of a {kind}"
