"""Changes of Megatron itself, not of torch, for a run on CPUs.

Each fix is applied around the import of its module, so that nothing of Megatron is imported
before the script asks for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from . import context_parallel
from .rebinding import around


def _fix_distributed_optimizer(module: ModuleType) -> None:
    """Let the distributed optimizer save and load around torch's own Adam.

    Without Apex or Transformer Engine that is what it wraps, and Megatron's checkpoint code goes
    wrong with it in four places: see the comments.
    """

    def state_dict_with_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # It reads the step count from a state that torch creates in the first step only, so a
        # fresh run could load nothing.
        if isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            _create_adam_state(self.optimizer)
        return original(self, *args, **kwargs)

    def load_with_own_steps(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # It gives all parameters one step counter, which every one of them would then increment.
        result = original(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    def set_states_but_step(original: Any, self: Any, model_param: Any, tensors: Any) -> Any:
        # It overwrites the step counter just loaded with one that the checkpoint does not hold.
        # It also writes into parameters that require gradients.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        with torch.no_grad():
            result = original(self, model_param, tensors)
        if step is not None:
            state["step"] = step
        return result

    cls = module.DistributedOptimizer
    around(cls, "state_dict", state_dict_with_state)
    around(cls, "load_state_dict", load_with_own_steps)
    around(cls, "_set_main_param_and_optimizer_states", set_states_but_step)


def _create_adam_state(optimizer: torch.optim.Adam) -> None:
    """Create the state that Adam itself would create in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _fix_mappings(module: Any) -> None:
    """Reduce over one rank by doing nothing.

    Megatron's function returns its input, which autograd takes for a view and protects; an expert
    adds its second bias to it in place, so that experts with biases would not run in one process.
    """

    def reduce_if_several(reduce: Callable[..., Any], input_: Any, group: Any = None) -> Any:
        group = module.get_tensor_model_parallel_group_if_none(group)
        return input_ if group is not None and group.size() == 1 else reduce(input_, group)

    around(module, "reduce_from_tensor_model_parallel_region", reduce_if_several)


def _fix_recompute(module: Any) -> None:
    """Refill discarded outputs by a copy, and without asking for FP8.

    Megatron compiles a C++ extension that shares the memory instead: a minute, and a compiler, in
    the first backward pass. It also asks Transformer Engine for its FP8 state, even where it is
    missing: its own default of ``fp8``, False, is not the None that it tests for.
    """
    module._get_share_storage = lambda: _copy_storage
    if not module.HAVE_TE:
        begin = module.CheckpointWithoutOutput.__init__
        begin.__defaults__ = tuple(value or None for value in begin.__defaults__ or ())


def _copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    storage = source.untyped_storage()
    target.untyped_storage().resize_(storage.size())
    target.untyped_storage().copy_(storage)


def _fix_inference_layers(module: Any) -> None:
    """Answer which layers are the inference engine's: after core_v0.19 multi-token prediction asks,
    and without Transformer Engine those classes are mocks, which ``isinstance`` refuses."""
    if not module.HAVE_TE and hasattr(module, "is_inference_column_parallel_linear"):
        module.is_inference_column_parallel_linear = lambda layer: False


def _fix_optimizer_offload(module: Any) -> None:
    """Let the optimizer that offloads its states take the parameters for a GPU's, as they would be.

    It looks for them by ``is_cuda``, and finds none to offload on a CPU. Works for
    ``--optimizer-offload-fraction 1``, its default.
    """

    def split_as_on_a_gpu(original: Any, self: Any, offload_fraction: float) -> Any:
        own = {id(x) for group in self.param_groups for x in group["params"]}
        torch.Tensor.is_cuda = property(lambda tensor: id(tensor) in own)  # type: ignore[assignment]
        try:
            return original(self, offload_fraction)
        finally:
            del torch.Tensor.is_cuda

    around(module.HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", split_as_on_a_gpu)


_FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": _fix_optimizer_offload,
    "megatron.core.optimizer.distrib_optimizer": _fix_distributed_optimizer,
    "megatron.core.tensor_parallel.inference_layers": _fix_inference_layers,
    "megatron.core.tensor_parallel.mappings": _fix_mappings,
    "megatron.core.tensor_parallel.random": _fix_recompute,
    "megatron.core.transformer.dot_product_attention": context_parallel.fix_attention,
    "megatron.core.transformer.torch_norm": context_parallel.fix_norm,
}


class _FixingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules named above as Python would, and wraps their execution."""

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

        def exec_module(original: Callable[[ModuleType], None], module: ModuleType) -> None:
            original(module)
            fix(module)

        around(spec.loader, "exec_module", exec_module)
        return spec


def install() -> None:
    """Arrange the fixes. Call once, from ``megatron_ext.cpu``, before Megatron is imported."""
    sys.meta_path.insert(0, _FixingFinder())
    # In each recomputed pass: one generator is "the GPU's" and the CPU's here.
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
