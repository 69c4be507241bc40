"""The few places where Megatron itself, not torch, must be told that it runs on a CPU.

Each fix is applied right after its module has been imported, so that nothing of Megatron is
imported before the script asks for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch


def _fix_distributed_optimizer(module: ModuleType) -> None:
    """Load the distributed optimizer's state without recording gradients.

    core_v0.16.1 to core_v0.19.0 copy the loaded master weights into views of parameters. Without
    Apex or Transformer Engine the optimizer is torch's own, whose parameters require gradients,
    and an in-place write to a leaf is an error outside ``no_grad``.
    """
    cls = module.DistributedOptimizer
    name = "_set_main_param_and_optimizer_states"
    if hasattr(cls, name):
        setattr(cls, name, torch.no_grad()(getattr(cls, name)))


_FIXES: dict[str, Callable[[Any], None]] = {
    "megatron.core.optimizer.distrib_optimizer": _fix_distributed_optimizer,
}


class _FixAfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules named in ``_FIXES`` as Python would and fixes them once executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the ordinary spec of a module to fix, with its execution wrapped."""
        fix = _FIXES.get(fullname)
        if fix is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        @functools.wraps(execute)
        def exec_module(module: ModuleType) -> None:
            execute(module)
            fix(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Arrange the fixes. Call once, from ``megatron_ext.cpu``, before Megatron is imported."""
    sys.meta_path.insert(0, _FixAfterImport())
