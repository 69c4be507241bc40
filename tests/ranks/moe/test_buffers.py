"""What leaves the device and comes back under slow copies; the buffers that calls share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.moe.buffers import Memory, Ring
from megatron_ext.moe.exchange import Exchange, Transfer
from megatron_ext.moe.plan import LayerPlan
from megatron_ext.moe.region import Region
from megatron_ext.offload.device import CpuDevice, Direction
from tests.ranks.moe.regions import (
    FFN,
    RESTORING,
    Experts,
    batch,
    equal,
    run,
)
from tests.support.faulty_device import Faults, FaultyDevice
from tests.support.gate import Gate
from tests.support.leaky_engine import leave_out


@pytest.mark.parametrize("slow", [Direction.TO_HOST, Direction.TO_DEVICE])
def test_each_direction_alone(make: Callable[..., Region], slow: Direction) -> None:
    wanted = run(make(), 4, "none")
    for strategy in ("s1", "s2", "s3"):
        faults = Faults(delay=lambda direction: 0.005 if direction is slow else 0.0)
        region = make(Memory(FaultyDevice(faults=faults), min_bytes=1))
        assert equal(run(region, 4, strategy), wanted), strategy


def behind(gate: Gate) -> CpuDevice:
    """A device whose copies wait for the gate."""
    return FaultyDevice(faults=Faults(gate.delay))


def test_slots_have_to_wait_for_their_readers(make: Callable[..., Region]) -> None:
    """Guards the tests above: without the event a later chunk overwrites what is being copied."""
    wanted = run(make(), 5, "none")
    gate = Gate(Direction.TO_HOST)
    device = behind(gate)

    class Careless(Ring):
        def _wait_for(self, readers: Any, purpose: str) -> None:
            if purpose != "input":
                super()._wait_for(readers, purpose)

    memory = Memory(device, min_bytes=1)
    memory.ring = Careless(device)
    assert not equal(run(make(memory), 5, "s3", between=gate.open), wanted)


def test_memory_is_held_until_it_has_left(make: Callable[..., Region]) -> None:
    """Likewise, where the experts' own memory is let go before it has been copied."""
    wanted = run(make(), 5, "none")
    gate = Gate(Direction.TO_HOST)
    memory = Memory(behind(gate), min_bytes=1)

    def add(ticket: Any, blocks: list[Any]) -> None:
        for block in blocks:
            block.fill_(0xFF)

    memory.departures.add = add  # type: ignore[method-assign]
    assert not equal(run(make(memory), 5, "s2", between=gate.open), wanted)


@pytest.mark.parametrize("edge", ["reload-after-offload", "use-after-reload"])
def test_copies_have_to_wait(make: Callable[..., Region], edge: str) -> None:
    """Likewise, for the engine's own edges."""
    wanted = run(make(), 2, "none")
    gate = Gate(Direction.TO_DEVICE if edge.startswith("use") else Direction.TO_HOST)
    memory = Memory(behind(gate), min_bytes=1)
    leave_out(memory.engine, [edge])
    found = run(make(memory), 2, "s2")
    gate.open()
    assert not equal(found, wanted)


def test_ring_only_grows_and_is_shared(make: Callable[..., Region]) -> None:
    memory = Memory(CpuDevice(), min_bytes=1)
    first, second = make(memory), make(memory)
    run(first, 2, "s4")
    large = memory.ring.nbytes
    run(second, 2, "s4")
    run(first, 4, "s4")
    assert memory.ring.nbytes == large > 0
    run(first, 1, "s4")
    assert memory.ring.nbytes > large


def test_the_ring_shrinks_with_chunks(make: Callable[..., Region]) -> None:
    """The reason for it all: with more chunks less is there at a time, whatever the strategy."""
    for strategy in ("none", "s3", "s4"):
        sizes = []
        for chunks in (2, 4, 8):
            region = make()
            run(region, chunks, strategy)
            sizes.append(region.memory.ring.nbytes)
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.6 * sizes[0]


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations have made, by whether they are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            storage = out.untyped_storage()
            self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def nbytes(self) -> int:
        return sum(nbytes for ref, nbytes in self._made.values() if not ref.expired())


def test_strategies_keep_less_between_forward_and_backward(make: Callable[..., Region]) -> None:
    """Beside the rings, of three layers: with none the input, tanh and the product, with s0 fc1's
    output in place of the latter two, with s4 what is to be sent again."""
    kept = {}
    for strategy in ("none", "s0", "s4"):
        region, found = make(), list[int]()
        with Alive() as alive:

            def between() -> None:
                region.memory.ring.leave()  # noqa: B023
                found.append(alive.nbytes())  # noqa: B023

            run(region, 4, strategy, layers=3, between=between)
        kept[strategy] = found[0]
    rows, inner = 3 * int(batch()[2].sum()), FFN * 4
    assert kept["none"] - kept["s0"] >= rows * inner
    assert kept["s0"] - kept["s4"] >= rows * inner


def test_a_dropped_graph_gives_its_place_on_the_host_back(make: Callable[..., Region]) -> None:
    region = make()
    hidden, probs, chosen = batch()
    out = region(hidden.requires_grad_(), probs, chosen, LayerPlan.of(3, "s1"))
    assert region.memory.engine.arena.used_bytes > 0
    del out
    assert region.memory.engine.arena.used_bytes == 0


class _Failing(torch.autograd.Function):
    """Fails in the first backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise RuntimeError("out of memory")


class _FailingExperts(Experts):
    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        return super().forward(_Failing.apply(x), counts, probs)


class _FailingInForward(Experts):
    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        raise RuntimeError("out of memory")


class _Overwriting(Experts):
    """They write into what they have saved: their input, or what they made of it."""

    saved: str

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        inner = torch.tanh(self.up(x, sizes)[0])
        y = inner * probs.unsqueeze(1)
        (x if self.saved == "input" else inner).detach().add_(1.0)
        return self.down(y, sizes)[0]


@pytest.mark.parametrize("saved", ["input", "inside"])
def test_what_is_written_in_place_ends_in_an_error(make: Callable[..., Region], saved: str) -> None:
    """Under every strategy, as autograd has it without; what comes back would be something else."""
    for strategy in ("none", *RESTORING):
        module = _Overwriting()
        module.saved = saved
        region = make(module=module)
        with pytest.raises(RuntimeError, match="in place|inplace"):
            run(region, 2, strategy)


class _Unfinished(FaultyDevice):
    """The host sees no copy end, and notes for which ones compute waits."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []
        self.awaited: set[Any] = set()

    def copy(self, *given: Any) -> Any:
        event: Any = super().copy(*given)
        event.query = lambda: False
        self.copies.append(event)
        return event

    def wait(self, event: Any) -> None:
        self.awaited.add(event)
        super().wait(event)


@pytest.mark.parametrize("strategy", ["s1", "s2", "s3"])
def test_an_error_in_backward_leaves_no_copy_under_way(
    make: Callable[..., Region], strategy: str
) -> None:
    """What the chunks behind the one that fails were to use is on its way to slots that the next
    pass takes: compute waits for all of it, also where somebody keeps the error."""
    device = _Unfinished()
    region = make(Memory(device, min_bytes=1), module=_FailingExperts())
    with pytest.raises(RuntimeError, match="out of memory") as kept:
        run(region, 5, strategy)
    back = device.copies[5:]
    assert kept and len(back) >= 2 and device.awaited >= set(back)
    assert region.memory.engine.arena.used_bytes == 0


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_an_error_leaves_messages_under_way_alone(
    make: Callable[..., Region], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Collectives that nobody has waited for may still read and write their memory, while the next
    pass, which a trainer has begun after it caught the error, fills its own messages."""

    class UnderWay(Transfer):
        """Over the memory of its messages, until somebody waits."""

        def wait(self) -> torch.Tensor:
            del under_way[id(self)]
            return super().wait()

    under_way: dict[int, list[torch.Tensor]] = {}
    send = Exchange.send

    def noting(self: Exchange, out: Any, rows: Any, *given: Any) -> UnderWay:
        found = send(self, out, rows, *given)
        pieces = {one.untyped_storage()._cdata for one in (out, rows)}
        taken = {t.untyped_storage()._cdata for pair in under_way.values() for t in pair}
        assert not pieces & taken
        transfer = UnderWay(out, rows, found._work)
        under_way[id(transfer)] = [out, rows]
        transfers.append(transfer)
        return transfer

    transfers: list[UnderWay] = []  # their identities stay different
    monkeypatch.setattr(Exchange, "send", noting)
    wanted, memory = run(make(), 5, "s4"), Memory(CpuDevice(), min_bytes=1)
    assert not under_way
    module = _FailingExperts() if fails == "backward" else _FailingInForward()
    with pytest.raises(RuntimeError, match="out of memory"):
        run(make(memory, module=module), 5, "s4")
    left = len(under_way)
    assert left and not memory.ring.nbytes  # experts may return their input, as it lies in a slot
    assert equal(run(make(memory), 5, "s4"), wanted) and len(under_way) == left


@pytest.mark.parametrize("strategy", ["s1", "s2", "s3"])
def test_the_host_arena_has_the_size_that_the_first_step_showed(
    make: Callable[..., Region], strategy: str
) -> None:
    """And a quarter more; chunks that find no room there stay on the device, with equal results."""
    wanted = run(make(), 4, strategy, layers=3)
    faults = Faults(lambda direction: 0.002, poison=True)
    region = make(Memory(FaultyDevice(faults=faults), min_bytes=1))
    memory, arena = region.memory, region.memory.engine.arena
    memory.begin_step()
    assert arena.capacity_bytes == 0 and equal(run(region, 4, strategy, layers=3), wanted)
    shown = arena.peak_bytes
    for stays in (0, 0, 1):
        layers = 6 if stays else 3
        memory.begin_step()
        size = arena.capacity_bytes
        assert 1.25 * shown <= size < 1.25 * shown + 512
        found = run(region, 4, strategy, layers=layers)
        assert equal(found, run(make(), 4, strategy, layers=layers))
        assert (memory.stayed > 0) == bool(stays) and arena.used_bytes == 0
        assert arena.capacity_bytes == size


def test_rows_that_are_held_for_backward_are_counted(make: Callable[..., Region]) -> None:
    region = make()
    held: list[int] = []
    for strategy in ("none", "s4"):
        region.memory.begin_step()
        rows = int(batch()[2].sum())
        run(region, 3, strategy, layers=3, between=lambda: held.append(region.memory.rows))
        assert held[-1] == region.memory.most_rows == 3 * rows and region.memory.rows == 0


@pytest.mark.parametrize("strategy", ["none", *RESTORING])
def test_a_first_call_grows_no_buffer(make: Callable[..., Region], strategy: str) -> None:
    """Each is made for the worst chunk and both passes: none gets a tenth more than is needed."""
    taken: dict[Any, list[int]] = {}

    class Noting(Ring):
        def take(self, purpose: str, number: int, nbytes: int) -> torch.Tensor:
            memory = super().take(purpose, number, nbytes)
            taken.setdefault((purpose, number), []).append(memory.numel())
            return memory

    device = CpuDevice()
    # Chunk 4 has 8 tokens, and chunk 2, which follows in its slot, 9.
    memory = Memory(device, min_bytes=1)
    memory.ring = Noting(device)
    run(make(memory), 6, strategy, tokens=50)
    assert max(map(len, taken.values())) > 1
    assert all(len(set(sizes)) == 1 for sizes in taken.values()), taken


def test_rings_may_be_cleared_between_passes(make: Callable[..., Region]) -> None:
    """Between two plans buffers are given back, and calls before and after are right."""
    region = make(
        Memory(FaultyDevice(faults=Faults(lambda direction: 0.004, poison=True)), min_bytes=1)
    )
    for strategy, chunks in (("s1", 2), ("s3", 4), ("none", 3)):
        wanted = run(make(), chunks, strategy)
        found = run(region, chunks, strategy, between=region.memory.ring.clear)
        assert equal(found, wanted), strategy
        region.memory.ring.clear()
        assert region.memory.ring.nbytes == 0
