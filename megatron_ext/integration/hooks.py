"""Hooks: the declared places where Megatron calls us instead of itself.

Applying one resolves the target, checks its signature, rebinds the object in *every* module that
imported it by name, and verifies that none still holds the old one. Anything unexpected raises,
and whatever had been bound is put back: never train on with half the hooks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .._log import PREFIX
from ..releases import NEWEST
from .errors import ConfigError
from .targets import Target

_ADVICE = f"use an unmodified megatron-core {NEWEST.version}, or drop our flags"
# Modules that hold nothing of Megatron's, most of those of a process; and ours, which may.
_NEVER = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath", "triton", "megatron_ext"}
_TORCH = ("torch.distributed", "torch.distributed.distributed_c10d")  # of which we hook something


@dataclass(frozen=True)
class Hook:
    """One place to hook.

    Attributes:
        target: what it takes the place of.
        make: given the original object, the replacement.
        why: what goes wrong without it.
    """

    target: Target
    make: Callable[[Any], Any]
    why: str


class around:
    """``Hook.make`` of a function that gets the original, and then what the original gets.

    Parameters that it names are compared with the original's: it must take all of them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, original: Any) -> Any:
        function = self.function

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        # Of a cached original, whose users may clear it.
        for name in ("cache_clear", "cache_info"):
            if hasattr(original, name):
                setattr(replacement, name, getattr(original, name))
        return replacement


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a call by their names."""
    return _signature(function).bind(*args, **kwargs)


_Method = TypeVar("_Method", bound=Callable[..., Any])
# By the place of the method, so that one which takes it in its class is hooked, too.
_HOOKED: dict[tuple[str, str], tuple[Sequence[Target], str, Callable[[Any], bool]]] = {}


def hooked(
    target: Target | Sequence[Target], why: str, when: Callable[[Any], bool] = lambda owner: True
) -> Callable[[_Method], _Method]:
    """Declare a method as what is ``around`` a target, or around each of several.

    Args:
        why: what goes wrong without it.
        when: given the method's object, false where nothing is to be hooked.
    """

    def mark(method: _Method) -> _Method:
        targets = [target] if isinstance(target, Target) else target
        _HOOKED[method.__module__, method.__qualname__] = targets, why, when
        return method

    return mark


def declared(owner: object) -> list[Hook]:
    """The hooks of an object's ``hooked`` methods, in the order of its class."""
    found = []
    for kind in reversed(type(owner).__mro__):
        for name in vars(kind):
            place = kind.__module__, f"{kind.__qualname__}.{name}"
            targets, why, when = _HOOKED.get(place, ((), "", bool))
            if targets and when(owner):
                method = around(getattr(owner, name))
                found += [Hook(target, method, why) for target in targets]
    return found


@dataclass
class Binding:
    """An applied hook: the holders of its replacement, and what they held before."""

    target: str
    why: str
    owner: Any
    name: str
    original: Any
    replacement: Any
    holders: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def of_module(self) -> bool:
        """What modules may import by name, unlike the attributes of a class."""
        return inspect.ismodule(self.owner)

    def bind(self) -> None:
        """Give every holder the replacement."""
        for holder, name in self.holders:
            setattr(holder, name, self.replacement)

    def unbind(self) -> None:
        """Restore every holder's original."""
        for holder, name in reversed(self.holders):
            setattr(holder, name, self.original)

    def add_holders(self, found: Iterable[tuple[Any, str]]) -> None:
        """Modules that have come to hold it since."""
        self.holders[:] = dict.fromkeys([*self.holders, *found])

    def where(self) -> list[str]:
        """Names of the modules and classes that hold the replacement."""
        return sorted(_name_of(holder) for holder, _ in self.holders)


class Hooks:
    """A set of hooks that is applied and reverted as one."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.bindings: list[Binding] = []
        self._modules = 0

    def apply(self, hooks: Sequence[Hook]) -> None:
        """Bind all of ``hooks``, or none.

        Raises:
            ConfigError: a target is missing, has another signature, or still has a consumer that
                holds the original afterwards.
        """
        bindings = self._prepared(hooks)
        seen = set(sys.modules)
        try:
            for binding in bindings:
                binding.bind()
            _check_bound(bindings, seen)
        except BaseException:
            for binding in reversed(bindings):
                binding.unbind()
            raise
        self.bindings += bindings

    def pause(self) -> None:
        """Restore Megatron's symbols until ``resume``, also in modules imported meanwhile."""
        self._find_late(lambda binding: binding.replacement)
        for binding in reversed(self.bindings):
            binding.unbind()

    def resume(self) -> None:
        """Bind again what was paused, also in modules imported meanwhile."""
        self._find_late(lambda binding: binding.original)
        for binding in self.bindings:
            binding.bind()

    def _find_late(self, held: Callable[[Binding], Any]) -> None:
        """Add holders that were imported since the last time.

        Args:
            held: what they hold of a binding now.
        """
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        bindings = [b for b in self.bindings if b.of_module]
        found = _modules_holding([held(b) for b in bindings])
        # Hooks of one target replace each other's replacements: who holds one is a holder of all.
        of_target: dict[tuple[int, str], list[tuple[Any, str]]] = {}
        for binding in bindings:
            at = of_target.setdefault((id(binding.owner), binding.name), [])
            at += found[id(held(binding))]
        for binding in bindings:
            binding.add_holders(of_target[id(binding.owner), binding.name])

    def find(self, hook: Hook) -> str:
        """The target that ``hook`` would bind, which stays as it is.

        Raises:
            ConfigError: it is missing or has another signature.
        """
        target, owner, name = self._resolve(hook)
        self._replacement(target, inspect.getattr_static(owner, name), hook)
        return target

    def revert(self) -> None:
        """Undo everything, last hook first."""
        self._modules = -1  # a module may have been removed and another one imported
        self.pause()
        self.bindings.clear()

    def report(self) -> str:
        """One line a hook: what is bound, and where."""
        return "\n".join(f"  {b.target} -> {', '.join(b.where())}" for b in self.bindings)

    def _prepared(self, hooks: Sequence[Hook]) -> list[Binding]:
        """What applying ``hooks`` will bind, and where; nothing is changed."""
        bindings: list[Binding] = []
        latest: dict[tuple[int, str], Binding] = {}  # a later hook of a target wraps the earlier
        for hook in hooks:
            target, owner, name = self._resolve(hook)
            before = latest.get((id(owner), name))
            # A class attribute is read without its descriptor, so that revert restores the very
            # object.
            original = before.replacement if before else inspect.getattr_static(owner, name)
            made = self._replacement(target, original, hook)
            binding = Binding(target, hook.why, owner, name, original, made)
            bindings.append(binding)
            latest[id(owner), name] = binding
        # After everything is imported, and once for all hooks: a process has thousands of modules.
        found = _modules_holding([b.original for b in bindings if b.of_module])
        for binding in bindings:
            if binding.of_module:
                binding.holders += found[id(binding.original)]
                found[id(binding.replacement)] = binding.holders
            else:
                binding.holders.append((binding.owner, binding.name))
        return bindings

    def _resolve(self, hook: Hook) -> tuple[str, Any, str]:
        """(target, the object that owns it, its attribute name) of the first target that exists."""
        found = hook.target.resolve()
        if found is not None:
            return found
        wanted = " or ".join(hook.target.places)
        raise ConfigError(
            f"megatron-core {self.version} has no {wanted}, which megatron_ext must hook "
            f"({hook.why}); {_ADVICE}"
        )

    def _replacement(self, target: str, original: Any, hook: Hook) -> Any:
        """What takes the place of ``original``: each has the parameters that the other needs."""
        try:
            found = list(inspect.signature(original).parameters)
        except (TypeError, ValueError):
            found = []
        missing = [p for p in hook.target.parameters if p not in found]
        if missing:
            raise ConfigError(
                f"{target} of megatron-core {self.version} has parameters {found}, but "
                f"megatron_ext expects {missing} among them ({hook.why}); {_ADVICE}"
            )
        made = hook.make(original)
        lost = _not_taken(original, hook.make if isinstance(hook.make, around) else made)
        if lost:
            raise ConfigError(
                f"{target} of megatron-core {self.version} has parameters {lost} that its "
                f"replacement by megatron_ext does not know ({hook.why}); {_ADVICE}"
            )
        return made


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


def _not_taken(original: Any, made: Any) -> list[str]:
    """Parameters of a function that what takes its place has neither by name nor by place."""
    own = made.function if isinstance(made, around) else made
    if not (inspect.isfunction(original) and inspect.isroutine(own)):
        return []
    named, positional = set[str](), -isinstance(made, around)  # it gets the original first
    for one in inspect.signature(own, follow_wrapped=False).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            return []
        named.add(one.name)
        positional += one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(original).parameters
    return [name for at, name in enumerate(parameters) if name not in named and at >= positional]


def _check_bound(bindings: Sequence[Binding], seen: Collection[str]) -> None:
    """Every holder has the replacement now, and no module that has come since the original.

    Args:
        bindings: all of them, bound.
        seen: the modules among which their holders were looked for.
    """
    last = {(id(b.owner), b.name): b.replacement for b in bindings}
    late = _modules_holding([b.original for b in bindings if b.of_module], seen)
    for binding in bindings:
        final = last[id(binding.owner), binding.name]
        left = [
            (holder, name)
            for holder, name in binding.holders
            if inspect.getattr_static(holder, name) is not final
        ]
        if left := left + late.get(id(binding.original), []):
            names = ", ".join(_name_of(holder) for holder, _ in left)
            raise ConfigError(
                f"could not hook {binding.target}: {names} still holds Megatron's original"
            )


def _modules_holding(
    values: Sequence[Any], but: Collection[str] = ()
) -> dict[int, list[tuple[Any, str]]]:
    """By the identity of each of ``values``: (module, attribute) of every loaded module with a
    global that is the value itself; ``but`` names modules that are known to have none."""
    found: dict[int, list[tuple[Any, str]]] = {id(value): [] for value in values}
    types = {type(value) for value in values}
    for key, module in list(sys.modules.items()):
        if key in but or (key.split(".")[0] in _NEVER and key not in _TORCH):
            continue
        for name, held in dict(getattr(module, "__dict__", {})).items():
            # Few are of these types, and a process may have Python called at every ``id``.
            if type(held) in types and id(held) in found:
                found[id(held)].append((module, name))
    return found


def _name_of(holder: Any) -> str:
    return str(getattr(holder, "__qualname__", None) or getattr(holder, "__name__", holder))
