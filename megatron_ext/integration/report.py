"""The report of ``megatron_ext.apply``: hooks in force."""

from __future__ import annotations

from .._log import PREFIX
from .hooks import Hooks


class Report:
    """The hooks in force, now: print it.

    The two that read the flags are bound by ``apply``. Those of the chosen schedule join once
    Megatron has validated its arguments; after a revert there are none.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.megatron = hooks.version

    @property
    def hooks(self) -> dict[str, list[str]]:
        """Replaced symbol -> modules and classes that hold the replacement."""
        return {binding.target: binding.where() for binding in self._hooks.bindings}

    def __str__(self) -> str:
        if not self._hooks.bindings:
            return f"{PREFIX} nothing of megatron-core {self.megatron} is replaced"
        count = len(self._hooks.bindings)
        return (
            f"{PREFIX} {count} symbols of megatron-core {self.megatron} are replaced\n"
            f"{self._hooks.report()}"
        )

    __repr__ = __str__
    seams = hooks  # the former name
