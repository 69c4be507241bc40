"""Packed documents (``thd``): a microbatch is one row of documents, and a slice a part of it.

A document may lie in several slices. A slice attends to what came before it of the document that
it begins in, so that its keys are ``prefix`` tokens longer than its queries, and the positions of
this document's tokens begin at ``prefix``. Every other document begins in the slice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ...hooks import hooked
from ...support import NO_GAPS, require
from ...targets import ROTATION
from .state import Sliced, Slicing


def edges_of(packed: Any) -> tuple[int, ...]:
    """Where a microbatch's documents begin, and where the last ends.

    Args:
        packed: its ``PackedSeqParams``.

    Raises:
        ConfigError: they are packed in another way.
    """
    documents = packed.cu_seqlens_q
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        other = getattr(packed, name, None)
        same = other is None or other is documents or torch.equal(other, documents)
        require(NO_GAPS, same)
    return tuple(dict.fromkeys(documents.tolist()))


def of_slice(slicing: Slicing, packed: Any) -> Any:
    """The ``PackedSeqParams`` of the slice that runs: of its own tokens, as queries.

    Args:
        packed: of the microbatch.
    """
    begin, end = slicing.span
    inner = [edge - begin for edge in slicing.documents if begin < edge < end]
    edges = [0, *inner, end - begin]
    lengths = [b - a for a, b in pairwise(edges)]
    # Positions are needed for the longest, from the beginning of its document.
    longest = max(slicing.prefix + lengths[0], *lengths)
    documents = packed.cu_seqlens_q.new_tensor(edges)
    return _with(packed, documents, documents, longest, longest)


def attended(slicing: Slicing, packed: Any) -> Any:
    """The same for core attention, whose keys begin ``prefix`` tokens before the slice.

    Args:
        packed: of the slice.
    """
    documents, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    keys = documents + slicing.prefix
    keys[0] = 0
    begin, end = slicing.span
    edges = [begin, *(edge for edge in slicing.documents if begin < edge < end), end]
    return _with(packed, documents, keys, max(b - a for a, b in pairwise(edges)), longest)


def _with(packed: Any, queries: Any, keys: Any, longest: int, longest_keys: int) -> Any:
    given = {
        "cu_seqlens_q": queries,
        "cu_seqlens_kv": keys,
        "cu_seqlens_q_padded": None if packed.cu_seqlens_q_padded is None else queries,
        "cu_seqlens_kv_padded": None if packed.cu_seqlens_kv_padded is None else keys,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest_keys,
        # Of whole samples, which slices are not.
        "tokens_per_sample": None,
        "total_tokens": None,
        "seq_idx": None,
    }
    known = {field.name for field in dataclasses.fields(packed)}
    return dataclasses.replace(packed, **{k: v for k, v in given.items() if k in known})


def positions(slicing: Slicing, frequencies: torch.Tensor) -> torch.Tensor:
    """Of the slice's tokens, each in its document: (tokens, ...).

    Args:
        frequencies: (positions, ...) as many as the longest document has.
    """
    return frequencies[_positions(slicing.span, tuple(slicing.documents), frequencies.device)]


@functools.lru_cache(maxsize=64)
def _positions(span: tuple[int, int], edges: Sequence[int], device: torch.device) -> torch.Tensor:
    begin, end = span
    parts = [(max(a, begin) - a, min(b, end) - a) for a, b in pairwise(edges)]
    return torch.cat([torch.arange(*part, device=device) for part in parts if part[0] < part[1]])


class Documents(Sliced):
    """Where Megatron looks at documents one by one."""

    @hooked(ROTATION, "rotary positions would be those of whole documents")
    def _rotated(
        self,
        original: Callable[..., Any],
        t: Any,
        freqs: Any,
        config: Any,
        cu_seqlens: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Rotation of a slice, whose frequencies are its tokens': as of one document."""
        if self.slicing.now is not None and cu_seqlens is not None:
            cu_seqlens = cu_seqlens.new_tensor([0, len(t)])
        return original(t, freqs, config, cu_seqlens, *args, **kwargs)
