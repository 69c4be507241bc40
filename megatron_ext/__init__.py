"""Pipeline schedules with controllable memory for stock Megatron-LM.

Importing this package has no side effects: no torch, no CUDA, no Megatron, nothing patched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .integration import Report

__version__ = "0.1.0.dev0"
__all__ = ["apply", "revert"]


def apply(config: Mapping[str, object] | None = None, *, exist_ok: bool = False) -> Report:
    """Let the Megatron of this process know our flags; call it before Megatron parses its own.

    For a training script of your own, as its first line; the patch series calls it too. Flags are
    then read from the command line as with the launcher. Without any, Megatron trains as stock.

    Args:
        config: values for flags that the command line does not give, by attribute name:
            ``{"pp_schedule": "v-half", "pp_trace": "traces"}``.
        exist_ok: return the report, instead of raising, where we are applied already; a ``config``
            is refused then.

    Returns:
        What is replaced in Megatron, and where: print it. It stays current.

    Raises:
        ValueError: (``integration.ConfigError``) applied already, Megatron has parsed its arguments
            already, no supported Megatron, or an unknown name in ``config``.
    """
    from . import integration

    return integration.apply(config, exist_ok=exist_ok)


def revert() -> None:
    """Give Megatron every symbol back, the very objects. Without an ``apply``, nothing happens.

    A model built under a V schedule keeps its placement: do not train it on after this.
    """
    from . import integration

    integration.revert()
