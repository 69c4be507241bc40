"""Does the host keep up, and what does one CUDA graph of a rank's whole list change?

Host and step, eager and as one graph, for layers as they are and as one tensor-parallel rank's part
of them, without the all-reduces. Losses and all gradients of three new batches must be equal. On a
CPU a tape of torch's calls stands in for the graph.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.gpu import model as gpu
from megatron_ext.schedule import generate

SIZES = (
    gpu.Size(4096, 4096, 4, 4, 16, tp=8),
    gpu.Size(4096, 4096, 4, 4, 16),
    gpu.Size(8192, 4096, 4, 4, 16, tp=8),
)
SCHEDULES = (("1f1b", 1), ("v-half", 2), ("v-zb", 2))
BATCHES = 3


class Tape(TorchDispatchMode):
    """Stands in for a graph: every call of a step, repeated on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(f"{func}: the host would wait inside a capture")
        kept = tree_map(_alias, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, *kept, tree_map(_alias, out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """All calls again; results go where they were."""
        for func, args, kwargs, out in self._calls:
            for old, new in zip(tree_flatten(out)[0], tree_flatten(func(*args, **kwargs))[0]):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _alias(value: Any) -> Any:
    """Megatron frees outputs by ``.data = empty(1)``, which a graph does not see."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Rows by size and schedule."""
    group, result = gpu.start(), {"rows": []}
    gpu.warm(0 if tiny else 3)
    for size in (gpu.Size(64, 32, 4, 2, 4),) if tiny else SIZES:
        layers = gpu.layers_of(size, range(size.layers))
        for name, chunks in SCHEDULES:
            plan = generate(name, size.pp, size.microbatches, chunks)
            last = plan.placement.rank_of(plan.placement.num_stages - 1)
            rank = gpu.Rank(size, plan, last, group, None, layers)
            row = {"size": str(size), "schedule": name, "actions": len(rank.plan.ranks[rank.rank])}
            result["rows"].append(gpu.tried(row, measured, rank))
            keep(result)
            rank.close()
        del layers
        gpu.release()
    return result


def feed(rank: gpu.Rank, seed: int) -> None:
    """Another batch in the same memory."""
    generator = torch.Generator(gpu.DEVICE).manual_seed(seed)
    for x in rank.inputs:
        x.copy_(torch.randn(x.shape, generator=generator, device=gpu.DEVICE))


def measured(rank: gpu.Rank) -> dict[str, Any]:
    """Milliseconds and equality; GiB that the graph takes more."""
    rank.step(timed=False)
    eager = [rank.step(timed=False) for _ in range(BATCHES)]
    wanted = []
    for seed in range(BATCHES):
        feed(rank, seed)
        rank.step(timed=False)
        wanted.append((rank.losses, [g.clone() for g in rank.gradients()]))
    gpu.release()
    before = torch.cuda.memory_reserved() if gpu.CUDA else 0
    graph: Any = torch.cuda.CUDAGraph() if gpu.CUDA else Tape()
    inside = torch.cuda.graph(graph, capture_error_mode="thread_local") if gpu.CUDA else graph
    with rank.ready(), inside:
        losses = rank.issue(timed=False)
    more = (torch.cuda.memory_reserved() - before) / 2**30 if gpu.CUDA else 0.0
    host, step, equal = [], [], True
    for seed, (wanted_losses, gradients) in enumerate(wanted):
        feed(rank, seed)
        for layer in rank.layers:
            layer.zero_grad_buffer()
        gpu.synchronize()
        started = time.perf_counter()
        graph.replay()
        host.append(time.perf_counter() - started)
        gpu.synchronize()
        step.append(time.perf_counter() - started)
        equal &= [float(loss) for loss in losses] == wanted_losses
        equal &= all(map(torch.equal, rank.gradients(), gradients))
    times = {"host": [one["issued"] for one in eager], "step": [one["took"] for one in eager],
             "graph_host": host, "graph_step": step}  # fmt: skip
    found = {f"{name}_ms": gpu.spread((1e3 * t for t in each), 2) for name, each in times.items()}
    return found | {"equal": equal, "gib_more": round(more, 2)}


if __name__ == "__main__":
    gpu.main(run)
