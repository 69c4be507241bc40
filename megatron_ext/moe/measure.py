"""What the operations of one MoE layer cost here and now, for the selector.

Runs once a layer and process, before its first call: with messages and rows of a few sizes, on
buffers of its own. Devices and ranks wait for each other, as they never do later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..offload.device import Device, Direction
from ..offload.rates import copy_seconds
from .cost_file import LINES, measured
from .costs import LayerShape, Line, chunk_rows
from .decide import Measured
from .exchange import Chunk, Row
from .graph import Graph
from .region import Region

PARTS = (8, 4, 2)  # rows of a call over rows that are measured: no more memory than half a call has
REPEATS = 3


def measure(
    region: Region, shape: LayerShape, rows: int, dtype: torch.dtype, probs: torch.dtype
) -> Measured:
    """Measure; all ranks of the layer's groups call this together, with the same arguments.

    The experts' backward pass runs for output gradients of zero, so that whatever adds to weight
    gradients inside it adds nothing.

    Args:
        region: of the layer.
        shape: of the layer; its hidden size is that of the rows which travel.
        rows: that the busiest rank's experts get in a call.
        dtype: of the rows. probs: of the probabilities.

    Returns:
        The slowest rank's costs, the same on all ranks.
    """
    probe = _Probe(region, shape, dtype, probs)
    sizes = sorted({max(1, rows // part) for part in PARTS})
    sizes += [sizes[0] + 1] * (len(sizes) == 1)  # a line needs two
    samples: list[tuple[float, float, float, float, float]] = []
    kept = 0.0
    for size in sizes:
        forward, backward, inside = probe.experts(size)
        out, back = probe.copies(size)
        samples.append((probe.all_to_all(size), forward, backward, out, back))
        kept = max(kept, inside / size)
    table = torch.tensor([[*row, kept] for row in samples], dtype=torch.float64)
    table = table.to(probe.device.torch_device)
    dist.all_reduce(table, dist.ReduceOp.MAX, region.exchange.groups.tp_ep)
    *columns, kept_column = table.t().tolist()
    exchanged = [shape.exchange_bytes(size) for size in sizes]
    copied = [float(size * shape.hidden * dtype.itemsize) for size in sizes]
    axes: tuple[Sequence[float], ...] = (exchanged, sizes, sizes, copied, copied)
    found = (
        # Where the experts are not spread over ranks, no message leaves one.
        Line.through(list(zip(volumes, column))) if any(volumes) else Line(0.0, 0.0, min(column))
        for volumes, column in zip(axes, columns)
    )
    return measured(dict(zip(LINES, found)), kept_column[0])


class _Probe:
    """Times of one rank, milliseconds."""

    def __init__(
        self, region: Region, shape: LayerShape, dtype: torch.dtype, probs: torch.dtype
    ) -> None:
        self._region, self._exchange = region, region.exchange
        self._width, self._dtype, self._probs = shape.hidden, dtype, probs
        self.device: Device = region.memory.device

    def _least(self, task: Callable[[], None]) -> float:
        def seconds() -> float:
            started = time.perf_counter()
            task()
            self._wait()
            return time.perf_counter() - started

        return self._least_of(seconds)

    def _least_of(self, seconds: Callable[[], float]) -> float:
        best = float("inf")
        for _ in range(1 + REPEATS):
            self._wait()
            dist.barrier(self._exchange.groups.tp_ep)
            self._wait()
            # The first one pays for what is loaded once; then it is only more.
            best = min(best, seconds())
        return max(best * 1000, 1e-4)

    def _wait(self) -> None:
        if self.device.torch_device.type == "cuda":
            torch.cuda.current_stream(self.device.torch_device).synchronize()

    def all_to_all(self, rows: int) -> float:
        """A message that takes ``rows`` rows, with their probabilities, to each rank's experts."""
        exchange = self._exchange
        if exchange.ep_size == 1:
            return 1e-4
        nbytes = Row((self._width, self._dtype), (1, self._probs)).nbytes
        even = [-(-rows // (exchange.tp_size * exchange.ep_size))] * exchange.ep_size
        given, out = (
            torch.zeros(sum(even), nbytes, dtype=torch.uint8, device=self._at) for _ in range(2)
        )

        def send() -> None:
            exchange.send(out, given, even, even).wait()

        return self._least(send)

    @property
    def _at(self) -> torch.device:
        return self.device.torch_device

    def experts(self, rows: int) -> tuple[float, float, int]:
        """Forward, backward, and bytes that the experts keep besides their input."""
        exchange, region = self._exchange, self._region
        counts = torch.tensor(chunk_rows(rows, exchange.local_experts))
        gathered = chunk_rows(rows, exchange.tp_size)
        chunk = Chunk(0, 0, [], [gathered[exchange.tp_rank]], gathered, counts)
        own = torch.zeros(chunk.received_rows, self._width, dtype=self._dtype, device=self._at)
        p = torch.zeros(rows, dtype=self._probs, device=self._at)
        trained = [q for q in region.parameters if q.requires_grad]
        residents = region.memory.know(region.parameters)
        kept: dict[int, int] = {}
        graphs: list[Graph] = []
        x = exchange.gather(own, chunk)
        others = {t.untyped_storage()._cdata for t in (own, p, x)} | residents

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in others:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        def forward() -> None:
            graphs.clear()
            kept.clear()
            rows_in = exchange.gather(own, chunk)
            others.add(rows_in.untyped_storage()._cdata)
            with torch.enable_grad():
                graph = Graph(rows_in, p)
                with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    y = region.experts(graph.inputs[0], counts, graph.inputs[1])
                y = graph.end(y)
            exchange.reduce(y, chunk, torch.promote_types(self._probs, torch.float32))
            graphs.append(graph)

        def backward() -> None:
            self._wait()
            graphs.pop().run(torch.zeros_like(x), trained)

        def suspended() -> None:
            if region.store is None:
                backward()
            else:
                with region.store.suspended():
                    backward()

        there = self._least(forward)
        nbytes = sum(kept.values())

        def both() -> None:
            forward()
            suspended()

        return there, max(self._least(both) - there, 1e-4), nbytes

    def copies(self, rows: int) -> tuple[float, float]:
        """The experts' input to the host, and back."""
        nbytes = rows * self._width * self._dtype.itemsize
        near = self.device.allocate(nbytes)
        far = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.pins_host_memory)

        def least(direction: Direction) -> float:
            return self._least_of(
                lambda: copy_seconds(self.device, {direction: (near, far)})[direction]
            )

        return least(Direction.TO_HOST), least(Direction.TO_DEVICE)
