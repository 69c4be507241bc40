"""Options of Megatron that a feature does not support: one form for training and planning."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ._input import attribute as attribute
from ._megatron_flags import NEUTRAL

# Where the argument is not named as the flag.
_RENAMED = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--output-logit-dtype": "logit_dtype",
}


@dataclass(frozen=True)
class Conflict:
    """An option of Megatron that a feature does not support.

    Attributes:
        flag: as the user wrote it.
        reason: why, and what to do instead; completes "X does not support FLAG VALUE: ...".
        off: values that do not conflict, besides false and neutral ones (``NEUTRAL``).
        values: the values that conflict, for options that take several; empty: all but ``off``.
        only: the part of the feature that it concerns, e.g. "V placement"; empty: all of it.
        beside: another flag, without which this one has no effect and does not conflict.
    """

    flag: str
    reason: str
    off: tuple[Any, ...] = ()
    values: tuple[str, ...] = ()
    only: str = ""
    beside: str = ""

    @property
    def attribute(self) -> str:
        """The argument's name in Megatron's ``args``."""
        return argument(self.flag)

    def found(self, args: Any) -> str | None:
        """The conflicting value in ``args`` as text, "" for a switch; None if there is none."""
        if self.beside and not getattr(args, argument(self.beside), None):
            return None
        value = getattr(args, self.attribute, None)
        if not value or value in self.off or str(value) in NEUTRAL.get(self.flag, ()):
            return None
        if value is True:
            return ""
        given = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        # Configurations that a program builds may have an enumeration's members for names.
        names = [str(getattr(one, "name", one)) for one in given]
        return " ".join(name for name in names if not self.values or name in self.values) or None


def first_conflict(
    conflicts: Iterable[Conflict], args: Any, parts: Collection[str] = ("",)
) -> tuple[str, str] | None:
    """The first conflict with ``args``: the part that it concerns, and "FLAG VALUE: reason".

    Args:
        args: Megatron's arguments; those that are missing are not in use.
        parts: of the feature that are in use (see ``Conflict.only``).
    """
    for rule in conflicts:
        value = rule.found(args) if rule.only in parts else None
        if value is not None:
            return rule.only, f"{rule.flag} {value}".strip() + f": {rule.reason}"
    return None


def argument(flag: str) -> str:
    """The name in Megatron's ``args`` of one of its flags."""
    return _RENAMED.get(flag, attribute(flag))


def values_of(tokens: Sequence[str]) -> dict[str, Any]:
    """Flags of a command line by argument name: true, or their values with commas between."""
    found: dict[str, Any] = {}
    name = None
    for token in tokens:
        if token.startswith("--"):
            flag, _, value = token.partition("=")
            name = argument(flag)
            found[name] = value or True
        elif name is not None:
            found[name] = token if found[name] is True else f"{found[name]},{token}"
    return found
