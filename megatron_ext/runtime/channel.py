"""Point-to-point messages between pipeline ranks, non-blocking on both sides."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .edges import Edge, Edges

_MOST_DIMENSIONS = 7


class Receipt:
    """A message that is on its way to this rank; ``wait`` gives the tensor once it has arrived.

    Attributes:
        peer: its sender.
    """

    def __init__(self, channel: Channel, peer: int, tag: int) -> None:
        self.peer, self.tag = peer, tag
        self.shape: tuple[torch.Tensor, Any] | None = None  # and its transfer
        self.tensor: torch.Tensor | None = None
        self.work: Any = None
        self._channel = channel

    def post(self) -> None:
        """Post the receive now, which waits for the message's shape if that varies."""
        self._channel.post(self)

    def wait(self) -> torch.Tensor:
        """Block (CUDA: make the current stream wait) until the message is here."""
        return self._channel.arrived(self)


class Channel:
    """Sends and receives tensors of one dtype between the ranks of a pipeline.

    Args:
        edges: connected with all peers that there will be messages to or from.
        shape: shape of every message; for Megatron (sequence, microbatch, hidden). None: shapes
            vary, so each message is preceded by its shape, which goes from host to host. A receive
            is posted as soon as its shape is known, at the latest where the data is needed.
        dtype: dtype of every message.
        device: where received tensors are allocated.

    Attributes:
        posts_late: receives may be posted after ``receive`` returned.
    """

    def __init__(
        self,
        edges: Edges,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._edges, self.options = edges, edges.options
        # By peer. A sent tensor must live until its transfer is over, and so must its work: gloo
        # never delivers a message whose work is dropped.
        self._sending: defaultdict[int, deque[tuple[Any, torch.Tensor]]] = defaultdict(deque)
        self._shapes_sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._settled: Counter[int] = Counter()
        self._receiving: dict[Receipt, None] = {}
        # By peer, receives without a shape: posted in the order in which they are sent.
        self._shapeless: defaultdict[int, deque[Receipt]] = defaultdict(deque)
        self._buffered = self.options.buffers and shape is not None
        if self._buffered:
            assert shape is not None
            edges.keep_buffers(torch.Size(shape), dtype)
        # Where a message that waits for its peer holds back computation (one hardware queue) or
        # other messages, a receive must be posted where the schedule has it.
        one_queue = device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self.posts_late = shape is None and self.options.own and not one_queue

    def connect(self, edges: Iterable[Edge]) -> None:
        """Let there be messages over ``edges``, too; collective, as ``Edges.connect``."""
        self._edges.connect(edges, shapes=self.shape is None)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Start sending ``tensor`` (detached) to rank ``peer`` of the pipeline.

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
        if self._shapeless:
            self._post_known()
        if shape is None:
            self._send_shape(tensor.shape, peer)
        if self._buffered:
            tensor = self._edges.buffer(tensor.shape, dtype).copy_(tensor)
        else:
            tensor = tensor.contiguous()
        backend, there = self._edges.to(peer)
        self._sending[peer].append((backend.send([tensor], there, tag), tensor))

    def settle(self, peer: int, count: int) -> None:
        """Release the memory of the first ``count`` messages to ``peer``, which it is known to
        have posted receives for.

        Until then it is kept: nothing here depends on how far the host is ahead of the device.
        Blocks (CUDA: makes the current stream wait) until they are transferred, which takes
        nothing from the peer's computation.
        """
        while self._settled[peer] < count:
            self._settle(peer)

    def receive(self, peer: int, tag: int) -> Receipt:
        """Start receiving from rank ``peer`` of the pipeline.

        Returns at once, unless shapes vary and the receive has to be posted here (see
        ``posts_late``): then as soon as the peer has sent the shape.
        """
        receipt = Receipt(self, peer, tag)
        self._receiving[receipt] = None
        if self.shape is not None:
            self._post(receipt, self.shape)
            return receipt
        line = self._edges.shapes_back(peer)
        sizes = torch.empty(_MOST_DIMENSIONS + 1, dtype=torch.int64)
        receipt.shape = sizes, line.backend.broadcast([sizes], _from_source())
        self._shapeless[peer].append(receipt)
        if self.posts_late:
            self._post_known()
        else:
            self._post_next(peer)
        return receipt

    def post(self, receipt: Receipt) -> torch.Tensor:
        """Post ``receipt``, after those of the same peer before it, and give its memory."""
        while receipt.tensor is None:
            self._post_next(receipt.peer)
        return receipt.tensor

    def arrived(self, receipt: Receipt) -> torch.Tensor:
        """The message of ``receipt``, see ``Receipt.wait``."""
        buffer = tensor = self.post(receipt)
        del self._receiving[receipt]
        assert receipt.work is not None
        receipt.work.wait()
        if self._buffered:
            tensor = buffer.clone()
            self._edges.give_back(buffer)
        if self._shapeless:
            self._post_known()
        return tensor

    def sending_to(self) -> list[int]:
        """Peers that may not have received all messages yet; callable from another thread."""
        return [peer for peer, queue in tuple(self._sending.items()) if queue]

    def pending(self) -> str | None:
        """The first message that has not been transferred; callable from another thread.

        Only for NCCL, where the host does not wait for messages: gloo's do not know whether they
        are complete before they are waited for.
        """
        for receipt in tuple(self._receiving):
            if receipt.work is None or not receipt.work.is_completed():
                return f"a message from pipeline rank {receipt.peer}"
        for peer, queue in tuple(self._sending.items()):
            for work, _ in tuple(queue):
                if not work.is_completed():
                    return f"a message to pipeline rank {peer}"
        return None

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        for peer, queue in self._sending.items():
            while queue:
                self._settle(peer)
        while self._shapes_sent:
            self._shapes_sent.popleft()[0].wait()

    def _settle(self, peer: int) -> None:
        queue = self._sending[peer]
        # Still in the queue while it is waited for, so that a report can name the peer.
        queue[0][0].wait()
        _, tensor = queue.popleft()
        self._settled[peer] += 1
        if self._buffered:
            self._edges.give_back(tensor)

    def _post(self, receipt: Receipt, shape: tuple[int, ...]) -> None:
        backend, there = self._edges.back(receipt.peer)
        if self._buffered:
            receipt.tensor = self._edges.buffer(torch.Size(shape), self.dtype)
        else:
            receipt.tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        receipt.work = backend.recv([receipt.tensor], there, receipt.tag)

    def _post_next(self, peer: int) -> None:
        """Post the next receive from ``peer``, once its shape is here."""
        receipt = self._shapeless[peer][0]
        assert receipt.shape is not None
        sizes, work = receipt.shape
        work.wait()
        dimensions, *lengths = sizes.tolist()
        self._post(receipt, tuple(lengths[:dimensions]))
        self._shapeless[peer].popleft()

    def _post_known(self) -> None:
        """Post the receives of which the shapes are here."""
        for peer, queue in self._shapeless.items():
            while queue and (shape := queue[0].shape) and shape[1].is_completed():
                self._post_next(peer)

    def _send_shape(self, shape: torch.Size, peer: int) -> None:
        """A shape as a message of fixed size: the number of dimensions, the sizes, zeros."""
        sizes = torch.tensor([len(shape), *shape] + [0] * (_MOST_DIMENSIONS - len(shape)))
        work = self._edges.shapes_to(peer).backend.broadcast([sizes], _from_source())
        self._shapes_sent.append((work, sizes))
        while self._shapes_sent and self._shapes_sent[0][0].is_completed():
            self._shapes_sent.popleft()[0].wait()


def _from_source() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = 0, True
    return options
