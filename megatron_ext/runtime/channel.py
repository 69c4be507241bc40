"""Point-to-point messages between pipeline ranks, non-blocking on both sides."""

from __future__ import annotations

from collections import deque
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
        # A sent tensor must live until its transfer is over.
        self._sending: deque[tuple[Any, torch.Tensor, int]] = deque()

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
        self._sending.append((work, tensor, peer))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, peer: int, tag: int) -> Receipt:
        """Post a receive from rank ``peer`` of the group; returns at once."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(tensor, self._global_ranks[peer], group=self.group, tag=tag)
        return Receipt(tensor, work, peer)

    def sending_to(self) -> list[int]:
        """Peers that have not yet taken a message, for reports."""
        return [peer for _, _, peer in self._sending]

    def finish(self) -> None:
        """Wait until everything sent has been taken."""
        while self._sending:
            work, _, _ = self._sending[0]
            work.wait()
            self._sending.popleft()
