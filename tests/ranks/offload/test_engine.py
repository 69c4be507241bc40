"""The engine's ordering edges, one by one, on a device whose streams run as late as they may.

The numbers come out right in every order that the edges allow. Taking one edge away has to give
wrong numbers in one of them (mutation check).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.offload.device import Direction
from megatron_ext.offload.engine import EDGES, Engine
from tests.support.faulty_device import Faults
from tests.support.streams import COMPUTE, COPIES, StreamDevice

NBYTES = 4096
# Which streams run as early as they may; the others as late.
EAGER = [names for count in range(4) for names in itertools.combinations((COMPUTE, *COPIES), count)]


class Bench:
    """Sets made of one block."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device = engine, engine.device
        self.seen: list[tuple[int, torch.Tensor]] = []

    def forward(self, value: int) -> tuple[Any, torch.Tensor]:
        """F: compute writes ``value`` into a new block."""
        block = self.device.allocate(NBYTES)
        with self.device:
            block.fill_(value)
        return self.engine.produced(), block

    def backward(self, block: torch.Tensor, value: int) -> None:
        """B: compute reads the block, which should hold ``value``."""
        with self.device:
            self.seen.append((value, block.clone()))

    def leave(self, value: int) -> Any:
        """F, OFFLOAD and RELEASE; then something else lies where the block was."""
        ticket, block = self.forward(value)
        assert self.engine.offload(ticket, [block])
        self.engine.release(ticket)
        del block
        self.forward(99)
        return ticket

    def back(self, ticket: Any) -> torch.Tensor:
        """PREPARE and RELOAD."""
        (buffer,) = self.engine.prepare(ticket)
        self.engine.reload(ticket, [buffer])
        return buffer

    def right(self) -> bool:
        """Whether all backward passes have read what their forward passes wrote."""
        self.device.synchronize()
        assert self.seen
        return all(bool((content == value).all()) for value, content in self.seen)


def life(bench: Bench) -> None:
    """A set's way there and back."""
    ticket = bench.leave(1)
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)
    bench.engine.finish(ticket)


def unreleased(bench: Bench) -> None:
    """No release makes compute wait for the copy to the host."""
    ticket, block = bench.forward(1)
    bench.engine.offload(ticket, [block])
    buffer = bench.back(ticket)
    bench.engine.use(ticket)
    bench.backward(buffer, 1)


def second_owner(bench: Bench) -> None:
    """A second set takes the place on the host from which the first is still being read."""
    first = bench.leave(1)
    buffer = bench.back(first)
    bench.leave(2)
    bench.engine.use(first)
    bench.backward(buffer, 1)


def unused(bench: Bench) -> None:
    """A set nobody reads is finished, and its buffer goes to the next forward pass."""
    ticket = bench.leave(1)
    buffer = bench.back(ticket)
    bench.engine.finish(ticket)
    del buffer
    _, other = bench.forward(2)
    third = bench.leave(3)
    bench.back(third)
    bench.engine.use(third)  # By now the first reload has run, too.
    bench.backward(other, 2)


def used_beside(bench: Bench) -> None:
    """Another stream than the one of PREPARE reads a block that is dropped before it is done."""
    ticket = bench.leave(1)
    buffer = bench.back(ticket)
    with bench.device.on("side"):
        bench.engine.use(ticket, buffer.untyped_storage())
        bench.backward(buffer, 1)
    bench.engine.use(ticket)
    del buffer
    bench.forward(99)
    bench.engine.finish(ticket)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "offload-after-forward": life,
    "release-after-offload": life,
    "reload-after-prepare": life,
    "use-after-reload": life,
    "reload-after-offload": unreleased,
    "offload-after-slot-read": second_owner,
    "drop-after-reload": unused,
    "reuse-after-use": used_beside,
}


def _bench(make_engine: Any, **kwargs: Any) -> Bench:
    # Room for one set on the host, so that a second one has to take its place.
    engine = make_engine(arena_bytes=NBYTES, device_class=StreamDevice, **kwargs)
    engine.arena.seal()
    return Bench(engine)


def _right(make_engine: Any, edge: str, eager: Any, **kwargs: Any) -> bool:
    bench = _bench(make_engine, eager=eager, **kwargs)
    SCENARIOS[edge](bench)
    return bench.right()


@pytest.mark.parametrize("edge", EDGES)
def test_right_with_all_edges(make_engine, edge):
    for eager in EAGER:
        assert _right(make_engine, edge, eager), f"early: {eager}"


@pytest.mark.parametrize("edge", EDGES)
def test_wrong_without_the_edge(make_engine, edge):
    results = [_right(make_engine, edge, e, skip_edges=[edge]) for e in EAGER]
    assert not all(results), f"without {edge} ({EDGES[edge]}) the numbers were right"


def test_the_host_never_waits(make_engine):
    """All work of a set's life is issued while its first pass has not even run."""
    bench = _bench(make_engine, eager=())
    life(bench)
    assert bench.device.launched() and not bench.device.done()
    assert bench.right()


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
