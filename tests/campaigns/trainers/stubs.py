"""Stand-ins for packages that a framework imports and its training step does not use."""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class _Meta(abc.ABCMeta):
    """Attributes of the class itself, and what operators do with it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_Meta):
    """A class, decorator, function, context manager and value that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, item: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Stub(ModuleType):
    __path__: Sequence[str] = []
    __version__ = "5.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = (
            type(name, (Anything,), {"__module__": self.__name__})
            if name[0].isupper()
            else (Anything())
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == p or name.startswith(p + ".") for p in self._packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stub(packages: Sequence[str], instead: Sequence[str] = ()) -> None:
    """Let packages be importable and empty.

    Args:
        packages: only where they are not installed; dotted names, with their submodules.
        instead: modules of the framework itself that its step does not use, though they are there.
    """
    sys.meta_path.insert(0, _Finder(instead))
    sys.meta_path.append(_Finder(packages))


def bare(package: str, folder: Path) -> None:
    """Register a package of the framework without running its ``__init__``, which imports all of
    it; its modules come from ``folder``."""
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module
