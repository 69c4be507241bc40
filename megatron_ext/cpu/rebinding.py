"""Putting functions of ours in the place of others that they call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, function: Callable[..., Any], *others: Any) -> None:
    """Let ``owner.name`` be ``function``, which is given the original before its arguments; so in
    ``others``, where they have the name too."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def rebound(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    for one in (owner, *(other for other in others if hasattr(other, name))):
        setattr(one, name, rebound)
