"""Attention of slices by torch's kernels for whole sequences, on a GPU.

pytest tests/gpu -m gpu
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

TOKENS, WIDTH, SCALE = 512, 128, 0.1


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("ends", [(512,), (256, 512), (128, 192, 448, 512)])
def test_is_as_exact_as_the_whole(ends: tuple[int, ...], groups: int) -> None:
    """Output and all gradients, beside what rounding does to the whole with the same kernel."""
    import torch

    from megatron_ext.runtime.merged_attention import PLAIN, attend

    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, grad = (
        torch.randn(TOKENS, 2, heads, WIDTH, generator=generator, device="cuda")
        for heads in (8, groups, groups, 8)
    )

    def run(dtype: Any, kernel: Any, cut: tuple[int, ...]) -> list[Any]:
        given = [t.to(dtype).requires_grad_(True) for t in (q, k, v)]
        begins = (0, *cut)
        parts = [
            attend(given[0][begin:end], given[1][:end], given[2][:end], SCALE, kernel)
            for begin, end in zip(begins, cut)
        ]
        assert all(part is not None for part in parts), "torch chooses a kernel without a merge"
        out = torch.cat(parts)
        return [out, *torch.autograd.grad(out, given, grad.flatten(2).to(dtype))]

    exact = run(torch.float64, PLAIN, (TOKENS,))
    whole = run(torch.bfloat16, None, (TOKENS,))
    sliced = run(torch.bfloat16, None, ends)
    for right, one, ours in zip(exact, whole, sliced):
        error, rounding = (float((x.double() - right).norm()) for x in (ours, one))
        assert error < 2 * rounding
