"""Putting functions of ours in the place of others that they call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let ``owner.name`` be ``function``, which is given the original before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def rebound(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, rebound)
