"""MoE layers in chunks on a GPU: restored by real copies, bit for bit what was kept.

One rank, so without communication. pytest tests/gpu -m gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

EXPERTS, WIDTH, FFN, TOKENS = 8, 1024, 2048, 8192


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone; it carries nothing."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _experts() -> Any:
    import torch

    class Product(torch.nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            weight = torch.randn(EXPERTS, inputs, outputs) / inputs**0.5
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: Any, sizes: list[int]) -> Any:
            return torch.cat([a @ w for a, w in zip(x.split(sizes), self.weight)])

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Product(WIDTH, FFN), Product(FFN, WIDTH)

        def forward(self, x: Any, counts: Any, probs: Any) -> Any:
            sizes = counts.tolist()
            inner = torch.nn.functional.gelu(self.up(x, sizes)) * probs[:, None].to(x.dtype)
            return self.down(inner, sizes)

    torch.manual_seed(1)
    return Experts().to("cuda", torch.bfloat16)


@pytest.mark.parametrize("chunks", [2, 4])
def test_strategies_are_bitwise_the_same(group: Any, chunks: int) -> None:
    """Three layers behind each other, twice, so that every shared buffer is used again."""
    import torch

    from megatron_ext.moe.buffers import Memory
    from megatron_ext.moe.exchange import Exchange, Groups
    from megatron_ext.moe.plan import LayerPlan, Strategy
    from megatron_ext.moe.region import Region

    module = _experts()
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(TOKENS, EXPERTS, device="cuda")
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(2, dim=1).indices, True)
    found = {}
    for strategy in Strategy:
        memory = Memory.on(x.device)
        exchange = Exchange(Groups(group, None, group), EXPERTS)
        parameters, linears = list(module.parameters()), [(module.up, module.down)]
        region = Region(exchange, module, parameters, memory, linears=linears)
        for _ in range(2):
            inputs = [x.clone().requires_grad_(), (scores * chosen).requires_grad_()]
            out = inputs[0]
            for _ in range(3):
                out = out + region(out, inputs[1], chosen, LayerPlan(chunks, strategy))
            gradients = torch.autograd.grad(
                out.float().square().mean(), [*inputs, *module.parameters()]
            )
        found[strategy] = [out.detach(), *gradients]
        torch.cuda.synchronize()
        memory.close()
    for strategy, tensors in found.items():
        pairs = zip(tensors, found[Strategy.NONE])
        assert all(torch.equal(a, b) for a, b in pairs), strategy
