"""Relay of the losses from the rank that computes them to the last rank, where Megatron logs."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from ....runtime.watchdog import Watchdog
from ....schedule.placement import Placement
from ...runner import MegatronRunner
from ...utils import map_tensors


class Relay:
    """Sends losses, token count and multi-token-prediction metrics to the last pipeline rank."""

    def __init__(self) -> None:
        self._sending: list[tuple[Any, torch.Tensor]] = []

    def losses(
        self,
        placement: Placement,
        group: Any,
        runner: MegatronRunner,
        device: torch.device,
        watchdog: Watchdog,
        ahead: bool,
    ) -> list[Any]:
        """One iteration's, on all ranks of the pipeline.

        Args:
            ahead: the sender does not wait for the last rank, which ends the iteration later
                (post-validation). ``finish`` has to be called before the sender leaves.

        Returns:
            On the last rank and on the one that computed the losses: the losses; elsewhere an
            empty list.
        """
        source = placement.rank_of(placement.num_stages - 1)
        target, rank = group.size() - 1, group.rank()
        if source == target or rank not in (source, target):
            return runner.losses
        ranks = dist.get_process_group_ranks(group)
        if rank == source:
            watchdog.waiting(f"for pipeline rank {target} to take the losses", list)
            self.finish()
            # Unpickling a CUDA tensor would put it on the sender's device index.
            parts = (runner.losses, int(runner.num_tokens), _take_mtp_metrics())
            body = pickle.dumps(map_tensors(parts, lambda t: t.detach().cpu()))
            # As send_object_list, whose other end is below, but without waiting.
            data = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(device)
            size = torch.tensor([len(body)], dtype=torch.int64, device=device)
            self._sending = [(dist.isend(t, ranks[target], group), t) for t in (size, data)]
            if not ahead:
                self.finish()
            return runner.losses
        message = [None]
        watchdog.waiting(f"for the losses from pipeline rank {source}", list)
        dist.recv_object_list(message, src=ranks[source], group=group, device=device)
        losses, tokens, metrics = map_tensors(message[0], lambda t: t.to(device))
        runner.num_tokens.fill_(tokens)
        _add_mtp_metrics(metrics)
        result: list[Any] = losses
        return result

    def finish(self) -> None:
        """Wait until the last rank has taken everything: gloo never delivers a message whose work
        is gone, and nothing is delivered by a process that has ended."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            work.wait()


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
