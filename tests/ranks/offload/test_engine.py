"""The engine's ordering edges, one by one, with compute as a stream of its own.

A scenario holds one piece of work back, and the numbers come out right only because something waits
for it. Taking that one edge away has to give wrong numbers (mutation check): then the work is held
until what should have waited for it is done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.offload.device import CpuDevice, Direction
from megatron_ext.offload.engine import EDGES, Engine, FileLinkLock, Policy
from megatron_ext.offload.errors import OffloadConfigError
from tests.support.faulty_device import Faults
from tests.support.waiting import wait_until

from .stream_device import StreamDevice

# With all edges nothing can overtake the work that is held: it goes on by itself.
SLOW = 0.08  # seconds
NBYTES = 4096


class Bench:
    """Sets made of one block, moved through an engine whose compute stream is a thread."""

    def __init__(self, engine: Engine, patience: float = SLOW) -> None:
        self.engine, self.device, self.patience = engine, engine.device, patience
        self.seen: list[tuple[int, bytes]] = []

    def forward(self, value: int) -> tuple[Any, torch.Tensor]:
        """F: compute writes ``value`` into a new block."""
        block = self.device.allocate(NBYTES)
        self.device.compute(lambda: block.fill_(value))
        return self.engine.produced(), block

    def backward(self, block: torch.Tensor, value: int) -> None:
        """B: compute reads the block, which should hold ``value``."""
        self.device.compute(lambda: self.seen.append((value, bytes(block.tolist()))))

    def hold(self, overtaken: Callable[[], bool]) -> None:
        """Wait in a stream until what should come later has come, if it can."""
        with contextlib.suppress(AssertionError):
            wait_until(overtaken, "nothing overtakes", self.patience, every=0.001)

    def hold_copies(self, held: Direction, overtaken: Callable[[], bool]) -> None:
        """Every copy of a direction is held."""

        def delay(way: Direction) -> float:
            if way is held:
                self.hold(overtaken)
            return 0.0

        self.device.faults.delay = delay

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
    tickets: list[Any] = []
    bench.device.compute(lambda: bench.hold(lambda: any(map(_sent, tickets))))
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    tickets.append(ticket)
    bench.engine.release(ticket)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def _sent(ticket: Any) -> bool:
    return ticket.sent is not None and ticket.sent.query()


def _arrived(ticket: Any) -> bool:
    return ticket.arrived is not None and ticket.arrived.query()


def slow_offload(bench: Bench) -> None:
    """The memory is dropped while the copy to the host still reads it."""
    dropped = threading.Event()
    bench.hold_copies(Direction.TO_HOST, dropped.is_set)
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    bench.device.compute(dropped.set)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_former_owner(bench: Bench) -> None:
    """The prepared buffer lies where compute still does what it was given before."""
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.device.compute(lambda: bench.hold(lambda: _arrived(ticket)))
    bench.drop(block)  # Garbage is written to it, after the task that is held.
    buffer = bench.back(ticket)
    assert buffer is block
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_offload_unreleased(bench: Bench) -> None:
    """Read back before it is complete; no release makes compute wait for it."""
    bench.hold_copies(Direction.TO_HOST, lambda: _arrived(ticket))
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_reload(bench: Bench) -> None:
    """B is issued while the reload still runs."""
    bench.hold_copies(Direction.TO_DEVICE, lambda: bool(bench.seen))
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def slow_slot_reader(bench: Bench) -> None:
    """A second set takes the place on the host from which the first is still being read."""
    tickets: list[Any] = []
    bench.hold_copies(Direction.TO_DEVICE, lambda: any(map(_sent, tickets)))
    first, block = bench.forward(1)
    bench.engine.offload(first, [block])
    bench.engine.release(first)
    buffer = bench.back(first)
    second, other = bench.forward(2)
    bench.engine.offload(second, [other])
    tickets.append(second)
    bench.engine.use(first)
    bench.backward(buffer, 1)


def unused_reload(bench: Bench) -> None:
    """A set nobody reads is finished, and its buffer goes to the next forward pass."""
    written = threading.Event()
    bench.hold_copies(Direction.TO_DEVICE, written.is_set)
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    bench.engine.release(ticket)
    bench.drop(block)
    buffer = bench.back(ticket)
    bench.engine.finish(ticket)
    bench.drop(buffer)
    _, other = bench.forward(2)
    assert other is buffer
    bench.device.compute(written.set)
    bench.device.compute(lambda: bench.hold(lambda: _arrived(ticket)))
    bench.backward(other, 2)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "offload-after-forward": slow_forward,
    "release-after-offload": slow_offload,
    "reload-after-prepare": slow_former_owner,
    "reload-after-offload": slow_offload_unreleased,
    "use-after-reload": slow_reload,
    "offload-after-slot-read": slow_slot_reader,
    "drop-after-reload": unused_reload,
}


def _bench(make_engine: Any, patience: float = SLOW, **kwargs: Any) -> Bench:
    # Room for one set on the host, so that a second one has to take its place.
    engine = make_engine(arena_bytes=NBYTES, device_class=StreamDevice, **kwargs)
    engine.arena.seal()
    return Bench(engine, patience)


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
    bench = _bench(make_engine, 60, policy="dual", skip_edges=[edge])
    SCENARIOS[edge](bench)
    assert not bench.right(), f"without {edge} ({EDGES[edge]}) the numbers were right"


def test_the_host_never_waits(make_engine):
    """All work of a set's life is issued while its first pass has not even run."""
    bench = _bench(make_engine, policy="dual")
    issued = threading.Event()
    in_time: list[bool] = []
    bench.device.compute(lambda: in_time.append(issued.wait(60)))
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
    """Two ranks that share a link; without a lock their copies overlap."""

    def most(locked: bool) -> int:
        """Copies of one direction at a time; without a lock each waits for the other rank's."""
        meetings = {way: threading.Barrier(2) for way in Direction}
        present: Counter[Direction] = Counter()
        counts, lock = [], threading.Lock()

        class Link(dict[Direction, float]):
            """Is asked for its rate by every copy, while that is under way."""

            def get(self, way: Direction, default: Any = None) -> Any:
                with lock:
                    present[way] += 1
                    counts.append(present[way])
                time.sleep(0.01) if locked else meetings[way].wait(60)
                with lock:
                    present[way] -= 1
                return None

        engines = []
        for _ in range(2):
            engine = make_engine(
                "paired" if locked else "single",
                link_lock=FileLinkLock(tmp_path) if locked else None,
                throttle_bytes_per_second=Link(dict.fromkeys(Direction, 1e6)),
            )
            engines.append(engine)
        events = []
        for _ in range(3):
            for engine in engines:
                ticket = engine.produced()
                assert engine.offload(ticket, [torch.ones(20_000, dtype=torch.uint8)])
                buffers = engine.prepare(ticket)
                engine.reload(ticket, buffers)
                events += [ticket.sent, ticket.arrived]
        for event in events:
            event.synchronize()
        assert len(counts) == len(events)
        return max(counts)

    assert most(locked=False) == 2
    assert most(locked=True) == 1


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
