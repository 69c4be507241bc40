"""What benchmarks/moe.py runs on: a network and experts that sleep, a link, a count of memory."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HIDDEN, FFN, EXPERTS, TOP_K = 64, 64, 8, 2
TOKENS = 4096  # of a rank
KAPPA = 4  # bytes inside the experts over those of their input
ALPHA_MS = 0.3  # of a message, and of an expert call
IN_FLIGHT = 4  # microbatches that the budget is for

real_all_to_all = dist.all_to_all_single


class Network:
    """Makes all-to-alls take ``ALPHA_MS`` and ``ms_per_byte``, one after the other."""

    def __init__(self, ms_per_byte: float) -> None:
        self._ms_per_byte, self._free = ms_per_byte, 0.0

    def __call__(self, out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wants = kwargs.pop("async_op", False)
        world = dist.get_world_size(kwargs.get("group"))
        nbytes = max(out.numel(), given.numel()) * given.element_size() * (world - 1) / world
        work = real_all_to_all(out, given, *args, async_op=True, **kwargs)
        start = max(time.perf_counter(), self._free)
        self._free = start + (ALPHA_MS + self._ms_per_byte * nbytes) / 1e3
        message = Message(work, self._free)
        return message if wants else message.wait()


class Message:
    """An all-to-all that is over when both the real one and the network are."""

    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def wait(self) -> bool:
        """Sleep as long as it takes."""
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return True


class Pause(torch.autograd.Function):
    """Takes time forward, twice as much backward, and keeps its input ``KAPPA`` times over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        """The input times the weight."""
        until = time.perf_counter() + seconds
        inside = x.repeat(1, KAPPA)
        ctx.seconds = seconds
        ctx.save_for_backward(x, weight, inside)
        y = x * weight
        time.sleep(max(0.0, until - time.perf_counter()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Both gradients."""
        until = time.perf_counter() + 2 * ctx.seconds
        x, weight, _ = ctx.saved_tensors
        gradients = grad * weight, (grad * x).sum(0)
        time.sleep(max(0.0, until - time.perf_counter()))
        return *gradients, None


class PausingExperts(torch.nn.Module):
    """In place of Megatron's: so many milliseconds a row."""

    def __init__(self, ms_per_row: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))
        self.ms_per_row = ms_per_row

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> Any:
        """Megatron's interface."""
        seconds = (ALPHA_MS + self.ms_per_row * len(rows)) / 1e3
        return Pause.apply(rows, self.weight, seconds), None


class Peak(TorchDispatchMode):
    """Most bytes of tensors made inside the context that exist at once, by storage."""

    def __init__(self, without: set[int]) -> None:
        super().__init__()
        self._without, self._live = without, dict[int, tuple[StorageWeakRef, int]]()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, look, sum up."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._without:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        total = sum(nbytes for _, nbytes in self._live.values())
        self.nbytes = max(self.nbytes, total)
        return result
