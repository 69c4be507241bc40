"""Where Megatron's scripts build their models: ``get_model``, and the builders of its model
configurations, which do not call it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .hooks import Hook, around, bound
from .targets import BUILDERS, GET_MODEL


def _nothing(_: Any) -> None:
    pass


class FirstChunk:
    """A rank's first chunk of the model that is built, for its last one; it is not kept alive.

    Args:
        why: what needs it, for the error.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._chunk: Callable[[], Any] = lambda: None

    def set(self, chunk: Any) -> None:
        """It has been built."""
        self._chunk = weakref.ref(chunk)

    def get(self) -> Any:
        """That which was built last.

        Raises:
            RuntimeError: none was, or it is gone.
        """
        chunk = self._chunk()
        if chunk is None:
            raise RuntimeError(f"{self._why} needs a rank's first chunk built before its last one")
        return chunk


@dataclass(frozen=True)
class Building:
    """What a feature does when a training script builds its models, whichever way that takes.

    Attributes:
        why: what goes wrong without it.
        finished: inside of it chunks are built; the script is done with them, and they have no
            wrappers, when what it yields is called.
        built: gets this rank's chunks, with their wrappers.
    """

    why: str
    finished: Callable[[], AbstractContextManager[Callable[[], None]]] = lambda: (
        contextlib.nullcontext(lambda: None)
    )
    built: Callable[[Sequence[Any]], object] = _nothing

    def hooks(self) -> list[Hook]:
        """On both ways."""
        return [
            Hook(GET_MODEL, around(self._get_model), self.why),
            Hook(BUILDERS, around(self._build_models), self.why),
        ]

    def _get_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = bound(original, *args, **kwargs)
        provider = given.arguments["model_provider_func"]

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
        given = bound(original, *args, **kwargs)
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
