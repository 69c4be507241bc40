"""Launches that the planner counts, sums of rows without atomics, sums of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.moe.buffers import Memory
from megatron_ext.moe.exchange import Exchange, Groups, HostCopy, sum_rows
from megatron_ext.moe.graph import GradientSums
from megatron_ext.moe.plan import LayerPlan
from megatron_ext.moe.region import Region
from megatron_ext.offload.device import CpuDevice
from megatron_ext.plan import moe_times
from tests.ranks.moe.regions import (
    EXPERTS,
    WIDTH,
    batch,
)


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
    assert forward - experts == moe_times._OURS[0]
    resent = (launches(8, "s2")[1] - launches(4, "s2")[1]) / 4
    assert resent - backward == moe_times._AGAIN


def test_what_the_exchange_of_counts_reads_lives_until_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's work lets go of it when the side stream waits, before the stream that made it."""
    read: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def gather(out: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
        out.copy_(source.repeat(2))
        read.append(weakref.ref(source))
        return SimpleNamespace(wait=lambda: alive.append(read[0]() is not None))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    exchange = Exchange.__new__(Exchange)
    exchange.groups, exchange.experts = Groups(None, None, None), 4
    exchange.ep_size, exchange.ep_rank, exchange.tp_size, exchange.tp_rank = 2, 0, 1, 0
    exchange.local_experts = 2
    counted = exchange.count(torch.tensor([[True, False, True, False]] * 4), 2)
    assert read[0]() is not None  # what is computed next may not take its memory
    assert counted.host.wait().sum() == 16
    assert alive == [True]
    assert read[0]() is None


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
