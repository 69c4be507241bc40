"""The region on one rank: restore logic under slow copies, shared buffers, gradient sums."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.moe.buffers import Memory, Ring
from megatron_ext.moe.exchange import Exchange, Groups, HostCopy, Row, sum_rows
from megatron_ext.moe.graph import GradientSums, kept_bytes_per_row
from megatron_ext.moe.passes import Backward, Forward
from megatron_ext.moe.plan import (
    LayerPlan,
    LayerShape,
    Step,
    Strategy,
    saved_bytes,
    weight_gradient_bytes,
)
from megatron_ext.moe.region import Region
from megatron_ext.offload.device import CpuDevice, Direction
from megatron_ext.plan import moe_times
from tests.support.faulty_device import Faults, FaultyDevice
from tests.support.gate import Gate

EXPERTS, WIDTH, FFN, TOKENS = 4, 16, 24, 40
RESTORING = ("s0", "s1", "s2", "s3", "s4")


class Postponed(torch.autograd.Function):
    """A product of one expert that leaves its weight gradient to a store."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, store: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.store.put(weight, x, dy)
        return dy @ weight.t(), None, None


class Store:
    """As much of a ``GradientStore`` as the region needs, for weights that are rows of parameters.

    Attributes:
        parts: (input, output gradient) of each chunk, the last one first, by weight.
        held_bytes: of these when ``gradients`` is called.
    """

    def __init__(self) -> None:
        self.parts: dict[Any, list[tuple[Any, Any]]] = {}
        self.held_bytes = self.calls = 0

    def suspended(self) -> Any:
        raise AssertionError("only where rows are not kept")

    def call(self) -> Any:
        self.parts = {}
        return contextlib.nullcontext()

    def put(self, weight: Any, x: Any, dy: Any) -> None:
        key = weight.untyped_storage()._cdata, weight.storage_offset()
        self.parts.setdefault(key, []).append((x.detach(), dy))

    def takes(self, parameter: Any, grad: Any) -> bool:
        return parameter.untyped_storage()._cdata in {storage for storage, _ in self.parts}

    def gradients(self, parameters: Any) -> Any:
        self.calls += 1
        tensors = [t for parts in self.parts.values() for pair in parts for t in pair]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        self.held_bytes = sum(storages.values())
        found = []
        for parameter in parameters:
            gradient = torch.zeros_like(parameter)
            for one, part in zip(parameter.detach(), gradient):
                parts = self.parts.pop((one.untyped_storage()._cdata, one.storage_offset()), [])
                if parts:
                    x, dy = (torch.cat(each[::-1]) for each in zip(*parts))
                    part.copy_(x.t() @ dy)
            found.append(gradient)
        return found


class Product(torch.nn.Module):
    """A matrix an expert."""

    store: Store | None = None

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, inputs, outputs, generator=generator))

    def forward(self, x: Any, sizes: list[int]) -> Any:
        parts = x.split(sizes)
        if self.store is not None:
            pairs = zip(parts, self.weight)
            return torch.cat([Postponed.apply(a, w, self.store) for a, w in pairs]), None
        return torch.cat([a @ w for a, w in zip(parts, self.weight)]), None


class Experts(torch.nn.Module):
    """Two matrices an expert, with the probability applied between them, as Megatron does it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up = Product(WIDTH, FFN, generator)
        self.down = Product(FFN, WIDTH, generator)

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        assert sum(sizes) == len(x) == len(probs)
        inner, _ = self.up(x, sizes)
        return self.down(torch.tanh(inner) * probs.unsqueeze(1), sizes)[0]


class OneByOne(torch.nn.Module):
    """The same, with each expert a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        grouped = Experts()
        self.experts = torch.nn.ModuleList()
        for up, down in zip(grouped.up.weight.data, grouped.down.weight.data):
            pair = torch.nn.Module()
            pair.up, pair.down = (torch.nn.Linear(*w.shape, bias=False) for w in (up, down))
            pair.up.weight.data, pair.down.weight.data = up.t().clone(), down.t().clone()
            self.experts.append(pair)

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        parts = zip(self.experts, x.split(sizes), probs.split(sizes))
        return torch.cat([e.down(torch.tanh(e.up(a)) * p.unsqueeze(1)) for e, a, p in parts])


@pytest.fixture
def make(group: Any) -> Iterator[Callable[..., Region]]:
    """``make(memory)``: a region with weights that are always the same."""
    made: list[Memory] = []

    def make(memory: Memory | None = None, module: Any = None, known: bool = True) -> Region:
        if memory is None:
            memory = Memory(CpuDevice(), min_bytes=1)
        made.append(memory)
        module = module or Experts()
        linears = [(e.up, e.down) for e in getattr(module, "experts", [module])] if known else []
        exchange = Exchange(Groups(group, None, group), EXPERTS)
        return Region(exchange, module, list(module.parameters()), memory, linears=linears)

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
    between: Callable[[], object] = lambda: None,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """``layers`` calls behind each other, so that they share buffers, and their backward pass;
    ``between`` is called after the forward pass."""
    hidden, probs, chosen = batch(tokens)
    x, p = hidden.requires_grad_(), probs.requires_grad_()
    out = x
    for _ in range(layers):
        out = out + region(out, p, chosen, LayerPlan.of(chunks, strategy, lookahead))
    between()
    gradients = torch.autograd.grad(out.square().sum(), [x, p, *region.parameters])
    names = ("out", "x", "p", "up", "down", *range(len(gradients)))
    return dict(zip(names, (out.detach(), *gradients)))


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


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("module", [Experts, OneByOne])
@pytest.mark.parametrize("strategy", ["none", *RESTORING])
def test_products_of_a_backward_pass(
    make: Callable[..., Region], module: type, strategy: str
) -> None:
    """Table I: four a chunk and expert, and where all is computed again, fc1's, not fc2's; where
    the linear modules are not known, both. It changes no result."""
    wanted = run(make(module=module()), 3, "none")
    again = {"s3": 1, "s4": 1}.get(strategy, 0)
    for known in (True, False):
        region, mode = make(module=module(), known=known), Products()
        with contextlib.ExitStack() as stack:
            start = functools.partial(stack.enter_context, mode)
            found = run(region, 3, strategy, between=start)
        assert mode.count == 3 * EXPERTS * (4 + again * (1 if known else 2))
        assert equal(found, wanted)


class Inner(TorchDispatchMode):
    """At each product of matrices, how many rows of the experts' inner width exist."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A weight and its gradient have the width's rows.
        if isinstance(out, torch.Tensor) and out.shape[1:] == (FFN,) and len(out) != WIDTH:
            storage = out.untyped_storage()
            rows = storage.nbytes() // (FFN * out.itemsize)
            self._live[storage._cdata] = StorageWeakRef(storage), rows
        if func is torch.ops.aten.mm.default:
            self._live = {k: one for k, one in self._live.items() if not one[0].expired()}
            self.rows.append(sum(rows for _, rows in self._live.values()))
        return out


@pytest.mark.parametrize("strategy", ["s3", "s4"])
def test_what_is_computed_again_goes_as_backward_proceeds(
    make: Callable[..., Region], strategy: str
) -> None:
    """Of four experts behind each other, the last one in backward has only its own rows: the
    activation function's output, what is saved of that, and a gradient."""
    sizes = batch()[2].sum(dim=0).tolist()
    assert WIDTH not in sizes
    region, mode = make(module=OneByOne()), Inner()
    with contextlib.ExitStack() as stack:
        run(region, 1, strategy, between=functools.partial(stack.enter_context, mode))
    assert max(mode.rows) >= 2 * sum(sizes)  # once all is computed again
    assert mode.rows[-1] <= 4 * sizes[0] < 2 * sum(sizes)


@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("strategy", ["none", "s0"])
def test_weight_gradients_once_for_all_chunks(
    make: Callable[..., Region], strategy: str, chunks: int
) -> None:
    """One product a weight, over the rows of all chunks in their order, when the last chunk's input
    gradients are on their way; until then the formula's bytes are held."""
    wanted = run(make(), chunks, strategy)
    module, store = Experts(), Store()
    module.up.store = module.down.store = store
    region, mode = make(module=module), Products()
    region.store = store
    with contextlib.ExitStack() as stack:
        start = functools.partial(stack.enter_context, mode)
        found = run(region, chunks, strategy, between=start)
    # Two products of input gradients a chunk and expert, and two of weight gradients an expert.
    assert mode.count == 2 * EXPERTS * (chunks + 1) and store.calls == 1
    for name in ("out", "x", "p"):
        assert torch.equal(found[name], wanted[name])
    for name in ("up", "down"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    rows, plan = 2 * TOKENS, LayerPlan.of(chunks, strategy)
    shape = LayerShape(WIDTH, FFN, gated=False, element_bytes=4, kept_bytes=FFN * 4)
    more, joined = weight_gradient_bytes(shape, rows, plan)
    assert store.held_bytes == saved_bytes(shape, rows, plan.strategy) + more
    assert joined == 4 * rows * (WIDTH + FFN)


def test_experts_must_do_the_same_twice(make: Callable[..., Region]) -> None:
    """What is computed again must be what was saved, or gradients would be wrong."""
    module = Experts()
    region = make(module=module)
    hidden, probs, chosen = batch()
    out = region(hidden.requires_grad_(), probs, chosen, LayerPlan.of(2, "s4"))
    module.forward, original = lambda x, *more: original(x * 2, *more), module.forward
    with pytest.raises(RuntimeError, match="chunk 1: computed again.*must do the same twice"):
        out.sum().backward()


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
    """A maximum that creeps up reallocates rarely; a first size is exact."""
    ring, sizes = Ring(CpuDevice()), []
    for nbytes in range(10_000, 20_000, 100):
        ring.take("sent", 0, nbytes)
        sizes.append(ring.nbytes)
        assert nbytes <= ring.nbytes <= 1.1 * nbytes + 512
    assert sizes[0] == 10_000 and len(set(sizes)) < 10
    ring.clear()
    ring.take("sent", 0, (3 << 20) + 1)
    assert ring.nbytes == (3 << 20) + 1
    ring.take("sent", 0, (5 << 20) + 1)
    assert ring.nbytes == 6 << 20


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
    run(make(Memory(device, min_bytes=1, ring=Noting(device))), 6, strategy, tokens=50)
    assert max(map(len, taken.values())) > 1
    assert all(len(set(sizes)) == 1 for sizes in taken.values()), taken


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
    backward_only = (Step.FETCH, Step.WEIGHTS)
    assert issued[Forward] == [(step, i) for step, i in planned if step not in backward_only]
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


class Operations(TorchDispatchMode):
    """Names of operations that are not views, nor allocations; which launch kernels on a GPU."""

    NONE = (
        "alias",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "set_",
        "_unsafe_view",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waited = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # What the host computes of its counts, all in int64, launches nothing.
        given = [t for t in args if isinstance(t, torch.Tensor)]
        host = self.waited and given and given[0].dtype is torch.int64
        if not func.is_view and name not in self.NONE and not host:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_launches_a_chunk(make: Callable[..., Region], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 25 a chunk in each direction, the stub experts' among them; and of what stands
    between the wait for the counts and the first message, nothing but gathers."""
    counts: dict[int, tuple[int, int]] = {}
    for chunks in (4, 8):
        region = make()
        hidden, probs, chosen = batch()
        x, p = hidden.requires_grad_(), probs.requires_grad_()
        with Operations() as forward:
            out = region(x, p, chosen, LayerPlan.of(chunks))
        with Operations() as backward:
            torch.autograd.grad(out, [x, p, *region.parameters], torch.ones_like(out))
        counts[chunks] = len(forward.names), len(backward.names)
    experts = 4 * EXPERTS + 2, 11 * EXPERTS + 2  # the stub's, one after the other
    for few, many, own in zip(counts[4], counts[8], experts):
        assert (many - few) / 4 - own <= 15, counts
    first: list[str] = []
    region = make()
    original = HostCopy.wait, Exchange.send
    with Operations() as seen:

        def wait(self: Any) -> Any:
            found = original[0](self)
            seen.names.clear()
            seen.waited = True
            return found

        def send(self: Any, *args: Any) -> Any:
            first.append(" ".join(seen.names)) if not first else None
            return original[1](self, *args)

        monkeypatch.setattr(HostCopy, "wait", wait)
        monkeypatch.setattr(Exchange, "send", send)
        region(x, p, chosen, LayerPlan.of(4))
    assert first == ["index_select index_select copy_"]


def test_the_planner_counts_the_launches(
    make: Callable[..., Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels a call and a chunk are those of the code; the experts' are not among them."""
    original, counters = HostCopy.wait, list[Operations]()

    def wait(self: Any) -> Any:
        before = len(counters[-1].names)
        found = original(self)
        del counters[-1].names[before:]  # the host's
        counters[-1].waited = True
        return found

    monkeypatch.setattr(HostCopy, "wait", wait)

    def launches(chunks: int, strategy: str) -> tuple[int, int]:
        region = make()
        hidden, probs, chosen = batch(400)  # as many tokens in each chunk
        x, p = hidden.requires_grad_(), probs.requires_grad_()
        counters.append(Operations())
        with counters[-1] as forward:
            out = region(x, p, chosen, LayerPlan.of(chunks, strategy))
        grad = torch.ones_like(out)
        with Operations() as backward:
            torch.autograd.grad(out, [x, p, *region.parameters], grad)
        return len(forward.names), len(backward.names)

    four, eight = launches(4, "none"), launches(8, "none")
    assert 2 * four[0] - eight[0] == moe_times._ONCE
    experts = 2 * EXPERTS + 4  # the stub's products, two joins, the activation, probabilities
    forward, backward = ((many - few) / 4 for few, many in zip(four, eight))
    assert forward - experts == sum(moe_times._OURS[0][1:])
    resent = (launches(8, "s2")[1] - launches(4, "s2")[1]) / 4
    assert resent - backward == sum(moe_times._AGAIN[1:])


class Atomics(TorchDispatchMode):
    """Additions by index in a random order, each rounded, as threads of a GPU come to them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in ("scatter_add_", "index_add_"):
            return func(*args, **(kwargs or {}))
        out, _, index, rows = args
        index = index if index.dim() == 1 else index[:, 0]
        for i in torch.randperm(len(index), generator=self.generator).tolist():
            out[index[i]] += rows[i]
        return out


@pytest.mark.parametrize("strategy", ["none", "s4"])
def test_two_runs_are_equal_at_any_top_k(group: Any, strategy: str) -> None:
    """Output and gradients at top-8 in bf16; megatron-core's unfused sum is not, so this shows."""
    experts, tokens, top = 16, 40, 8
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    scores = torch.rand(tokens, experts, generator=generator)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(top, dim=1).indices, True)
    token = chosen.t().nonzero()[:, 1]
    rows = torch.randn(len(token), WIDTH, generator=generator).bfloat16()
    found, stock = [], []
    for seed in (2, 3):
        memory = Memory(CpuDevice(), min_bytes=1)
        region = Region(
            Exchange(Groups(group, None, group), experts),
            lambda x, counts, probs: x * probs.unsqueeze(1).to(x.dtype) * 3,
            [],
            memory,
        )
        x, p = hidden.clone().requires_grad_(), (scores * chosen).requires_grad_()
        with Atomics(seed):
            out = region(x, p, chosen, LayerPlan.of(3, strategy))
            found.append([out, *torch.autograd.grad(out, [x, p], torch.ones_like(out))])
            index = token.unsqueeze(1).expand(-1, WIDTH)
            stock.append(torch.zeros_like(hidden).scatter_add_(0, index, rows))
        memory.close()
    assert all(map(torch.equal, *found))
    assert not torch.equal(*stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_rows(dtype: torch.dtype) -> None:
    """Eight rows a token, strided or not: as exact as a sum in fp32 that is rounded once."""
    generator = torch.Generator().manual_seed(3)
    tokens, top, width = 50, 8, 33
    rows = torch.randn(tokens * top, width, generator=generator).to(dtype)
    places = torch.randperm(tokens * top, generator=generator).to(torch.int32)
    starts = torch.arange(0, tokens * top, top, dtype=torch.int32)
    found = sum_rows(rows, places, starts)
    each = rows[places.long()].view(tokens, top, width)
    exact = each.double().sum(1)
    best = (each.float().sum(1).to(dtype).double() - exact).abs().mean()
    assert (found.double() - exact).abs().mean() <= 1.01 * best
    strided = torch.zeros(tokens * top, width + 7, dtype=dtype)
    strided[:, :width] = rows
    assert torch.equal(found, sum_rows(strided[:, :width], places, starts))
    empty = sum_rows(rows[:0], places[:0], torch.zeros(3, dtype=torch.int32))
    assert empty.shape == (3, width) and not empty.any()


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
