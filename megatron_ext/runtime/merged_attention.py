"""Causal attention of a slice to all before it, as two calls of a kernel for whole sequences.

Queries attend to the prefix in full and to their own slice causally. With the log-sum-exp L of its
scores, a block that sees keys of its own contributes exp(L) of the weight of a row, so the rows of
both outputs are merged by sigmoid(L_prefix - L_own). Given the merged output and log-sum-exp, the
backward pass of each block alone is exact, as in ring attention (arXiv 2310.01889).

Tensors are (samples, heads, tokens, width); keys and values may have fewer heads, which groups of
queries share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten


class Kernel(NamedTuple):
    """An attention kernel that gives its log-sum-exp, and takes another in its backward pass.

    Attributes:
        forward: (q, k, v, causal, scale) -> (output, log-sum-exp, state for the backward pass).
        backward: (gradient, q, k, v, output, log-sum-exp, state, causal, scale) -> gradients.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _cudnn(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    found = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1], tuple(found[6:8])


def _cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, state: Any, causal: bool, scale: float
) -> Any:
    rest = (None, None, None, q.shape[2], k.shape[2], 0.0, causal)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, *state, *rest, scale=scale
    )


def _flash(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1], tuple(found[6:8])


def _flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, state: Any, causal: bool, scale: float
) -> Any:
    rest = (None, None, q.shape[2], k.shape[2], 0.0, causal)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *rest, *state, scale=scale
    )


def _scores(q: Any, k: Any, causal: bool, scale: float) -> torch.Tensor:
    """Scaled scores (samples, groups, queries of a group, tokens, keys)."""
    found: torch.Tensor = (
        q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).transpose(-1, -2) * scale
    )
    if causal:
        later = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        found = found.masked_fill(later, float("-inf"))
    return found


def _plain(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2), ()


def _plain_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, state: Any, causal: bool, scale: float
) -> Any:
    groups = (k.shape[1], -1)
    grad, out, lse = (t.unflatten(1, groups) for t in (grad, out, lse))
    weights = (_scores(q, k, causal, scale) - lse).exp()
    to_scores = grad @ v.unsqueeze(2).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    to_scores = weights * to_scores * scale
    to_queries = (to_scores @ k.unsqueeze(2)).flatten(1, 2)
    to_keys = (to_scores.transpose(-1, -2) @ q.unflatten(1, groups)).sum(2)
    return to_queries, to_keys, (weights.transpose(-1, -2) @ grad).sum(2)


PLAIN = Kernel(_plain, _plain_backward)  # shows the formula on any device, in any precision
KERNELS = {
    SDPBackend.CUDNN_ATTENTION.value: Kernel(_cudnn, _cudnn_backward),
    SDPBackend.FLASH_ATTENTION.value: Kernel(_flash, _flash_backward),
}


def kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Kernel | None:
    """The kernel that torch chooses for whole sequences on this CUDA device, if it takes the
    prefix, too; None where torch chooses another."""
    if q.device.type != "cuda" or q.shape[-1] % 8 or v.shape[-1] % 8:  # kernels would need padding
        return None
    begin = k.shape[2] - q.shape[2]
    found = set()
    for start, end, causal in ((begin, k.shape[2], True), (0, begin, False)):
        if end > start:
            keys, values = k[:, :, start:end], v[:, :, start:end]
            grouped = q.shape[1] != k.shape[1]
            found.add(
                torch._fused_sdp_choice(
                    q, keys, values, None, 0.0, causal, scale=scale, enable_gqa=grouped
                )
            )
    return KERNELS.get(found.pop()) if len(found) == 1 else None


class MergedAttention(torch.autograd.Function):
    """``apply(q, k, v, scale, kernel)``: the last keys are of the queries' own tokens."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float, kernel: Kernel) -> torch.Tensor:
        begin = k.shape[2] - q.shape[2]
        out, lse, state = kernel.forward(q, k[:, :, begin:], v[:, :, begin:], True, scale)
        ctx.split = len(state)
        if begin:
            far, far_lse, more = kernel.forward(q, k[:, :, :begin], v[:, :, :begin], False, scale)
            wide = torch.promote_types(out.dtype, torch.float32)
            share = torch.sigmoid(far_lse - lse)
            share = share if share.dim() == out.dim() else share.unsqueeze(-1)
            out = (out.to(wide) - share * (out.to(wide) - far.to(wide))).to(out.dtype)
            # Kernels read it without strides.
            lse, state = torch.logaddexp(far_lse, lse).contiguous(), (*state, *more)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.scale, ctx.kernel = scale, kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse, *states = ctx.saved_tensors
        begin = k.shape[2] - q.shape[2]

        def block(keys: slice, state: Any, causal: bool) -> Any:
            k_block, v_block = k[:, :, keys], v[:, :, keys]
            return ctx.kernel.backward(
                grad, q, k_block, v_block, out, lse, state, causal, ctx.scale
            )

        to_q, to_k, to_v = block(slice(begin, None), states[: ctx.split], True)
        if begin:
            far_q, far_k, far_v = block(slice(0, begin), states[ctx.split :], False)
            to_q = to_q + far_q
            to_k, to_v = torch.cat((far_k, to_k), 2), torch.cat((far_v, to_v), 2)
        return to_q, to_k, to_v, None, None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, kernel: Kernel | None
) -> torch.Tensor | None:
    """Megatron's layout: (tokens, samples, heads, width) each -> (tokens, samples, heads * width).

    Args:
        kernel: None: torch's choice for these tensors.

    Returns:
        None where that takes no part in this.
    """
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    kernel = kernel or kernel_for(q, k, v, scale)
    if kernel is None:
        return None
    out: torch.Tensor = MergedAttention.apply(q, k, v, scale, kernel)
    return out.permute(2, 0, 1, 3).flatten(2)
