"""The region on one rank: results, products, weight gradients, orders."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_ext.integration.features.moe.layer import PipelinedMoE
from megatron_ext.integration.saved_parameters import with_parameters
from megatron_ext.moe.buffers import Memory
from megatron_ext.moe.plan import LayerPlan, Strategy
from megatron_ext.moe.region import Region
from tests.ranks.moe.regions import (
    EXPERTS,
    RESTORING,
    TOKENS,
    WIDTH,
    Experts,
    OneByOne,
    Product,
    Store,
    batch,
    dense,
    equal,
    run,
)
from tests.support.faulty_device import Faults, FaultyDevice


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


def test_slow_copies_change_nothing(make: Callable[..., Region]) -> None:
    """Copies that start late in both directions, let-go memory full of NaN, two layers that share
    the buffers: whatever is not ordered by an event gives wrong numbers."""
    wanted = run(make(), 5, "none", layers=2)
    for strategy in RESTORING:
        faults = Faults(delay=lambda direction: 0.004, poison=True)
        region = make(Memory(FaultyDevice(faults=faults), min_bytes=1))
        assert equal(run(region, 5, strategy, layers=2), wanted), strategy


class Narrow(Experts):
    """Computes in what autocast says, and returns what it was given."""

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        return super().forward(x, counts, probs).to(x.dtype)


@pytest.mark.parametrize("strategy", RESTORING)
def test_computed_again_in_the_precision_of_forward(
    make: Callable[..., Region], strategy: str
) -> None:
    """Autocast is around the forward pass only, or around the backward pass only."""

    def found(strategy: str, forward: bool) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            region = make(module=Narrow())
            before = torch.autocast("cpu", torch.bfloat16, enabled=forward)
            stack.enter_context(before)

            def between() -> None:
                stack.pop_all().close()
                stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=not forward))

            return run(region, 3, strategy, between=between)

    narrow = found("none", True)
    assert equal(found(strategy, True), narrow)
    wide = found("none", False)
    assert equal(found(strategy, False), wide) and not equal(wide, narrow)


def _kept(region: Region, strategy: str, around: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Two layers with two calls each, of which ``around`` (function, input) runs each pair."""
    hidden, probs, chosen = batch()
    x, p = hidden.requires_grad_(), probs.requires_grad_()
    plan = LayerPlan.of(3, strategy)

    def pair(x: Any) -> Any:
        x = x + region(x, p, chosen, plan)
        return x + region(x, p, chosen, plan)

    out = around(pair, around(pair, x))
    gradients = torch.autograd.grad(out.square().sum(), [x, p, *region.parameters])
    return {str(number): one for number, one in enumerate((out.detach(), *gradients))}


@pytest.mark.parametrize("strategy", ["none", *RESTORING])
def test_checkpoints_and_hooks_of_the_user(make: Callable[..., Region], strategy: str) -> None:
    """Saved-tensor hooks around the layer change nothing, and a checkpoint computes it again once a
    pass, not for each chunk."""

    def plain(function: Any, x: Any) -> Any:
        return function(x)

    def on_cpu(function: Any, x: Any) -> Any:
        pack = unpack = torch.Tensor.clone
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return function(x)

    calls = 0

    def counted(function: Any, x: Any) -> Any:
        def call(x: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(x)

        return checkpoint(call, x, use_reentrant=False)

    wanted = _kept(make(), strategy, plain)
    assert equal(_kept(make(), strategy, on_cpu), wanted)
    assert equal(_kept(make(), strategy, counted), wanted)
    assert calls == 4


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


@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("strategy", ["none", "s0"])
def test_weight_gradients_once_for_all_chunks(
    make: Callable[..., Region], strategy: str, chunks: int
) -> None:
    """One product a weight, over the rows of all chunks in their order, when the last chunk's input
    gradients are on their way."""
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


@pytest.mark.parametrize("strategy", ["none", "s4"])
def test_a_hook_sees_the_whole_gradient_of_a_weight_once(
    make: Callable[..., Region], strategy: str
) -> None:
    """Not each chunk's part, and nothing of it goes to ``main_grad`` past the hook."""
    wanted, region, calls = run(make(), 3, strategy), make(), []
    for parameter in region.parameters:
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    def hook(grad: torch.Tensor) -> torch.Tensor:
        calls.append(grad)
        return grad * 3 - 1

    handle = region.parameters[0].register_hook(hook)
    found = run(region, 3, strategy)
    assert len(calls) == 1 and torch.equal(found["up"], wanted["up"] * 3 - 1)
    up, down = (parameter.main_grad for parameter in region.parameters)  # type: ignore[attr-defined]
    assert not up.any() and torch.equal(found["down"] + down, wanted["down"])
    handle.remove()
    assert torch.equal(run(region, 3, strategy)["up"] + up, wanted["up"]) and len(calls) == 1


def test_experts_must_do_the_same_twice(make: Callable[..., Region]) -> None:
    """What is computed again must be what was saved, or gradients would be wrong."""
    module = Experts()
    region = make(module=module)
    hidden, probs, chosen = batch()
    out = region(hidden.requires_grad_(), probs, chosen, LayerPlan.of(2, "s4"))
    module.forward, original = lambda x, *more: original(x * 2, *more), module.forward
    with pytest.raises(RuntimeError, match="chunk 1: computed again.*must do the same twice"):
        out.sum().backward()


class Dropping(Product):
    """As a linear layer whose adapter drops some of its input."""

    def forward(self, x: Any, sizes: list[int]) -> Any:
        return super().forward(torch.nn.functional.dropout(x, 0.5), sizes)


@pytest.mark.parametrize("strategy", ["none", *RESTORING])
@pytest.mark.parametrize("place", ["up", "down"])
def test_random_numbers_are_not_drawn_twice(
    make: Callable[..., Region], strategy: str, place: str
) -> None:
    """Other ones would give other gradients; what is kept or copied may draw them."""
    found = []
    for one in ("none", strategy):
        module = Experts()
        getattr(module, place).__class__ = Dropping
        torch.manual_seed(0)
        again = one in ("s3", "s4") or (one, place) == ("s0", "down")
        refused = pytest.raises(RuntimeError, match="chunk 0: the experts draw random numbers")
        with refused if again else contextlib.nullcontext():
            found.append(run(make(module=module), 3, one))
    assert len(found) == 1 or equal(*found)


def test_nothing_is_kept_without_gradients(make: Callable[..., Region]) -> None:
    region = make()
    hidden, probs, chosen = batch()
    with torch.no_grad():
        out = region(hidden, probs, chosen, LayerPlan.of(3, "s1"))
    assert region.memory.engine.counters.offloads == 0
    torch.testing.assert_close(out, dense(region, hidden, probs).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
def test_experts_are_called_for_chunks_with_rows_only(
    make: Callable[..., Region], grad: bool
) -> None:
    module, sizes = Experts(), []
    module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    hidden, probs, chosen = batch()
    chosen[: TOKENS // 4] = False
    with torch.set_grad_enabled(grad):
        make(module=module)(hidden, probs * chosen, chosen, LayerPlan(4, Strategy.NONE))
    assert sizes == [TOKENS // 2] * 3


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


class _Overwriting(torch.autograd.Function):
    """As Transformer Engine's with fused accumulation: the first call of a step overwrites."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, first: bool) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.is_first_microbatch, ctx.weight = first, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        main = ctx.weight.main_grad
        (main.copy_ if ctx.is_first_microbatch else main.add_)(x.t() @ dy)
        ctx.weight.grad_added_to_main_grad = True
        return dy @ weight.t(), torch.zeros_like(weight), None


class _Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
        self.weight, self.first = torch.nn.Parameter(weight), True
        self.weight.main_grad = torch.zeros_like(weight)

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        first, self.first = self.first, False
        y = with_parameters(_Overwriting).apply(x, self.weight, first)
        return y * probs.unsqueeze(1)


def test_first_calls_that_overwrite_lose_no_chunk(make: Callable[..., Region]) -> None:
    """In backward the first chunk is the last."""
    found = {}
    for strategy in ("none", *RESTORING):
        for chunks in (1, 4):
            experts = _Fused()
            run(make(module=experts, known=False), chunks, strategy)
            found[strategy, chunks] = experts.weight.main_grad
    for name, main in found.items():
        torch.testing.assert_close(main, found["none", 1], rtol=1e-4, atol=1e-4, msg=str(name))


def test_parameters_that_take_the_place_of_others_are_trained(group: Any) -> None:
    """As ``load_state_dict(assign=True)`` or adapters put them there after a first call."""
    layer = torch.nn.Module()
    layer.experts = Experts()
    layer.config = SimpleNamespace(moe_token_dispatcher_type="alltoall", num_moe_experts=EXPERTS)
    layer.token_dispatcher = SimpleNamespace(ep_group=group, tp_ep_group=group, tp_size=1)
    layers, device = PipelinedMoE([LayerPlan.of(2)]), torch.device("cpu")
    first = layers._region(layer, device)
    assert layers._region(layer, device) is first
    layer.load_state_dict(Experts().state_dict(prefix="experts."), assign=True)
    region = layers._region(layer, device)
    assert all(a is b for a, b in zip(region.parameters, layer.experts.parameters(), strict=True))
    assert region.parameters[0] is not first.parameters[0]
    layers.close()


class _Scaled(OneByOne):
    """What lies behind the last product saves that product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Any, counts: Any, probs: Any) -> Any:
        sizes = counts.tolist()
        parts = zip(self.experts, x.split(sizes), probs.split(sizes))
        return torch.cat(
            [
                torch.sigmoid(e.down(torch.tanh(e.up(a)) * p.unsqueeze(1)) * self.scale)
                for e, a, p in parts
            ]
        )


def test_results_that_are_saved_again_are_computed_again(make: Callable[..., Region]) -> None:
    wanted = run(make(module=_Scaled()), 3, "none")
    for strategy in ("s0", "s3", "s4"):
        assert equal(run(make(module=_Scaled()), 3, strategy), wanted), strategy
