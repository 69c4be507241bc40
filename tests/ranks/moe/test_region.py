"""The region on one rank: restore logic under slow copies, shared buffers, gradient sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_ext.moe.buffers import Memory, Ring
from megatron_ext.moe.exchange import Exchange, Groups, Row
from megatron_ext.moe.graph import GradientSums, kept_bytes_per_row
from megatron_ext.moe.passes import Backward, Forward
from megatron_ext.moe.plan import LayerPlan, Step, Strategy
from megatron_ext.moe.region import Region
from megatron_ext.offload.device import CpuDevice, Direction
from tests.support.faulty_device import Faults, FaultyDevice
from tests.support.gate import Gate

EXPERTS, WIDTH, FFN, TOKENS = 4, 16, 24, 40
RESTORING = ("s1", "s2", "s3", "s4")


class Experts(torch.nn.Module):
    """Two matrices an expert, with the probability applied between them, as Megatron does it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN, generator=generator))
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, FFN, WIDTH, generator=generator))

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        assert sum(sizes) == len(x) == len(probs)
        parts = zip(x.split(sizes), probs.split(sizes), self.up, self.down)
        return torch.cat([(torch.tanh(a @ u) * p.unsqueeze(1)) @ d for a, p, u, d in parts])


@pytest.fixture
def make(group: Any) -> Iterator[Callable[..., Region]]:
    """``make(memory)``: a region with weights that are always the same."""
    made: list[Memory] = []

    def make(memory: Memory | None = None) -> Region:
        if memory is None:
            memory = Memory(CpuDevice(), min_bytes=1)
        made.append(memory)
        module = Experts()
        exchange = Exchange(Groups(group, None, group), EXPERTS)
        return Region(exchange, module, list(module.parameters()), memory)

    yield make
    for memory in made:
        memory.device.faults = Faults()
        memory.close()


def batch(tokens: int = TOKENS, seed: int = 0) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(2, dim=1).indices, True)
    return hidden, scores * chosen, chosen


def dense(region: Region, hidden: Any, probs: Any) -> Any:
    """The same layer as a plain sum over all experts."""
    up, down = region.parameters
    inner = torch.tanh(torch.einsum("tw,ewf->etf", hidden, up)) * probs.t().unsqueeze(2)
    return torch.einsum("etf,efw->tw", inner, down)


def run(
    region: Region,
    chunks: int,
    strategy: str,
    layers: int = 1,
    lookahead: int = 2,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """``layers`` calls behind each other, so that they share buffers, and their backward pass;
    ``between`` is called after the forward pass."""
    hidden, probs, chosen = batch()
    x, p = hidden.requires_grad_(), probs.requires_grad_()
    out = x
    for _ in range(layers):
        out = out + region(out, p, chosen, LayerPlan.of(chunks, strategy, lookahead))
    between()
    gradients = torch.autograd.grad(out.square().sum(), [x, p, *region.parameters])
    return dict(zip(("out", "x", "p", "up", "down"), (out.detach(), *gradients)))


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("chunks", [1, 3, 50])
def test_against_a_dense_layer(make: Callable[..., Region], chunks: int) -> None:
    region = make()
    found = run(region, chunks, "s4")
    hidden, probs, _ = batch()
    x, p = hidden.requires_grad_(), probs.requires_grad_()
    out = x + dense(region, x, p)
    gradients = torch.autograd.grad(out.square().sum(), [x, p, *region.parameters])
    _, _, chosen = batch()
    wanted = dict(zip(("out", "x", "p", "up", "down"), (out, *gradients)))
    wanted["p"] = wanted["p"] * chosen  # the others are not looked at
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("lookahead", [1, 3, 5])
def test_other_orders_change_nothing(make: Callable[..., Region], lookahead: int) -> None:
    """Chunks in other slots, five of them all dispatched first, while copies start late."""
    for strategy in ("none", *RESTORING):
        faults = Faults(delay=lambda direction: 0.002, poison=True)
        region = make(Memory(FaultyDevice(faults=faults), min_bytes=1))
        wanted = run(make(), 5, strategy, layers=2)
        found = run(region, 5, strategy, layers=2, lookahead=lookahead)
        assert equal(found, wanted), strategy


def test_slow_copies_change_nothing(make: Callable[..., Region]) -> None:
    """Copies that start late in both directions, let-go memory full of NaN, two layers that share
    the buffers: whatever is not ordered by an event gives wrong numbers."""
    wanted = run(make(), 5, "none", layers=2)
    for strategy in RESTORING:
        faults = Faults(delay=lambda direction: 0.004, poison=True)
        region = make(Memory(FaultyDevice(faults=faults), min_bytes=1))
        assert equal(run(region, 5, strategy, layers=2), wanted), strategy


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
    memory = Memory(device, min_bytes=1, ring=Ring(device, skip=["input"]))
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
    memory.engine._skip = frozenset([edge])
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


def test_a_dropped_graph_gives_its_place_on_the_host_back(make: Callable[..., Region]) -> None:
    region = make()
    hidden, probs, chosen = batch()
    out = region(hidden.requires_grad_(), probs, chosen, LayerPlan.of(3, "s1"))
    assert region.memory.engine.arena.used_bytes > 0
    del out
    assert region.memory.engine.arena.used_bytes == 0


@pytest.mark.parametrize("strategy", ["s1", "s2", "s3"])
def test_what_finds_no_room_on_the_host_stays_on_the_device(
    make: Callable[..., Region], strategy: str
) -> None:
    """Counted, with the size that would do; results are those of a run with room for all."""

    def sized(nbytes: int) -> tuple[dict[str, Any], Memory]:
        faults = Faults(lambda direction: 0.002, poison=True)
        region = make(Memory(FaultyDevice(faults=faults), min_bytes=1))
        region.memory.size_host(nbytes, now=bool(nbytes))
        found = run(region, 4, strategy, layers=3)
        assert region.memory.engine.arena.capacity_bytes == nbytes
        assert region.memory.engine.arena.used_bytes == 0
        return found, region.memory

    wanted, ample = run(make(), 4, strategy, layers=3), 1 << 20
    found, memory = sized(ample)
    assert equal(found, wanted) and not memory.stayed
    needed = memory.wanted_bytes
    for nbytes, least in ((0, 12), (needed // 1024 * 512, 1)):
        found, memory = sized(nbytes)
        assert equal(found, wanted)
        assert 12 >= memory.stayed >= least and memory.wanted_bytes == needed
        assert memory.engine.counters.offloads == 12 - memory.stayed
    assert not sized(needed)[1].stayed


def test_a_host_without_memory_ends_no_step(make: Callable[..., Region]) -> None:
    """An arena that is allocated only when it is used, and then there is too little."""
    region = make()
    region.memory.size_host(1 << 60, now=False)
    assert equal(run(region, 4, "s1"), run(make(), 4, "s1"))
    assert region.memory.stayed == 4 and region.memory.engine.arena.capacity_bytes == 0


def test_rings_that_grow_do_so_in_steps() -> None:
    """A maximum that creeps up reallocates rarely; a first size is exact where it is small."""
    ring, sizes = Ring(CpuDevice()), []
    for nbytes in range(10_000, 20_000, 100):
        ring.take("sent", 0, nbytes)
        sizes.append(ring.nbytes)
        assert nbytes <= ring.nbytes <= 1.1 * nbytes + 512
    assert sizes[0] == 10_000 and len(set(sizes)) < 10
    ring.clear()
    ring.take("sent", 0, (5 << 20) + 1)
    assert ring.nbytes == 6 << 20


def test_nothing_is_kept_without_gradients(make: Callable[..., Region]) -> None:
    region = make()
    hidden, probs, chosen = batch()
    with torch.no_grad():
        out = region(hidden, probs, chosen, LayerPlan.of(3, "s1"))
    assert region.memory.engine.counters.offloads == 0
    torch.testing.assert_close(out, dense(region, hidden, probs).detach(), rtol=1e-4, atol=1e-4)


def test_no_tokens_at_all(make: Callable[..., Region]) -> None:
    region = make()
    for strategy in Strategy:
        hidden, probs, chosen = batch(0)
        out = region(
            hidden.requires_grad_(), probs.requires_grad_(), chosen, LayerPlan(4, strategy)
        )
        gradients = torch.autograd.grad(out.sum(), [hidden, probs, *region.parameters])
        assert out.shape == (0, WIDTH)
        assert not any(g.any() for g in gradients[2:])


def test_backward_runs_once(make: Callable[..., Region]) -> None:
    hidden, probs, chosen = batch()
    out = make()(hidden.requires_grad_(), probs, chosen, LayerPlan.of(2, "s4")).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass twice"):
        out.backward()


def test_wrong_shapes_are_named(make: Callable[..., Region]) -> None:
    hidden, probs, chosen = batch()
    with pytest.raises(ValueError, match=r"\(39, 4\).*must be \(40, 4\)"):
        make()(hidden, probs[1:], chosen, LayerPlan(2))


@pytest.mark.parametrize("lookahead", [1, 2, 3, 5])
def test_what_is_planned_is_what_runs(
    make: Callable[..., Region], monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    """Both passes issue the plan's operations and nothing else, in its order."""
    issued: dict[type, list[tuple[Step, int]]] = {Forward: [], Backward: []}

    def noting(kind: type, step: Step, original: Callable[[Any, int], None]) -> Any:
        def call(self: Any, i: int) -> None:
            issued[kind].append((step, i))
            original(self, i)

        return call

    for kind in issued:
        for step in Step:
            name = f"_{step.value}"
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, noting(kind, step, getattr(kind, name)))
    run(make(), 5, "s1", lookahead=lookahead)
    planned = list(LayerPlan.of(5, "s1", lookahead).operations())
    assert issued[Forward] == [(step, i) for step, i in planned if step is not Step.FETCH]
    assert issued[Backward] == [(step, 4 - i) for step, i in planned]


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


def test_kept_bytes_are_those_of_a_row() -> None:
    """tanh's output, times the probability, and that probability; weights do not count."""
    module = Experts()
    found = kept_bytes_per_row(
        module, list(module.parameters()), EXPERTS, torch.zeros(1, WIDTH), torch.float32
    )
    assert found == 2 * FFN * 4


def test_rows_keep_their_fields_apart() -> None:
    row = Row((3, torch.bfloat16), (2, torch.float32), (1, torch.float64))
    assert row.nbytes == 16 + 16 + 16
    buffer = torch.zeros(5 * row.nbytes, dtype=torch.uint8)
    a, b, c = row.view(buffer, 5)
    a.fill_(1.5), b.fill_(2.5), c.fill_(3.5)
    assert {float(t.sum()) for t in row.view(buffer, 5)} == {5 * 3 * 1.5, 5 * 2 * 2.5, 5 * 3.5}
    assert [len(t) for t in row.view(buffer, 0)] == [0, 0, 0]


class TestGradientSums:
    def parameter(self, dtype: Any, main: Any = None) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        if main is not None:
            parameter.main_grad = torch.zeros(4, dtype=main)
        return parameter

    def total(self, parameter: Any, parts: list[float]) -> Any:
        """What an optimizer gets: the returned gradient is added as Megatron's hook does it."""
        sums = GradientSums([parameter])
        for part in parts:
            sums.add([torch.full((4,), part, dtype=parameter.dtype)])
        (gradient,) = sums.result()
        assert gradient.dtype == parameter.dtype
        main = getattr(parameter, "main_grad", None)
        return gradient if main is None else main.add_(gradient)

    def test_fp32_main_grad_loses_nothing(self) -> None:
        parts = [256.0, 1.0, 1.0, 1.0]  # in bf16, 256 + 1 is 256
        total = self.total(self.parameter(torch.bfloat16, torch.float32), parts)
        assert total.tolist() == [259.0] * 4

    def test_without_it_the_sum_is_rounded_once(self) -> None:
        for main in (None, torch.bfloat16):
            total = self.total(self.parameter(torch.bfloat16, main), [256.0, 1.0, 1.0])
            assert total.tolist() == [258.0] * 4

    def test_one_chunk_is_passed_on_untouched(self) -> None:
        parameter = self.parameter(torch.bfloat16, torch.float32)
        sums, gradient = GradientSums([parameter]), torch.ones(4, dtype=torch.bfloat16)
        sums.add([gradient])
        assert sums.result()[0] is gradient and not parameter.main_grad.any()

    def test_what_a_kernel_has_added_is_not_added_again(self) -> None:
        parameter = self.parameter(torch.float32, torch.float32)
        parameter.grad_added_to_main_grad = True
        sums = GradientSums([parameter])
        for _ in range(3):
            sums.add([torch.full((4,), float("nan"))])
        assert sums.result()[0].isnan().all() and not parameter.main_grad.any()

    def test_no_gradient_is_zero(self) -> None:
        sums = GradientSums([self.parameter(torch.float32)])
        sums.add([None])
        assert not sums.result()[0].any()
