"""NCCL's rules for messages, between real processes, by gloo.

What differs from gloo, and what a schedule must survive: messages are matched by their order, not
by a tag; all of a communicator run one after the other in one stream; a send ends when the receive
is reached in the peer's stream, and not before.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from megatron_ext.runtime.edges import Edge, Edges, Line


class Work:
    """A message in a stream."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, transfer: Any) -> None:
        """In the stream's thread."""
        try:
            transfer()
        except BaseException as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Without waiting."""
        return self._done.is_set()

    def wait(self) -> None:
        """Until the message is transferred."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Communicator:
    """``send`` and ``recv`` as ``ProcessGroupNCCL`` has them, over a gloo backend."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._stream: queue.SimpleQueue[tuple[Work, Any]] = queue.SimpleQueue()
        self._count: dict[tuple[str, int], int] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """The tag is not looked at."""
        number = self._number("sent", peer)

        def transfer() -> None:
            self._gloo.recv([torch.empty(1)], peer, 2 * number).wait()  # the peer has come
            self._gloo.send(tensors, peer, 2 * number + 1).wait()

        return self._enqueue(transfer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """The tag is not looked at."""
        number = self._number("received", peer)

        def transfer() -> None:
            self._gloo.send([torch.zeros(1)], peer, 2 * number).wait()
            self._gloo.recv(tensors, peer, 2 * number + 1).wait()

        return self._enqueue(transfer)

    def _number(self, kind: str, peer: int) -> int:
        number = self._count[kind, peer] = self._count.get((kind, peer), -1) + 1
        return number

    def _enqueue(self, transfer: Any) -> Work:
        work = Work()
        self._stream.put((work, transfer))
        return work

    def _run(self) -> None:
        while True:
            work, transfer = self._stream.get()
            work.run(transfer)


class NcclEdges(Edges):
    """``Edges`` with such communicators; one for all of a rank where it has none of its own."""

    _whole: Communicator | None = None

    def _line(self, edge: Edge, kind: str) -> Line:
        line = super()._line(edge, kind)
        if kind == "shapes":
            return line
        if self.options.own:
            return Line(Communicator(line.backend), line.peer)
        if self._whole is None:
            self._whole = Communicator(line.backend)
        return Line(self._whole, line.peer)
