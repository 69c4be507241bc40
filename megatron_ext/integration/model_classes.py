"""Megatron's model classes, and the functions of training scripts that build models."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError


def generates(given: Mapping[str, Any]) -> bool:
    """True if a forward pass with these arguments, by their names, is one of Megatron's
    inference."""
    return any(given.get(name) is not None for name in ("inference_context", "inference_params"))


def refuse_text(flag: str) -> ConfigError:
    """The error of a model that is asked for text, which no rank can give it."""
    return ConfigError(
        f"this model cannot generate text under {flag}; start it without (a torch_dist checkpoint "
        "loads there)"
    )


def script_provider() -> Callable[..., Any] | None:
    """The running script's ``model_provider``: the name that Megatron's scripts give to the
    function that builds the model. None where there is none of that name."""
    provider = getattr(sys.modules.get("__main__"), "model_provider", None)
    return provider if callable(provider) else None


def builds_chunks(provider: Callable[..., Any]) -> bool:
    """True if a model provider takes the number of the chunk that it should build."""
    parameters = inspect.signature(provider).parameters.values()
    return any(p.name == "vp_stage" or p.kind is p.VAR_KEYWORD for p in parameters)


def builds_other_models(provider: Callable[..., Any]) -> bool:
    """True if a model provider names, in its own code, a model that no V can hold (BERT's)."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import MegatronModule

    while isinstance(provider, functools.partial):
        provider = provider.func
    provider = inspect.unwrap(provider)
    code = getattr(provider, "__code__", None)
    if code is None:
        return False
    named = [provider.__globals__.get(name) for name in code.co_names]
    models = [x for x in named if isinstance(x, type) and issubclass(x, MegatronModule)]
    return bool(models) and not any(issubclass(model, GPTModel) for model in models)
