"""Megatron's model classes, and the functions of training scripts that build models."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..schedule.select import ONE_CHUNK
from .rules import Rule
from .targets import HYBRID_MODEL

PLACEABLE = Rule(
    "--pp-schedule {schedule} needs a model whose stages can be placed as a V, megatron.core's "
    "{known}",
    "this model is a {model}",
    "use a schedule with Megatron's own placement, e.g. zb-h1 or interleaved-zb",
)
BUILDS_CHUNKS = Rule(
    "--pp-schedule {schedule} needs a model_provider that builds {chunks} model chunks a rank",
    "the script's builds only one (it takes no vp_stage)",
    f"use a schedule with one chunk: {', '.join(ONE_CHUNK)}",
)
NO_TEXT = Rule(
    "a model {of} does not support the generation of text",
    "{why}",
    "start it without {flag} (a torch_dist checkpoint loads there)",
)


def placed_models() -> tuple[type, ...]:
    """The classes whose layers, embedding and loss V placement can place."""
    from megatron.core.models.gpt import GPTModel

    return GPTModel, HYBRID_MODEL.found


def require_placed(chunks: Sequence[Any], name: str) -> None:
    """The model must be one that V placement can place.

    Args:
        chunks: this rank's unwrapped model chunks.

    Raises:
        ConfigError: another kind of model; its embedding or loss would be on the wrong stage.
    """
    known = placed_models()
    names = " or ".join(model.__name__ for model in known)
    for chunk in chunks:
        kept, model = isinstance(chunk, known), type(chunk).__name__
        PLACEABLE.require(kept, schedule=name, known=names, model=model)


def generates(given: Mapping[str, Any]) -> bool:
    """True if a forward pass with these arguments, by their names, is one of Megatron's
    inference."""
    return any(given.get(name) is not None for name in ("inference_context", "inference_params"))


def script_provider() -> Callable[..., Any] | None:
    """The running script's ``model_provider``: the name that Megatron's scripts give to the
    function that builds the model. None where there is none of that name."""
    provider = getattr(sys.modules.get("__main__"), "model_provider", None)
    return provider if callable(provider) else None


def require_chunks(provider: Callable[..., Any] | None, name: str, chunks: int) -> None:
    """``provider`` must be able to build one of several model chunks of a rank.

    Args:
        provider: builds the model; None: not known, which may be any.
        chunks: that the schedule has on a rank.

    Raises:
        ConfigError: it builds whole models only.
    """
    kept = provider is None or chunks == 1 or builds_chunks(provider)
    BUILDS_CHUNKS.require(kept, schedule=name, chunks=chunks)


def builds_chunks(provider: Callable[..., Any]) -> bool:
    """True if a model provider takes the number of the chunk that it should build."""
    parameters = inspect.signature(provider).parameters.values()
    return any(p.name == "vp_stage" or p.kind is p.VAR_KEYWORD for p in parameters)


def builds_other_models(provider: Callable[..., Any]) -> bool:
    """True if a model provider names, in its own code, a model that no V can hold (BERT's)."""
    from megatron.core.transformer.module import MegatronModule

    while isinstance(provider, functools.partial):
        provider = provider.func
    provider = inspect.unwrap(provider)
    code, known = getattr(provider, "__code__", None), placed_models()
    if code is None:
        return False
    named = [provider.__globals__.get(name) for name in code.co_names]
    models = [x for x in named if isinstance(x, type) and issubclass(x, MegatronModule)]
    return bool(models) and not any(issubclass(model, known) for model in models)
