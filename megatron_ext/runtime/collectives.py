"""Collectives of all ranks of a pipeline, beside their passes.

All ranks start the same chains of collectives in the same order; a chain also computes what lies
between its collectives. On CUDA it is launched at once, on a stream and a communicator of its own.
Gloo's collectives block the host, so on the CPU a thread runs the chains: a rank that waits for a
message still takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from .communicators import PerGroup, end
from .edges import communicator
from .threads import Worker

Chain = Callable[[], Any]


class Collectives:
    """This rank's part of the chains. Collective over ``group``.

    Args:
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size, self.rank = group.size(), group.rank()
        self._runs: _Stream | _Thread = _Stream() if device.type == "cuda" else _Thread()
        self._backend = communicator(group, range(self.size), "megatron_ext/collectives", device)
        # NCCL connects all ranks at their first collective.
        self._backend.allreduce([torch.zeros(1, device=device)]).wait()

    def start(self, name: Hashable, chain: Chain, held: Iterable[torch.Tensor] = ()) -> None:
        """Start a chain behind those that were started before.

        Args:
            name: to wait for it.
            chain: calls the collectives below; what it returns is for ``wait``. It runs without
                autograd.
            held: tensors of this stream that the chain uses.
        """
        self._runs.start(name, chain, held)

    def wait(self, name: Hashable) -> Any:
        """Block (CUDA: make the current stream wait) until a chain has ended; what it returned.

        Once a chain. An exception of the chain is raised here.
        """
        return self._runs.wait(name)

    def finish(self) -> None:
        """Wait for all chains that nothing has waited for."""
        for name in self._runs.unfinished():
            self._runs.wait(name)

    def close(self, abort: bool = False) -> None:
        """End the communicator and the thread; see ``communicators.close``."""
        self._runs.close()
        end(self._backend, abort)

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """``tensor`` of rank ``root``, in place; contiguous. Within a chain."""
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = root, True
        self._backend.broadcast([tensor], options).wait()
        return tensor

    def reduce(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """The sum of all ranks' ``tensor`` on rank ``root``, in place (undefined on the others);
        contiguous. Within a chain."""
        options = dist.ReduceOptions()
        options.rootRank, options.asyncOp = root, True
        self._backend.reduce([tensor], options).wait()
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' ``tensor``, with a new first dimension; contiguous. Within a chain."""
        out = tensor.new_empty(self.size, *tensor.shape)
        self._backend.allgather([list(out)], [tensor]).wait()
        return out


class _Stream:
    """Runs chains on a CUDA stream, in the order in which they are started."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._ended: dict[Hashable, tuple[torch.cuda.Event, Any]] = {}

    def start(self, name: Hashable, chain: Chain, held: Iterable[torch.Tensor]) -> None:
        # This also lets a chain reuse memory of the stream that others have used meanwhile.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            result = chain()
            event = torch.cuda.Event()
            event.record()
        for tensor in held:
            tensor.record_stream(self._stream)
        self._ended[name] = event, result

    def wait(self, name: Hashable) -> Any:
        event, result = self._ended.pop(name)
        torch.cuda.current_stream().wait_event(event)
        return result

    def unfinished(self) -> list[Hashable]:
        return list(self._ended)

    def close(self) -> None:
        self._ended.clear()


class _Thread:
    """Runs chains on a thread, in the order in which they are started."""

    def __init__(self) -> None:
        self._worker = Worker("collectives")
        self._results: dict[Hashable, Future[Any]] = {}

    def start(self, name: Hashable, chain: Chain, held: Iterable[torch.Tensor]) -> None:
        def task() -> Any:
            with torch.no_grad():
                return chain()

        result = self._results[name] = Future()
        self._worker.put(task, result)

    def wait(self, name: Hashable) -> Any:
        return self._results.pop(name).result()

    def unfinished(self) -> list[Hashable]:
        return list(self._results)

    def close(self) -> None:
        self._worker.end()  # it may wait for a rank that has failed


_COLLECTIVES: PerGroup[Collectives] = PerGroup()


def collectives(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """The one ``Collectives`` of a group and device. Collective at its first call."""
    return _COLLECTIVES.get(group, device, lambda: Collectives(group, device))
