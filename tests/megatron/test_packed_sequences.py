"""Packed documents in slices."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ext.cpu import context_parallel
from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.slices import carry, documents
from megatron_ext.integration.features.slices.model import _pack
from megatron_ext.integration.features.slices.state import Cuts, Slicing
from megatron_ext.integration.hooks import declared
from megatron_ext.schedule.spec import Cut
from megatron_ext.schedule.units import units_of


def packed(edges: list[int], **changed: Any) -> PackedSeqParams:
    """Documents between ``edges``, as Megatron's scripts give them."""
    of = torch.tensor(edges, dtype=torch.int32)
    longest = max(int(n) for n in of.diff())
    given = {"cu_seqlens_q": of, "cu_seqlens_kv": of, "max_seqlen_q": longest}
    return PackedSeqParams(**({"qkv_format": "thd", "max_seqlen_kv": longest} | given | changed))


def slices_of(edges: list[int], ends: tuple[int, ...]) -> Iterator[tuple[Slicing, Any]]:
    """In each slice of a microbatch, its ``PackedSeqParams``."""
    slicing, whole = Slicing(), packed(edges)
    cuts = Cuts([lambda tokens: Cut(ends, Fraction(0))], ends[-1])
    for unit in units_of([len(ends)]):
        with slicing.at(cuts, 0, unit, first=True):
            _pack(slicing, whole, SimpleNamespace())
            yield slicing, documents.of_slice(slicing, whole)


def test_what_a_slice_has_of_its_documents() -> None:
    found = []
    for slicing, own in slices_of([0, 3, 4, 9, 12], (4, 6, 7, 12)):
        keys = documents.attended(slicing, own)
        assert own.cu_seqlens_q is own.cu_seqlens_kv is not keys.cu_seqlens_kv
        assert keys.max_seqlen_kv == max(keys.cu_seqlens_kv.diff().tolist())
        assert keys.max_seqlen_q == max(keys.cu_seqlens_q.diff().tolist())
        positions = documents.positions(slicing, torch.arange(5) * 10).tolist()
        assert len(positions) == own.cu_seqlens_q[-1]
        assert max(positions) == 10 * (own.max_seqlen_q - 1)
        found.append((own.cu_seqlens_q.tolist(), keys.cu_seqlens_kv.tolist(), positions))
    assert found == [
        ([0, 3, 4], [0, 3, 4], [0, 10, 20, 0]),
        ([0, 2], [0, 2], [0, 10]),
        ([0, 1], [0, 3], [20]),
        ([0, 2, 5], [0, 5, 8], [30, 40, 0, 10, 20]),
    ]


def test_transformer_engine_gets_masks_of_documents() -> None:
    """A cut document is seen from its end; the mask of whole ones is Megatron's own. Gradients of
    keys are those of the slices that attend to them."""
    from megatron.core.transformer.enums import AttnMaskType

    seen, causal = [], AttnMaskType.causal

    def original(self: Any, q: Any, k: Any, v: Any, mask: Any, kind: Any, **given: Any) -> Any:
        seen.append((len(k), mask, kind.name, given["packed_seq_params"].cu_seqlens_kv.tolist()))
        return (k + v).sum() * len(seen)

    module, outs, keys = object(), [], torch.zeros(12, 1, 4, requires_grad=True)
    forward = None
    for slicing, own in slices_of([0, 3, 4, 9, 12], (4, 6, 12)):
        if forward is None:
            sliced = carry.Attention()
            sliced.slicing, sliced.implementations = slicing, ["transformer_engine"]
            (hook, *_) = declared(sliced)
            forward = hook.make(original)
        begin, end = slicing.span
        part = keys[begin:end]
        outs.append(forward(module, part, part, part, "mask", causal, packed_seq_params=own))
    assert seen == [
        (4, None, "padding_causal", [0, 3, 4]),
        (2, None, "padding_causal", [0, 2]),
        (8, None, "padding_causal_bottom_right", [0, 5, 8]),
    ]
    for out in reversed(outs):
        out.backward()
    assert keys.grad is not None
    assert keys.grad[:, 0, 0].tolist() == [2] * 4 + [2 * (2 + 3)] * 2 + [2 * 3] * 6


def test_packing_that_is_not_cut_is_refused() -> None:
    edges = torch.tensor([0, 3, 8])
    with pytest.raises(ConfigError, match="there is padding between them"):
        documents.edges_of(packed([0, 2, 8], cu_seqlens_q_padded=edges))
    assert documents.edges_of(packed([0, 3, 8, 8, 8], cu_seqlens_q_padded=None)) == (0, 3, 8)
    slicing = Slicing()
    samples = packed([0, 3, 8])
    samples.tokens_per_sample = 4
    config = SimpleNamespace(moe_router_load_balancing_type="seq_aux_loss")
    with pytest.raises(ConfigError, match="need one packed sample a row"):
        _pack(slicing, samples, config)


def test_the_mask_of_documents_on_cpu() -> None:
    """Of whole documents that which compares their numbers; of a part its last rows."""
    group, edges = SimpleNamespace(size=lambda: 1), torch.tensor([0, 3, 4, 9])
    whole = context_parallel._mask(9, group, edges)
    assert torch.equal(context_parallel._mask_of_documents(edges, edges), whole)
    part = context_parallel._mask_of_documents(torch.tensor([0, 3]), torch.tensor([0, 5]))
    assert torch.equal(part, whole[..., 6:, 4:])
