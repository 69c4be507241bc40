"""Seams: the declared places where Megatron calls us instead of itself.

Applying one resolves the target, checks its signature, rebinds the object in *every* module that
imported it by name, and verifies that none still holds the old one. Anything unexpected raises,
and whatever had been bound is put back: never train on with half the hooks.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .versions import SUPPORTED

_ADVICE = (
    f"use an unmodified megatron-core {SUPPORTED[-1]}, or drop our flags; scripts/upgrade_check.sh "
    "shows what moved in a version, for a report"
)


@dataclass(frozen=True)
class Seam:
    """One place to hook.

    Attributes:
        targets: ``module:qualified.name``, in order of preference: upstream moves things.
        make: given the original object, the replacement.
        parameters: names that the target's signature must have.
        why: what goes wrong without it.
    """

    targets: tuple[str, ...]
    make: Callable[[Any], Any]
    parameters: tuple[str, ...]
    why: str


@dataclass
class Binding:
    """A seam that is in force: who holds the replacement, and what they held before."""

    target: str
    why: str
    original: Any
    replacement: Any
    holders: list[tuple[Any, str]] = field(default_factory=list)

    def undo(self) -> None:
        """Give every holder its original back."""
        for holder, name in reversed(self.holders):
            setattr(holder, name, self.original)
        self.holders.clear()

    def where(self) -> list[str]:
        """Names of the modules and classes that hold the replacement."""
        return sorted(_name_of(holder) for holder, _ in self.holders)


class Seams:
    """A set of seams that is applied and reverted as one."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.bindings: list[Binding] = []

    def apply(self, seams: Sequence[Seam]) -> None:
        """Bind all of ``seams``, or none.

        Raises:
            ConfigError: a target is missing, has another signature, or still has a consumer that
                holds the original afterwards.
        """
        before = len(self.bindings)
        try:
            for seam in seams:
                self.bindings.append(self._bind(seam))
        except BaseException:
            while len(self.bindings) > before:
                self.bindings.pop().undo()
            raise

    def find(self, seam: Seam) -> str:
        """The target that ``seam`` would bind, which stays as it is.

        Raises:
            ConfigError: it is missing or has another signature.
        """
        target, owner, name = self._resolve(seam)
        self._check_signature(target, inspect.getattr_static(owner, name), seam)
        return target

    def revert(self) -> None:
        """Undo everything, last seam first."""
        while self.bindings:
            self.bindings.pop().undo()

    def report(self) -> str:
        """One line a seam: what is bound, and where."""
        return "\n".join(f"  {b.target} -> {', '.join(b.where())}" for b in self.bindings)

    def _bind(self, seam: Seam) -> Binding:
        target, owner, name = self._resolve(seam)
        # A class attribute is read without its descriptor, so that revert restores the very object.
        original = inspect.getattr_static(owner, name)
        self._check_signature(target, original, seam)
        replacement = seam.make(original)
        binding = Binding(target, seam.why, original, replacement)
        if inspect.ismodule(owner):
            holders = _modules_holding(original)
        else:
            holders = [(owner, name)]
        for holder, attribute in holders:
            setattr(holder, attribute, replacement)
            binding.holders.append((holder, attribute))
        left = _modules_holding(original) if inspect.ismodule(owner) else []
        if left or inspect.getattr_static(owner, name) is not replacement:
            binding.undo()
            names = ", ".join(_name_of(holder) for holder, _ in left) or target
            raise ConfigError(f"could not hook {target}: {names} still holds Megatron's original")
        return binding

    def _resolve(self, seam: Seam) -> tuple[str, Any, str]:
        """(target, the object that owns it, its attribute name) of the first target that exists."""
        for target in seam.targets:
            module_name, _, path = target.partition(":")
            try:
                owner: Any = importlib.import_module(module_name)
            except ImportError:
                continue
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            if owner is not None and hasattr(owner, name):
                return target, owner, name
        wanted = " or ".join(seam.targets)
        raise ConfigError(
            f"megatron-core {self.version} has no {wanted}, which megatron_ext must hook "
            f"({seam.why}); {_ADVICE}"
        )

    def _check_signature(self, target: str, original: Any, seam: Seam) -> None:
        try:
            found = list(inspect.signature(original).parameters)
        except (TypeError, ValueError):
            found = []
        missing = [p for p in seam.parameters if p not in found]
        if missing:
            raise ConfigError(
                f"{target} of megatron-core {self.version} has parameters {found}, but "
                f"megatron_ext expects {missing} among them ({seam.why}); {_ADVICE}"
            )


def _modules_holding(value: Any) -> list[tuple[Any, str]]:
    """(module, attribute) of every loaded module with a global that is ``value`` itself."""
    found = []
    for module in list(sys.modules.values()):
        for name, held in list(getattr(module, "__dict__", {}).items()):
            if held is value and not _is_ours(module):
                found.append((module, name))
    return found


def _is_ours(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).split(".")[0] == "megatron_ext"


def _name_of(holder: Any) -> str:
    return str(getattr(holder, "__qualname__", None) or getattr(holder, "__name__", holder))
