"""Parts with a recurrent state in place of attention: Mamba-2 and gated delta net.

Sources: what their autograd functions save, by reading: ``MambaSplitConv1dScanCombinedFn`` of
state-spaces/mamba, ``chunk_gated_delta_rule`` and ``causal_conv1d`` of flash-linear-attention, and
Megatron's ``mamba_mixer.py`` and ``gated_delta_net``. Their kernels need a GPU, so only their
parameters are compared with Megatron's modules here.
"""

from __future__ import annotations

from .model import Job
from .parts import FP32, Part, SavedTensor, Work, column, dropout_mask, norm, row

_MAMBA_CONVOLUTION = 4  # its width; no flag changes it
_MAMBA_CHUNK = 128  # tokens that one step of its scan takes
_DELTA_CHUNK = 64  # the same of the gated delta rule


def mamba(job: Job) -> Part:
    """A Mamba-2 mixer and the norm before it."""
    e, t, h = job.element_bytes, job.tokens, job.hidden_size
    tp = job.tensor_model_parallel_size
    heads = job.mamba_heads // tp
    inner = heads * job.mamba_head_dim
    states = job.mamba_num_groups * job.mamba_state_dim // tp
    projected = 2 * inner + 2 * states + heads
    before = norm(job, "Mamba", fused=True)
    moved = 3 * e * t * (projected + inner)
    # Two products a chunk, within it and with the states that pass between chunks.
    flops = 2 * t * inner * (_MAMBA_CHUNK + 2 * job.mamba_state_dim)
    return Part(
        (
            before.saved,
            column(job, "input of the mixer", h, projected, input=before.input),
            SavedTensor("convolution's and scan's input", e * t * projected),
            SavedTensor("scan's output", 2 * e * t * inner + FP32 * t),
            row(job, "output projection", inner, h),
            *dropout_mask(job),
        ),
        # Convolution with bias; A, D and dt's bias of each head; the gated norm.
        before.parameters + (inner + 2 * states) * (_MAMBA_CONVOLUTION + 1) + 3 * heads + inner,
        Work(flops, 2.5 * flops, moved, 2 * moved, kernels=8).plus(before.work),
        before.again,
        # B computes the fp32 states of all chunks again.
        e * t * projected + FP32 * t * inner * job.mamba_state_dim // _MAMBA_CHUNK,
    )


def delta_net(job: Job) -> Part:
    """A gated delta net (as in Qwen3-Next) and the norm before it."""
    e, t, h = job.element_bytes, job.tokens, job.hidden_size
    tp = job.tensor_model_parallel_size
    heads = job.linear_num_value_heads // tp
    keys = job.linear_num_key_heads * job.linear_key_head_dim // tp
    values = heads * job.linear_value_head_dim
    convolved = 2 * keys + values
    projected = convolved + values + 2 * heads
    repeated = 2 * heads * job.linear_key_head_dim
    before = norm(job, "delta net", fused=True)
    moved = 3 * e * t * (projected + repeated + 3 * values)
    flops = 2 * t * (repeated + values) * (_DELTA_CHUNK + job.linear_key_head_dim)
    drops_norm = job.recomputes("gdn_norm_out")
    normed = SavedTensor("gated norm's products", e * t * values + FP32 * t * heads)
    output = row(job, "output projection", values, h)
    return Part(
        (
            before.saved,
            column(job, "input of the delta net", h, projected, input=before.input),
            SavedTensor("convolution's input", e * t * projected),
            SavedTensor("normed queries and keys", e * t * 2 * keys + FP32 * 2 * t * heads),
            SavedTensor("repeated queries and keys, values", e * t * (repeated + values)),
            # Decay and beta in fp32, and the inverse of each chunk's matrix.
            SavedTensor("delta rule's own", t * heads * (2 * FP32 + e * _DELTA_CHUNK)),
            SavedTensor("delta rule's output and gate", 2 * e * t * values),
            normed.dropped() if drops_norm else normed,
            output.dropped() if drops_norm else output,
            *dropout_mask(job),
        ),
        before.parameters
        + convolved * job.linear_conv_kernel_dim
        + 2 * heads
        + job.linear_value_head_dim,
        Work(flops, 2.5 * flops, moved, 2 * moved, kernels=12).plus(before.work),
        before.again,
        e * t * (projected + repeated)
        + FP32 * t * values * job.linear_key_head_dim // _DELTA_CHUNK,
    )
