"""Point-to-point messages between pipeline ranks, non-blocking on both sides."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
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


_MOST_DIMENSIONS = 7


class Channel:
    """Sends and receives tensors of one dtype inside a pipeline process group.

    Args:
        group: the pipeline-parallel process group (gloo or NCCL).
        shape: shape of every message; for Megatron (sequence, microbatch, hidden). None: shapes
            vary, so each message is preceded by its shape, and a receive is posted only when that
            is here. The lowered schedule allows for receives that wait (a rendezvous).
        dtype: dtype of every message.
        device: where received tensors are allocated.

    Attributes:
        polls: whether a finished send can be told by asking. gloo's is "completed" only once it
            has been waited for; somebody must say when that will not block: see ``taken``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.shape, self.dtype, self.device = group, shape, dtype, device
        self._global_ranks = dist.get_process_group_ranks(group)
        # By peer. A sent tensor must live until its transfer is over, and so must its work: gloo
        # never delivers a message whose work is gone.
        self._sending: defaultdict[int, deque[list[tuple[Any, torch.Tensor]]]] = defaultdict(deque)
        self._settled: Counter[int] = Counter()
        self.polls = device.type != "cpu"

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending ``tensor`` (detached) to rank ``peer`` of the group.

        Raises:
            RuntimeError: shape or dtype differ from what the peer expects; sending it all the
                same would deliver garbage.
        """
        shape, dtype = self.shape, self.dtype
        if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
            raise RuntimeError(
                f"a stage produced {tuple(tensor.shape)} {tensor.dtype} but the pipeline carries "
                f"{shape} {dtype}; sequences of varying length need variable_seq_lengths "
                "in the model's configuration, and --pipeline-dtype (params dtype) must be the "
                "dtype of the activations"
            )
        tensor = tensor.contiguous()
        to, group = self._global_ranks[peer], self.group
        message = []
        if shape is None:
            header = self._header(tensor.shape)
            message.append((dist.isend(header, to, group=group, tag=2 * tag), header))
        number = 2 * tag + len(message)
        message.append((dist.isend(tensor, to, group=group, tag=number), tensor))
        self._sending[peer].append(message)
        if self.polls:
            for queue in self._sending.values():
                while queue and all(work.is_completed() for work, _ in queue[0]):
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
        """Post a receive from rank ``peer`` of the group.

        Returns at once, or, where shapes vary, as soon as the peer has sent the shape.
        """
        source, shape = self._global_ranks[peer], self.shape
        number = 0
        if shape is None:
            header = self._header(())
            arrival = dist.irecv(header, source, group=self.group, tag=2 * tag)
            assert arrival is not None  # None only outside the group
            arrival.wait()
            dimensions, *sizes = header.tolist()
            shape, number = tuple(sizes[:dimensions]), 1
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(tensor, source, group=self.group, tag=2 * tag + number)
        return Receipt(tensor, work, peer)

    def _header(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A shape as a message of fixed size: the number of dimensions, the sizes, zeros."""
        sizes = [len(shape), *shape]
        padded = sizes + [0] * (_MOST_DIMENSIONS + 1 - len(sizes))
        return torch.tensor(padded, dtype=torch.int64, device=self.device)

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
        # Still in the queue while it is waited for, so that a report can name the peer.
        for work, _ in queue[0]:
            work.wait()
        queue.popleft()
        self._settled[peer] += 1
