"""Brings what the loss's rank computed to the last pipeline rank, where Megatron logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.watchdog import Watchdog
from ..schedule.placement import Placement
from .runner import MegatronRunner


def relay_losses(
    placement: Placement,
    group: Any,
    runner: MegatronRunner,
    device: torch.device,
    watchdog: Watchdog,
) -> list[Any]:
    """Send losses, token count and multi-token-prediction metrics to the last pipeline rank.

    Returns:
        On that rank and on the one that computed the losses: the losses; elsewhere an empty list.
    """
    source = placement.rank_of(placement.num_stages - 1)
    target, rank = group.size() - 1, group.rank()
    if source == target or rank not in (source, target):
        return runner.losses
    ranks = dist.get_process_group_ranks(group)
    if rank == source:
        # Unpickling a CUDA tensor would put it on the sender's device index.
        parts = (runner.losses, int(runner.num_tokens), _take_mtp_metrics())
        message = [map_tensors(parts, lambda t: t.detach().cpu())]
        dist.send_object_list(message, dst=ranks[target], group=group, device=device)
        return runner.losses
    message = [None]
    watchdog.waiting(f"for the losses from pipeline rank {source}", list)
    dist.recv_object_list(message, src=ranks[source], group=group, device=device)
    losses, tokens, metrics = map_tensors(message[0], lambda t: t.to(device))
    runner.num_tokens.fill_(tokens)
    _add_mtp_metrics(metrics)
    result: list[Any] = losses
    return result


def _tracker() -> dict[str, Any]:
    """Where Megatron's multi-token prediction sums up what it will log."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker


def _take_mtp_metrics() -> dict[str, torch.Tensor]:
    """Remove this rank's metrics: a rank that has some takes part in reducing them."""
    tracker = _tracker()
    names = [name for name in tracker if name.endswith("values") and "cumulative" not in name]
    return {name: tracker.pop(name) for name in names}


def _add_mtp_metrics(metrics: dict[str, torch.Tensor]) -> None:
    from megatron.core import parallel_state

    tracker = _tracker()
    for name, values in metrics.items():
        tracker[name] = tracker[name] + values if name in tracker else values
        tracker["reduce_group"] = None
        # Averaged by the last ranks among themselves, as if they had computed them.
        tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor in its dicts, lists and tuples replaced by ``change`` of it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, change) for v in value)
    return value
