"""Two-rank communicators for the messages of a pipeline, one for each direction between two ranks.

NCCL runs all point-to-point messages of a communicator in one stream (one for each pair of ranks in
PyTorch's former backend), so a receive that waits for its sender holds back every message behind
it. With a communicator for each directed edge only messages on the same way wait for each other,
and these are received in the order in which they are sent.

The communicators are made from PyTorch's backend classes, not by ``new_group``: that is collective
over the whole job, or, with local synchronisation, derives the group's name from counters that
differ between the members of two pipeline stages.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .communicators import PerGroup, end, store_of, timeout_of

Edge = tuple[int, int]  # source and target, ranks of the pipeline


@dataclass(frozen=True)
class MessageOptions:
    """How messages travel.

    Attributes:
        own: over communicators of their own; False: over the pipeline's process group.
        buffers: messages are copied to and from memory that is kept, so that no communicator
            delays the release of activations; not where shapes vary.
    """

    own: bool = True
    buffers: bool = False


DEFAULT = MessageOptions()


class Line(NamedTuple):
    """One end of a directed edge.

    Attributes:
        backend: sends or receives.
        peer: the other end's rank in it.
    """

    backend: Any
    peer: int


class Edges:
    """This rank's ends of a pipeline's directed edges.

    Args:
        purpose: messages of one purpose share the communicator of an edge, others do not wait for
            them.
        options: see ``MessageOptions``.

    Attributes:
        rank: this process's, in the pipeline.

    Raises:
        ValueError: the group's backend has no communicators that could be made here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        purpose: str,
        device: torch.device,
        options: MessageOptions = DEFAULT,
    ) -> None:
        backend = dist.get_backend(group)
        if options.own and backend in ("mpi", "ucc"):
            raise ValueError(
                f"messages cannot have communicators of their own in a process group of {backend}; "
                "give --pp-p2p pipeline"
            )
        self.rank, self.options = group.rank(), options
        # The group ends its edges, so they must not keep it.
        self._group, self._purpose, self._device = weakref.ref(group), purpose, device
        self._data: dict[Edge, Line] = {}
        self._shapes: dict[Edge, Line] = {}
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[torch.Tensor]]
        self._free = defaultdict(list)

    def connect(self, edges: Iterable[Edge], shapes: bool = False) -> None:
        """Make what is missing for ``edges``, and send one element over each.

        Collective over the ranks of these edges; a later call makes only what is new.

        Args:
            shapes: messages will be preceded by their shapes (see ``Channel``).
        """
        edges = set(edges)
        for edge in _in_rounds(edges - self._data.keys()):
            if self.rank in edge:
                self._data[edge] = self._line(edge, "data")
                if self.options.own:
                    self._warm_up(edge)
        if shapes:
            for edge in _in_rounds(edges - self._shapes.keys()):
                if self.rank in edge:
                    self._shapes[edge] = self._line(edge, "shapes")

    def close(self, abort: bool = False) -> None:
        """End the communicators; see ``communicators.close``."""
        lines = [*self._shapes.values(), *(self._data.values() if self.options.own else ())]
        for line in lines:
            end(line.backend, abort)
        self._data, self._shapes = {}, {}
        self._free.clear()

    def to(self, peer: int) -> Line:
        """The way of messages to ``peer``."""
        return self._way((self.rank, peer))

    def back(self, peer: int) -> Line:
        """The way of messages from ``peer``."""
        return self._way((peer, self.rank))

    def shapes_to(self, peer: int) -> Line:
        """The way of shapes to ``peer``, in host memory; has ``broadcast``."""
        return self._shapes[self.rank, peer]

    def shapes_back(self, peer: int) -> Line:
        """The way of shapes from ``peer``, in host memory; has ``broadcast``."""
        return self._shapes[peer, self.rank]

    def keep_buffers(self, shape: torch.Size, dtype: torch.dtype) -> None:
        """Drop the memory of messages of other shapes: steps may each have a length."""
        for other in self._free.keys() - {(shape, dtype)}:
            del self._free[other]

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one message that was used before, if there is any; see ``give_back``."""
        free = self._free[shape, dtype]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nothing uses ``buffer`` any more, or will before what comes next in the stream."""
        self._free[buffer.shape, buffer.dtype].append(buffer)

    def _way(self, edge: Edge) -> Line:
        line = self._data[edge]
        return line if self.options.own else Line(self._group(), line.peer)

    def _line(self, edge: Edge, kind: str) -> Line:
        source, target = edge
        peer = target if source == self.rank else source
        if kind == "data" and not self.options.own:
            return Line(None, peer)  # over the group itself
        name = f"megatron_ext/{self._purpose}/{self.options}/{kind}/{source}>{target}"
        group = self._group()
        assert group is not None
        on_host = kind == "shapes"
        backend = communicator(group, edge, name, self._device, on_host)
        return Line(backend, 1 - edge.index(self.rank))

    def _warm_up(self, edge: Edge) -> None:
        # NCCL connects two ranks at their first message, which would block the host of one in the
        # middle of the schedule.
        backend, peer = self._data[edge]
        one = torch.zeros(1, device=self._device)
        source = edge[0] == self.rank
        (backend.send if source else backend.recv)([one], peer, 0).wait()


def communicator(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    name: str,
    device: torch.device,
    on_host: bool = False,
) -> Any:
    """A communicator of some ranks of ``group``, which its other ranks know nothing of.

    Collective over ``ranks``. It is made of PyTorch's backend classes: ``dist.new_group`` is
    collective over all, or derives names from counters that differ between stages.

    Args:
        group: has the store to meet in, and the time limit.
        ranks: in ``group``, in their order in the communicator.
        name: of the communicator; others of the same ranks have other names.
        on_host: for tensors in host memory.
    """
    prefixed = store_of(group, name)
    here, size = list(ranks).index(group.rank()), len(ranks)
    timeout = timeout_of(group, device)
    if on_host or device.type != "cuda" or dist.get_backend(group) == "gloo":
        return dist.ProcessGroupGloo(prefixed, here, size, gloo_options(timeout))
    settings: Any = dist.ProcessGroupNCCL.Options()
    settings._timeout = timeout
    settings.is_high_priority_stream = True  # messages do not queue behind computation
    settings.group_name = name
    settings.global_ranks_in_group = [dist.get_process_group_ranks(group)[rank] for rank in ranks]
    return dist.ProcessGroupNCCL(prefixed, here, size, settings)


_EDGES: PerGroup[Edges] = PerGroup()


def connected(
    group: dist.ProcessGroup,
    purpose: str,
    edges: Iterable[Edge],
    device: torch.device,
    options: MessageOptions = DEFAULT,
    shapes: bool = False,
) -> Edges:
    """The one ``Edges`` of a group, purpose, device and options, connected for ``edges``.

    Several models of a process may share a pipeline. Collective, as ``Edges.connect``.
    """
    key = purpose, device, options
    found = _EDGES.get(group, key, lambda: Edges(group, purpose, device, options))
    found.connect(edges, shapes)
    return found


def gloo_options(timeout: timedelta) -> Any:
    """Settings of a gloo group with one worker thread in place of two.

    Torch 2.15 notes the name of the last collective of a group in a string that its workers write
    without a lock. Where two collectives of a group run at once, that corrupts the heap.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = _gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))
    return options


@functools.cache
def _gloo_devices(pid: int, named: str | None) -> list[Any]:
    """The devices of all groups of a process; each has a thread that polls every 10 ms.

    Args:
        pid: a forked process has none of its parent's threads.
        named: interfaces, as torch reads the variable.
    """
    gloo: Any = dist.ProcessGroupGloo
    if named is None:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in named.split(",")]


def _in_rounds(edges: Iterable[Edge]) -> Iterator[Edge]:
    """``edges`` in an order that is the same on all ranks, so that making them one after another
    cannot deadlock, and in which as many as possible can be made at once."""
    left = sorted(edges, key=lambda edge: (min(edge), max(edge), edge))
    while left:
        busy: set[int] = set()
        later: list[Edge] = []
        for edge in left:
            if busy.isdisjoint(edge):
                busy.update(edge)
                yield edge
            else:
                later.append(edge)
        left = later
