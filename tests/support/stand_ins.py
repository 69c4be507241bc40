"""Stand-ins for what Megatron passes to us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_ext.integration.arguments import MegatronArgs


def megatron_args(**values: Any) -> SimpleNamespace:
    """Megatron's arguments with these values; every other one that we read by name is None."""
    return SimpleNamespace(**{**dict.fromkeys(MegatronArgs.__annotations__), **values})
