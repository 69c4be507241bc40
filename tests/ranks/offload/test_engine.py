"""The engine's ordering edges, one by one, with compute as a stream of its own.

A scenario makes one piece of work slow, and the numbers come out right only because something waits
for it. Taking that one edge away has to give wrong numbers (mutation check).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.offload.device import CpuDevice, Direction, Faults
from megatron_ext.offload.engine import EDGES, Engine, FileTurns, Policy
from megatron_ext.offload.errors import OffloadConfigError

pytestmark = pytest.mark.timeout(60)

SLOW = 0.08  # seconds; everything else takes microseconds
# A busy machine may delay what should be fast by as much; then slow has to be slower.
SLOWER = (1, 4, 16)
NBYTES = 4096


class Bench:
    """Sets made of one block, moved through an engine whose compute stream is a thread."""

    def __init__(self, engine: Engine, slow: float = SLOW) -> None:
        self.engine, self.device, self.slow = engine, engine.device, slow
        self.seen: list[tuple[int, bytes]] = []

    def forward(self, value: int, slow: float = 0.0) -> tuple[Any, torch.Tensor]:
        """F: compute writes ``value`` into a new block."""
        block = self.device.allocate(NBYTES)
        self.compute(lambda: block.fill_(value), slow)
        return self.engine.produced(), block

    def backward(self, block: torch.Tensor, value: int, slow: float = 0.0) -> None:
        """B: compute reads the block, which should hold ``value``."""
        self.compute(lambda: self.seen.append((value, bytes(block.tolist()))), slow)

    def compute(self, task: Callable[[], Any], slow: float = 0.0) -> None:
        """Compute does something."""
        self.device.compute(lambda: (time.sleep(slow), task()))

    def drop(self, block: torch.Tensor) -> None:
        """The block's memory goes back, and compute writes garbage to it."""
        self.device.discard(block)

    def back(self, ticket: Any) -> torch.Tensor:
        """PREPARE and RELOAD."""
        (buffer,) = self.engine.prepare(ticket)
        self.engine.reload(ticket, [buffer])
        return buffer

    def right(self) -> bool:
        """Whether all backward passes have read what their forward passes wrote."""
        self.device.synchronize()
        assert self.seen
        return all(content == bytes([value]) * NBYTES for value, content in self.seen)


def slow_forward(bench: Bench) -> None:
    """The copy to the host is issued while F still runs."""
    ticket, block = bench.forward(1, slow=bench.slow)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_offload(bench: Bench) -> None:
    """The memory is dropped while the copy to the host still reads it."""
    bench.device.faults.delay = lambda way: bench.slow if way is Direction.TO_HOST else 0.0
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_former_owner(bench: Bench) -> None:
    """The prepared buffer lies where compute still does what it was given before."""
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.compute(lambda: None, slow=bench.slow)
    bench.drop(block)  # Garbage is written to it, after the slow task.
    buffer = bench.back(ticket)
    assert buffer is block
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_offload_unreleased(bench: Bench) -> None:
    """Read back before it is complete; no release makes compute wait for it (a patient one)."""
    bench.device.faults.delay = lambda way: bench.slow if way is Direction.TO_HOST else 0.0
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    assert not bench.engine.release(ticket, patient=True)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_reload(bench: Bench) -> None:
    """B is issued while the reload still runs."""
    bench.device.faults.delay = lambda way: bench.slow if way is Direction.TO_DEVICE else 0.0
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_slot_reader(bench: Bench) -> None:
    """A second set takes the place on the host from which the first is still being read."""
    bench.device.faults.delay = lambda way: bench.slow if way is Direction.TO_DEVICE else 0.0
    first, block = bench.forward(1)
    bench.engine.offload(first, [block])
    bench.engine.release(first)
    buffer = bench.back(first)
    second, other = bench.forward(2)
    bench.engine.offload(second, [other])
    bench.engine.use(first)
    bench.backward(buffer, 1)


def unused_reload(bench: Bench) -> None:
    """A set nobody reads is finished, and its buffer goes to the next forward pass."""
    bench.device.faults.delay = lambda way: bench.slow if way is Direction.TO_DEVICE else 0.0
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    buffer = bench.back(ticket)
    bench.engine.finish(ticket)
    bench.drop(buffer)
    _, other = bench.forward(2)
    assert other is buffer
    bench.backward(other, 2, slow=2 * bench.slow)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "offload-after-forward": slow_forward,
    "release-after-offload": slow_offload,
    "reload-after-prepare": slow_former_owner,
    "reload-after-offload": slow_offload_unreleased,
    "use-after-reload": slow_reload,
    "offload-after-slot-read": slow_slot_reader,
    "drop-after-reload": unused_reload,
}


def _bench(make_engine: Any, slow: float = SLOW, **kwargs: Any) -> Bench:
    kwargs |= {"compute_thread": True, "recycle": True, "faults": Faults(poison=True)}
    # Room for one set on the host, so that a second one has to take its place.
    engine = make_engine(arena_bytes=NBYTES, **kwargs)
    engine.arena.seal()
    return Bench(engine, slow)


def test_every_edge_has_its_scenario():
    assert set(SCENARIOS) == set(EDGES)


@pytest.mark.parametrize("policy", ["single", "dual"])
@pytest.mark.parametrize("edge", EDGES)
def test_right_with_all_edges(make_engine, edge, policy):
    bench = _bench(make_engine, policy=policy)
    SCENARIOS[edge](bench)
    assert bench.right()


@pytest.mark.parametrize("edge", EDGES)
def test_wrong_without_the_edge(make_engine, edge):
    # Full duplex: a single stream keeps some of the order by itself.
    for factor in SLOWER:
        bench = _bench(make_engine, SLOW * factor, policy="dual", skip_edges=[edge])
        SCENARIOS[edge](bench)
        if not bench.right():
            return
    pytest.fail(f"without {edge} ({EDGES[edge]}) the numbers were right")


def test_the_host_never_waits(make_engine):
    """All work of a set's life is issued while its first pass has not even run."""
    bench = _bench(make_engine, policy="dual")
    issued = threading.Event()
    in_time: list[bool] = []
    bench.compute(lambda: in_time.append(issued.wait(10)))
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)
    bench.engine.finish(ticket)
    issued.set()
    assert bench.right()
    assert in_time == [True]
    assert bench.engine.counters.waited_releases == 1


def test_no_room_means_no_transfer(make_engine):
    bench = _bench(make_engine)
    first, block = bench.forward(1)
    second, other = bench.forward(2)
    assert bench.engine.offload(first, [block])
    assert not bench.engine.offload(second, [other])
    assert bench.engine.counters.refused == 1
    bench.engine.finish(second)
    bench.engine.finish(first)
    third, another = bench.forward(3)
    assert bench.engine.offload(third, [another])


def test_a_failed_copy_is_reported_where_it_is_waited_for(make_engine):
    def fail(way: Direction) -> float:
        raise OSError("link down")

    engine = make_engine(faults=Faults(delay=fail))
    block = engine.device.allocate(64)
    ticket = engine.produced()
    engine.offload(ticket, [block])
    with pytest.raises(RuntimeError, match="a transfer failed: link down"):
        engine.device.wait(ticket.sent)
    with pytest.raises(RuntimeError, match="link down"):
        engine.synchronize()
    engine.device.synchronize()


def test_pairs_never_go_the_same_way_at_once(make_engine, tmp_path):
    """Two ranks that share a link; without turns their copies overlap."""

    def overlap(turns: bool) -> float:
        copies: list[tuple[float, float, Any]] = []
        engines = []
        for _ in range(2):
            engine = make_engine(
                "paired" if turns else "single",
                turns=FileTurns(tmp_path) if turns else None,
                throttle_bytes_per_second=dict.fromkeys(Direction, 1000000.0),
            )
            engines.append(engine)
        events = []
        for _ in range(3):
            for engine in engines:
                ticket = engine.produced()
                assert engine.offload(ticket, [torch.ones(20_000, dtype=torch.uint8)])
                buffers = engine.prepare(ticket)
                engine.reload(ticket, buffers)
                events += [(ticket.sent, "out"), (ticket.arrived, "in")]
        for event, way in events:
            event.synchronize()
            copies.append((*event.span, way))
        shared = 0.0
        for number, (start, end, way) in enumerate(copies):
            for other, last, direction in copies[:number]:
                if way == direction:
                    shared += max(0.0, min(end, last) - max(start, other))
        return shared

    assert overlap(turns=False) > 0
    assert overlap(turns=True) == 0


def test_policies_are_checked(make_engine):
    with pytest.raises(OffloadConfigError, match="paired needs a neighbour"):
        make_engine("paired")
    with pytest.raises(ValueError, match="triple"):
        make_engine("triple")
    with pytest.raises(ValueError, match="no such ordering edges: .'typo'."):
        make_engine(skip_edges=["typo"])


def test_the_device_is_cpu():
    device = CpuDevice()
    assert device.torch_device == torch.device("cpu") and Policy("dual") is Policy.DUAL
    device.close()
