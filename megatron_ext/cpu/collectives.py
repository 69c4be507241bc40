"""``torch.distributed`` on gloo: arguments that only NCCL understands are dropped or translated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..runtime.edges import gloo_options
from .rebinding import around


def _around(name: str, wrapper: Callable[..., Any]) -> None:
    """``around`` in both modules through which a function is reached."""
    around(dist, name, wrapper, distributed_c10d)


def _without(*dropped: str) -> Callable[..., Any]:
    """A wrapper that ignores these keywords."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{k: value for k, value in kwargs.items() if k not in dropped})

    return wrapper


def init_process_group(
    original: Callable[..., Any], backend: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Start gloo, without a device: the default process group must not look for a GPU."""
    kwargs.pop("device_id", None)
    if backend is not None and "nccl" in str(backend):
        raise ValueError(
            f"the CPU run was asked for the {backend} backend, which needs a GPU; "
            "pass --distributed-backend gloo"
        )
    return original(backend or "gloo", *args, **kwargs)


class _UnfinishedWork:
    """A pending collective whose result needs a last step when it has been waited for."""

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the collective, then finish once."""
        done = self._work.wait(*args, **kwargs)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return bool(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def all_reduce(
    original: Callable[..., Any],
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """ReduceOp.AVG as a sum and a division: gloo has no average (MoE and MTP logging use it)."""
    coalescing = (group or dist.group.WORLD) in distributed_c10d._world.pg_coalesce_state
    if op != dist.ReduceOp.AVG or coalescing:
        # Inside a coalescing context the call is only recorded; gloo will report what it lacks.
        return original(tensor, op, group, async_op)
    work = original(tensor, dist.ReduceOp.SUM, group, async_op)
    finish = functools.partial(tensor.div_, dist.get_world_size(group))
    if async_op:
        return _UnfinishedWork(work, finish)
    finish()
    return work


def all_gather(
    original: Callable[..., Any],
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Parts of unequal sizes, as layer-wise optimizers have them, padded: gloo wants equal ones."""
    sizes = [part.numel() for part in tensor_list]
    if len(set(sizes)) == 1:
        return original(tensor_list, tensor, group, async_op)
    mine = tensor.new_zeros(max(sizes))
    mine[: tensor.numel()] = tensor.flatten()
    padded = [torch.empty_like(mine) for _ in sizes]
    work = original(padded, mine, group, async_op)

    def finish() -> None:
        for part, whole in zip(tensor_list, padded, strict=True):
            part.copy_(whole[: part.numel()].view_as(part))

    if async_op:
        return _UnfinishedWork(work, finish)
    finish()
    return work


def all_to_all_single(
    original: Callable[..., Any],
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Split sizes as lists: the MoE dispatchers keep them as tensors when they are on the CPU."""
    sizes = (
        split.tolist() if isinstance(split, torch.Tensor) else split
        for split in (output_split_sizes, input_split_sizes)
    )
    return original(output, input, *sizes, *args, **kwargs)


def _patch_workers() -> None:
    """One worker thread a process group (see ``gloo_options``).

    Under ``--overlap-param-gather`` two collectives of a group run at once: with two threads one
    run in a hundred ends in ``malloc``.
    """
    gloo: Any = dist.ProcessGroupGloo

    # A class, since torch asks whether a group is one.
    class OneWorker(gloo):  # type: ignore[misc]
        """``ProcessGroupGloo`` whose collectives run one after the other, in the order of calls."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> None:
            ready = isinstance(timeout, gloo._Options)
            super().__init__(store, rank, size, timeout if ready else gloo_options(timeout))

    modules: tuple[Any, ...] = dist, distributed_c10d
    for module in modules:
        module.ProcessGroupGloo = OneWorker


def install() -> None:
    """Rebind torch.distributed's functions. Call once, from ``megatron_ext.cpu``."""
    for wrapper in (init_process_group, all_reduce, all_gather, all_to_all_single):
        _around(wrapper.__name__, wrapper)
    _patch_workers()
    # Groups: device_id binds a group to a GPU, pg_options are NCCL's.
    _around("new_group", _without("device_id", "pg_options"))
    # gloo's barrier refuses device_ids.
    _around("barrier", _without("device_ids"))
