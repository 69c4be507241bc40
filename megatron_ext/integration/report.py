"""What ``megatron_ext.apply`` hands back: which hooks are in force."""

from __future__ import annotations

from .hooks import Seams


class Report:
    """The seams in force, now: print it.

    The two that read the flags are bound by ``apply``. Those of the chosen schedule join once
    Megatron has validated its arguments; after a revert there are none.

    Attributes:
        megatron: version of megatron-core.
    """

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self.megatron = seams.version

    @property
    def seams(self) -> dict[str, list[str]]:
        """Replaced symbol -> modules and classes that hold the replacement."""
        return {binding.target: binding.where() for binding in self._seams.bindings}

    def __str__(self) -> str:
        if not self._seams.bindings:
            return f"megatron_ext: nothing of megatron-core {self.megatron} is replaced"
        count = len(self._seams.bindings)
        return (
            f"megatron_ext: {count} symbols of megatron-core {self.megatron} are replaced\n"
            f"{self._seams.report()}"
        )

    __repr__ = __str__
