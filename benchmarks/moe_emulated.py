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
    """Stands for a linear layer: takes ``seconds`` forward, and again for each gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, width: int, seconds: float
    ) -> torch.Tensor:
        """``width`` elements a row."""
        until = time.perf_counter() + seconds
        ctx.seconds = seconds
        ctx.save_for_backward(x, weight)
        y = (x[:, :1] * weight).expand(-1, width).contiguous()
        time.sleep(max(0.0, until - time.perf_counter()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Of the first element, and of the weight."""
        wanted = ctx.needs_input_grad[:2]
        until = time.perf_counter() + sum(wanted) * ctx.seconds
        x, weight = ctx.saved_tensors
        first, to_x, to_weight = grad.sum(1, keepdim=True), None, None
        if wanted[0]:
            to_x = torch.zeros_like(x)
            to_x[:, :1] = first * weight
        if wanted[1]:
            to_weight = (x[:, :1] * first).sum(0)
        time.sleep(max(0.0, until - time.perf_counter()))
        return to_x, to_weight, None, None


class PausingLinear(torch.nn.Module):
    """So many elements a row, so many milliseconds each and ``ALPHA_MS`` on top."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.width, self.ms_per_row = width, 0.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Takes its time."""
        seconds = (ALPHA_MS / 2 + self.ms_per_row * len(rows)) / 1e3
        result: torch.Tensor = Pause.apply(rows, self.weight, self.width, seconds)
        return result


class PausingExperts(torch.nn.Module):
    """In place of Megatron's: gated, two thirds of ``ms_per_row`` in fc1; keeps 3F elements a row.

    Args:
        inside: 3F.
    """

    def __init__(
        self, ms_per_row: float, hidden: int = HIDDEN, inside: int = KAPPA * HIDDEN
    ) -> None:
        super().__init__()
        ffn = max(1, round(inside / 3))
        self.linear_fc1, self.linear_fc2 = PausingLinear(2 * ffn), PausingLinear(hidden)
        self.set_pace(ms_per_row)

    def set_pace(self, ms_per_row: float) -> None:
        """Of both; 0: as fast as the host."""
        self.linear_fc1.ms_per_row, self.linear_fc2.ms_per_row = 2 * ms_per_row / 3, ms_per_row / 3

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> Any:
        """Megatron's interface."""
        one, other = self.linear_fc1(rows).chunk(2, dim=-1)
        return self.linear_fc2(one * other), None


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
