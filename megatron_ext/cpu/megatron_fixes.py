"""The few places where Megatron itself, not torch, must be told that it runs on a CPU.

Each fix is applied around the import of its module, so that nothing of Megatron is imported
before the script asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
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


def _fix_fused_kernels(module: ModuleType) -> None:
    """Load no CUDA kernels: core_v0.16.1 looks for nvcc at start, whatever flags are given."""
    module.load = lambda args: None


def _fix_moe_utils(module: ModuleType) -> None:
    """Define the name that core_v0.16.1 tests for but only sets with Transformer Engine."""
    module.__dict__.setdefault("te_general_gemm", None)


class _TritonStub(ModuleType):
    """Enough of triton to define kernels that nobody calls on a CPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda function=None, **kwargs: function or (lambda kernel: kernel)


@contextlib.contextmanager
def _triton_stub() -> Iterator[None]:
    """Provide a stand-in for triton inside the context, where triton is not installed.

    core_v0.16.1 imports triton unconditionally in one module that every training script reaches,
    and CPU builds of torch come without it. Only there: other modules ask whether triton can be
    imported and must hear no.
    """
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        yield
        return
    stubs = {name: _TritonStub(name) for name in ("triton", "triton.language")}
    stubs["triton"].language = stubs["triton.language"]
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


# What to do around and after the execution of a module.
_CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "megatron.core.transformer.custom_layers.batch_invariant_kernels": _triton_stub,
}
_FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.optimizer.distrib_optimizer": _fix_distributed_optimizer,
    "megatron.core.transformer.moe.moe_utils": _fix_moe_utils,
    "megatron.legacy.fused_kernels": _fix_fused_kernels,
}


class _FixingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules named above as Python would, and wraps their execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the ordinary spec of a module to fix, with its execution wrapped."""
        context = _CONTEXTS.get(fullname, contextlib.nullcontext)
        fix = _FIXES.get(fullname)
        if fullname not in _CONTEXTS and fix is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        @functools.wraps(execute)
        def exec_module(module: ModuleType) -> None:
            with context():
                execute(module)
            if fix is not None:
                fix(module)

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Arrange the fixes. Call once, from ``megatron_ext.cpu``, before Megatron is imported."""
    sys.meta_path.insert(0, _FixingFinder())
