"""Where Megatron's scripts build their models: ``get_model``, and from 0.18 on the builders of its
model configurations, which do not call it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .hooks import Hook, around
from .targets import BUILDERS, GET_MODEL


def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Building:
    """What a feature does when a training script builds its models, whichever way that takes.

    Attributes:
        why: what goes wrong without it.
        before: gets the function that builds one chunk, before any is built.
        finished: inside of it chunks are built; the script is done with them, and they have no
            wrappers, when what it yields is called.
        built: gets this rank's chunks, with their wrappers.
    """

    why: str
    before: Callable[[Callable[..., Any]], None] = _nothing
    finished: Callable[[], AbstractContextManager[Callable[[], None]]] = lambda: (
        contextlib.nullcontext(lambda: None)
    )
    built: Callable[[Sequence[Any]], object] = _nothing

    def hooks(self) -> list[Hook]:
        """On every way that this Megatron has."""
        found = [Hook(GET_MODEL, around(self._get_model), self.why)]
        if BUILDERS.exists:
            found.append(Hook(BUILDERS, around(self._build_models), self.why))
        return found

    def _get_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        provider = given.arguments["model_provider_func"]
        self.before(provider)

        @functools.wraps(provider)
        def chunk(*args: Any, **kwargs: Any) -> Any:
            with self.finished() as finish:
                model = provider(*args, **kwargs)
                finish()
            return model

        given.arguments["model_provider_func"] = chunk
        models = original(*given.args, **given.kwargs)
        self.built(models)
        return models

    def _build_models(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        self.before(given.arguments["build_model_func"])
        scripts = given.arguments.get("pre_wrap_hook")
        with self.finished() as finish:

            def before_wrapping(models: list[Any]) -> list[Any]:
                found = (None if scripts is None else scripts(models)) or models
                finish()
                return found

            given.arguments["pre_wrap_hook"] = before_wrapping
            models = original(*given.args, **given.kwargs)
        self.built(models)
        return models
