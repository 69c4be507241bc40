"""Point-to-point messages between pipeline ranks, non-blocking on both sides."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Receipt:
    """A receive that has been posted; ``wait`` gives the tensor once it has arrived."""

    tensor: torch.Tensor
    work: Any
    peer: int

    def wait(self) -> torch.Tensor:
        """Block (CUDA: make the current stream wait) until the message is here."""
        self.work.wait()
        return self.tensor


class Channel:
    """Sends and receives tensors of one shape and dtype inside a pipeline process group.

    Args:
        group: the pipeline-parallel process group (gloo or NCCL).
        shape: shape of every message; for Megatron (sequence, microbatch, hidden).
        dtype: dtype of every message.
        device: where received tensors are allocated.

    Attributes:
        polls: whether a finished send can be told by asking. gloo's is "completed" only once it
            has been waited for; somebody must say when that will not block: see ``taken``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.shape, self.dtype, self.device = group, shape, dtype, device
        self._global_ranks = dist.get_process_group_ranks(group)
        # By peer. A sent tensor must live until its transfer is over, and so must its work: gloo
        # never delivers a message whose work is gone.
        self._sending: dict[int, deque[tuple[Any, torch.Tensor]]] = {}
        self._settled: Counter[int] = Counter()
        self.polls = device.type != "cpu"

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending ``tensor`` (detached) to rank ``peer`` of the group.

        Raises:
            RuntimeError: shape or dtype differ from what the peer expects; sending it all the
                same would deliver garbage.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise RuntimeError(
                f"a stage produced {tuple(tensor.shape)} {tensor.dtype} but the pipeline carries "
                f"{self.shape} {self.dtype}; variable sequence lengths are not supported, and "
                "--pipeline-dtype (params dtype) must be the dtype of the activations"
            )
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._global_ranks[peer], group=self.group, tag=tag)
        self._sending.setdefault(peer, deque()).append((work, tensor))
        if self.polls:
            for queue in self._sending.values():
                while queue and queue[0][0].is_completed():
                    queue.popleft()

    def taken(self, peer: int, count: int) -> None:
        """Let go of the first ``count`` messages to ``peer``, which are known to be received.

        Without it a gloo run would keep every message of an iteration until its end. Returns as
        soon as they are transferred, which takes nothing from the peer's main thread if it has
        posted the receives.
        """
        if self.polls:
            return
        while self._settled[peer] < count:
            self._settle(peer)

    def receive(self, peer: int, tag: int) -> Receipt:
        """Post a receive from rank ``peer`` of the group; returns at once."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(tensor, self._global_ranks[peer], group=self.group, tag=tag)
        return Receipt(tensor, work, peer)

    def sending_to(self) -> list[int]:
        """Peers that may not have taken all messages yet; callable from another thread."""
        return [peer for peer, queue in tuple(self._sending.items()) if queue]

    def finish(self) -> None:
        """Wait until everything sent has been taken."""
        for peer, queue in self._sending.items():
            while queue:
                self._settle(peer)

    def _settle(self, peer: int) -> None:
        queue = self._sending[peer]
        work, _ = queue[0]
        # Still in the queue while it is waited for, so that a report can name the peer.
        work.wait()
        queue.popleft()
        self._settled[peer] += 1
