"""Gradients that are written outside of autograd: as autograd writes them, past no hook."""

from __future__ import annotations

import types
from typing import Any

import pytest


@pytest.fixture
def weight() -> Any:
    import torch

    return torch.nn.Parameter(torch.ones(4, 3))


def test_a_trainers_own_buffer_gets_gradients_in_place(weight: Any) -> None:
    import torch

    from megatron_ext.integration.gradients import accumulate

    buffer = torch.ones(12)
    weight.grad = buffer.view(4, 3)
    accumulate(weight, torch.full((4, 3), 2.0))
    accumulate(weight, torch.full((4, 3), 4.0))
    assert buffer.tolist() == [7.0] * 12 and weight.grad.data_ptr() == buffer.data_ptr()


def test_gradients_have_the_type_that_the_weight_asks_for(weight: Any) -> None:
    """Sums over microbatches in fp32, of a weight in bf16."""
    import torch

    from megatron_ext.integration.gradients import accumulate

    narrow = torch.nn.Parameter(weight.detach().bfloat16())
    narrow.grad_dtype = torch.float32
    for _ in range(2):
        accumulate(narrow, torch.full((4, 3), 1 + 2**-7, dtype=torch.bfloat16))
    assert narrow.grad.dtype is torch.float32 and (narrow.grad == 2 + 2**-6).all()


def test_tied_copies_without_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are in ``grad``, which may be a trainer's buffer."""
    import torch

    from megatron_ext.integration.features.v_placement import vee

    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    chunks = [
        types.SimpleNamespace(
            share_embeddings_and_output_weights=True,
            shared_embedding_or_output_weight=lambda weight=weight: weight,
        )
        for weight in weights
    ]
    monkeypatch.setattr(vee, "pp_rank", lambda: 0)
    vee.reduce_tied_gradients(chunks)  # frozen
    buffers = [torch.full((2, 2), value) for value in (1.0, 2.0)]
    for one, buffer in zip(weights, buffers):
        one.grad = buffer
    vee.reduce_tied_gradients(chunks)
    assert all((buffer == 3).all() for buffer in buffers)
