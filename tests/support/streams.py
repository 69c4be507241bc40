"""A CPU device that computes as a GPU does: several streams, behind the host, and reused memory.

Inside ``with device:`` torch's operations on CPU tensors become kernels of the current stream. A
stream in ``eager`` runs its kernels as soon as its waits allow; every other stream as late as
events and the host allow. So one run is the worst order of its kind, the same each time: a missing
wait reads what was not written yet, or overwrites what was not read yet.

Memory is freed to the pool of the stream that was current when it was allocated, filled with 0xFF
(NaN in every float format) by that stream, and given out again at once, last block first. A stream
that uses memory of another one must record that (``record_use``), as with CUDA's caching allocator.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from megatron_ext.offload.blocks import Form
from megatron_ext.offload.device import Direction, Pairs

COMPUTE = "compute"
COPIES = ("copy 0", "copy 1")
# Their outputs share memory with an argument, whatever the schema says.
_METADATA = ("aten::set_", "aten::resize_", "aten::_unsafe_view", "aten::_reshape_alias")
_EMPTY = ("aten::empty", "aten::new_empty")
# What the host has to wait for.
_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")


class Stream:
    """Kernels in order; ``done`` of them have run."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], Any]] = deque()
        self.done = self.wanted = 0
        self._running = False

    @property
    def end(self) -> int:
        """How many there will have been."""
        return self.done + len(self.queue) + self._running

    def run(self, until: int) -> None:
        """Run kernels until so many are done."""
        self.wanted = max(self.wanted, until)
        if self._running:  # Memory freed inside a kernel.
            return
        while self.done < self.wanted:
            self._running, kernel = True, self.queue.popleft()
            with _disable_current_modes():
                kernel()
            self._running, self.done = False, self.done + 1


class StreamEvent:
    """After so many kernels of a stream; ``time`` is when, by the kernels of the device."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number, self.time = stream, number, 0

    def query(self) -> bool:
        """True if they have run."""
        return self.stream.done >= self.number

    def synchronize(self) -> None:
        """Run them."""
        self.stream.run(self.number)


class Memory:
    """One piece of the device's memory, and the streams that may still use it."""

    def __init__(self, stream: str, nbytes: int) -> None:
        self.stream, self.nbytes = stream, nbytes
        self.pages = mmap.mmap(-1, nbytes)
        with _disable_current_modes():
            self.whole = torch.frombuffer(self.pages, dtype=torch.uint8)
        self.users: set[str] = set()
        self.events: list[StreamEvent] = []


class StreamDevice(TorchDispatchMode):
    """Implements ``megatron_ext.offload.device.Device``.

    Args:
        eager: streams that run as early as they may.
    """

    pins_host_memory = False

    def __init__(self, eager: Sequence[str] = (COMPUTE,), **unused: Any) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.eager, self.current = frozenset(eager), COMPUTE
        self._streams: dict[str, Stream] = defaultdict(Stream)
        self._free: dict[tuple[str, int], list[Memory]] = defaultdict(list)
        self._used: dict[int, Memory] = {}
        self._shared: list[Memory] = []

    # --- streams ---

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """``stream`` is the current one inside the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, kernel: Callable[[], Any], stream: str | None = None) -> None:
        """Give ``kernel`` to a stream."""
        name = stream or self.current
        on = self._streams[name]
        on.queue.append(kernel)
        if name in self.eager:
            on.run(on.end)

    def stream(self) -> str:
        return self.current

    def record(self, timed: bool = False) -> StreamEvent:
        stream = self._streams[self.current]
        event = StreamEvent(stream, stream.end + 1)
        self.launch(lambda: setattr(event, "time", self.done()))
        return event

    def waited(self, reached: StreamEvent, copied: StreamEvent) -> float | None:
        both = reached.query() and copied.query()
        return float(copied.time - reached.time) if both else None

    def wait(self, event: Any) -> None:
        self.launch(event.synchronize)

    def copy(
        self,
        stream: int,
        direction: Direction,
        pairs: Pairs,
        after: Sequence[Any],
    ) -> StreamEvent:
        with self.on(COPIES[stream]), _disable_current_modes():
            for event in after:
                self.wait(event)
            for to, source in pairs:
                a, b = self._raw(to), self._raw(source)
                self.launch(lambda a=a, b=b: a.copy_(b))  # type: ignore[misc]
            return self.record()

    def synchronize(self, *names: str) -> None:
        """Run everything of these streams, or of all."""
        for name in names or list(self._streams):
            self._streams[name].run(self._streams[name].end)

    def close(self) -> None:
        self.synchronize()

    def launched(self) -> int:
        """Kernels that were given to any stream."""
        return sum(stream.end for stream in self._streams.values())

    def done(self) -> int:
        """Those that have run."""
        return sum(stream.done for stream in self._streams.values())

    # --- memory ---

    def allocate(self, nbytes: int, form: Form | None = None) -> torch.Tensor:
        for memory in [m for m in self._shared if all(e.query() for e in m.events)]:
            self._shared.remove(memory)
            self._reuse(memory)
        size = max(1, -(-nbytes // 512)) * 512
        pool = self._free[self.current, size]
        memory = pool.pop() if pool else Memory(self.current, size)
        memory.users, memory.events = set(), []
        # Every tensor over it owns ``owner``; kernels do not.
        owner = memoryview(memory.pages)
        self._used[memory.whole.data_ptr()] = memory
        weakref.finalize(owner, self._drop, memory).atexit = False
        with _disable_current_modes():
            piece = torch.frombuffer(owner, dtype=torch.uint8)[:nbytes]
            if form is None:
                return piece
            return piece.view(form.dtype).as_strided(form.shape, form.stride)

    def record_use(self, buffer: torch.Tensor) -> None:
        memory = self._used.get(buffer.untyped_storage().data_ptr())
        if memory is not None and memory.stream != self.current:
            memory.users.add(self.current)

    def discard(self, buffer: torch.Tensor) -> None:
        pass

    def _drop(self, memory: Memory) -> None:
        del self._used[memory.whole.data_ptr()]
        memory.events = [StreamEvent(self._streams[n], self._streams[n].end) for n in memory.users]
        if memory.events:
            self._shared.append(memory)
        else:
            self._reuse(memory)

    def _reuse(self, memory: Memory) -> None:
        self.launch(lambda: memory.whole.fill_(0xFF), memory.stream)
        self._free[memory.stream, memory.nbytes].append(memory)

    def _raw(self, value: Any) -> Any:
        """A tensor as a kernel sees it: its memory, which it does not own."""
        if not isinstance(value, torch.Tensor) or not value.numel():
            return value
        memory = self._used.get(value.untyped_storage().data_ptr())
        if memory is None:  # Not of this device: the host's, or made outside.
            return value.detach()
        at = value.storage_offset(), value.shape, value.stride()
        return torch.empty(0, dtype=value.dtype).set_(memory.whole.untyped_storage(), *at)

    def _empty(self, like: Any) -> Any:
        """Memory with the shape and strides of a tensor."""
        if not isinstance(like, torch.Tensor):
            return like
        steps = zip(like.shape, like.stride())
        length = 1 + sum((size - 1) * step for size, step in steps) if like.numel() else 0
        storage = self.allocate(length * like.element_size()).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())

    # --- operations ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith(_READS):
            self.synchronize()
        if func.is_view or name.startswith((*_METADATA, *_READS)):
            return func(*args, **kwargs)
        written = [
            number
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        raw_args, raw_kwargs = tree_map(self._raw, (args, kwargs))
        if written:
            self.launch(lambda: func(*raw_args, **raw_kwargs))
            result = args[written[0]] if written[0] < len(args) else kwargs["out"]
            return None if not func._schema.returns else result
        inputs = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        if not inputs:  # Nothing to wait for, and random numbers are drawn in the host's order.
            values = func(*args, **kwargs)
            if not isinstance(values, torch.Tensor):
                return values
            result = self._empty(values)
            if not name.startswith(_EMPTY):
                target = self._raw(result)
                self.launch(lambda: target.copy_(values))
            return result
        # Shapes come from whatever the arguments hold now, so indices must not be results.
        values = func(*raw_args, **raw_kwargs)
        results = tree_map(self._empty, values)
        targets = tree_flatten(tree_map(self._raw, results))[0]
        # An early stream without a backlog has computed just what its kernel would.
        now = self.current in self.eager and not self._streams[self.current].queue

        def kernel() -> None:
            found = tree_flatten(values if now else func(*raw_args, **raw_kwargs))[0]
            for to, value in zip(targets, found):
                if isinstance(to, torch.Tensor):
                    to.copy_(value)

        if not name.startswith(_EMPTY):
            self.launch(kernel)
        return results


# --- work on another stream, forward and backward ---


class _Wait(torch.autograd.Function):
    """One stream waits for another here, and the other one for it in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, device: StreamDevice, waits: str, last: str
    ) -> torch.Tensor:
        ctx.device, ctx.waits, ctx.last = device, waits, last
        return _crossed(device, x.view_as(x), waits, last)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _crossed(ctx.device, grad, ctx.last, ctx.waits), None, None, None


def _crossed(device: StreamDevice, x: torch.Tensor, waits: str, last: str) -> torch.Tensor:
    with device.on(last):
        event = device.record()
    with device.on(waits):
        device.wait(event)
        device.record_use(x)
    return x


def _arrived(device: StreamDevice, grad: torch.Tensor, stream: str) -> None:
    _crossed(device, grad, COMPUTE, stream)


def beside(
    device: StreamDevice, stream: str, function: Callable[[Any], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """``function(x)`` on ``stream``, with its backward pass, as autograd does it on CUDA: a node
    runs on the stream of its forward, gradients wait and are recorded where streams change."""
    x = _Wait.apply(x, device, stream, COMPUTE)
    with device.on(stream):
        y = function(x)
    todo, seen = [y.grad_fn], {x.grad_fn, None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [other for other, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            node.register_prehook(lambda grads: _arrived(device, grads[0], stream))
            continue
        node.register_prehook(lambda grads: setattr(device, "current", stream))
        node.register_hook(lambda ins, outs: setattr(device, "current", COMPUTE))
    result: torch.Tensor = _Wait.apply(y, device, COMPUTE, stream)
    return result
