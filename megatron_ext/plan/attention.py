"""Parts with attention: grouped queries, sliding windows, multi-latent attention.

Sources: "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section
4) for the tensors of a layer; DeepSeek-V2 (arXiv 2405.04434, section 2.1) for multi-latent
attention, Megatron's ``multi_latent_attention.py`` for what it recomputes.
"""

from __future__ import annotations

from .launches import ATTENTION, LATENT, waits
from .model import Job
from .parts import (
    FP32,
    Linear,
    Part,
    Pieces,
    SavedTensor,
    Work,
    column,
    dropout_mask,
    dropped,
    exchange,
    norm,
    norm_parameters,
    row,
)


def _core_work(job: Job, queries: int, values: int, window: int | None) -> Work:
    """Between queries, keys, values and the output; ``queries``, ``values``: widths on a rank."""
    span = min(job.seq_length, window or job.seq_length)
    # Causal attention needs half of the scores; a window about all of its own.
    share = 0.5 if span == job.seq_length else 1.0
    flops = 2 * job.tokens * span * share * (queries + values)
    if job.flash_attention:
        # FlashAttention-2, section 4.1: the backward pass takes 2.5 times the forward one.
        return Work(flops, 2.5 * flops, kernels=1)
    flops = 2 * job.tokens * job.seq_length * (queries + values)
    scores = job.tokens * job.seq_length * job.num_attention_heads / job.tensor_model_parallel_size
    e = job.element_bytes
    # All scores: written, softmax reads and writes them, read; in B once more as gradients. Dropout
    # reads, writes, and has its mask.
    dropout = 2 * e + 1 if job.attention_dropout else 0
    moved, back = (4 * e + dropout) * scores, (7 * e + dropout) * scores
    return Work(flops, 2 * flops, moved, back, kernels=4 if dropout else 3)


def scores(job: Job) -> Pieces:
    """What attention itself keeps: row sums with a flash kernel, else all scores.

    The quadratic part is 5as/h of arXiv 2205.05198 with dropout and 16 bits. Where softmax runs in
    fp32 at 16 bits, both its own output and the one that is cast are there.
    """
    tp, e = job.tensor_model_parallel_size, job.element_bytes
    if job.flash_attention:
        # The logarithm of each row's sum of exponentials, one fp32 number a head and token.
        rows = FP32 * job.tokens * job.num_attention_heads // tp
        return [SavedTensor("flash attention's row sums", rows)]
    count = job.tokens * job.seq_length * job.num_attention_heads // tp
    size = count * e
    if job.attention_softmax_in_fp32 and e != FP32:
        size += count * FP32
    if job.attention_dropout:
        size += count * (1 + e)
    return dropped([SavedTensor("attention scores", size)], really=job.recomputes("core_attn"))


def _gathered(job: Job, widths: int) -> int:
    """Keys and values (of these widths together) of the whole sequence, and their gradients, where
    context-parallel ranks gather them."""
    cp = job.context_parallel_size
    gathers = cp > 1 and job.cp_comm_type == "all_gather"
    return 2 * job.element_bytes * job.tokens * cp * widths if gathers else 0


def attention(job: Job) -> Part:
    """Self-attention with grouped queries and the norm before it."""
    e, t, h = job.element_bytes, job.tokens, job.hidden_size
    tp = job.tensor_model_parallel_size
    q, k = job.query_width // tp, job.key_width // tp
    before = norm(job, "attention", fused=True)
    bias = job.add_bias_linear or job.add_qkv_bias
    # With fewer groups than ranks each computes a part of them, and gets the rest from the others.
    width = q + 2 * (job.num_query_groups * job.kv_channels) // tp
    qkv = column(job, "input of queries, keys, values", h, width, bias=bias, input=before.input)
    repeated = 2 * k
    if not job.flash_attention and not job.recomputes("core_attn"):
        repeated = 2 * q  # keys and values are repeated for every query head first
    kept: Pieces = [SavedTensor("queries, keys, values", e * t * (q + repeated)), *scores(job)]
    parameters = before.parameters
    own = job.qk_layernorm and not job.qk_l2_norm  # which wins, and has no parameters
    if job.qk_layernorm or job.qk_l2_norm:
        numbers = 2 if own and job.normalization == "LayerNorm" else 1
        rows = t * (q + k) // job.kv_channels
        inputs = e * t * (q + k) + FP32 * numbers * rows
        kept.append(SavedTensor("inputs of query and key norms", inputs))
        parameters += 2 * norm_parameters(job, job.kv_channels) if own else 0
    core = _core_work(job, q, q, job.window)
    rope = 2 * e * t * (q + 2 * k)
    work = Work(moved=rope, moved_back=rope, kernels=2).plus(core).plus(exchange(job))
    work = work.plus(waits(job, ATTENTION))
    if job.num_query_groups < tp:
        # An all-gather in F, a reduce-scatter in B.
        work = work.plus(Work(tensor_bytes=e * t * width * (tp - 1), collectives=1))
    return Part(
        (
            before.saved,
            qkv,
            *kept,
            *_projection(job, q),
            *dropout_mask(job),
        ),
        parameters,
        work.plus(before.work),
        (core if job.recomputes("core_attn") else Work()).plus(before.again),
        _gathered(job, 2 * k),
        carried=2 * e * t * k,
    )


def _projection(job: Job, width: int) -> Pieces:
    """Attention's output, which a flash kernel keeps too, and the layer after it."""
    return [
        SavedTensor("attention's output", job.element_bytes * job.tokens * width),
        row(
            *(job, "output projection", width, job.hidden_size),
            bias=job.add_bias_linear,
            input="original",
        ),
    ]


def latent_attention(job: Job) -> Part:
    """Multi-latent attention and the norm before it."""
    e, t, h = job.element_bytes, job.tokens, job.hidden_size
    tp = job.tensor_model_parallel_size
    heads = job.num_attention_heads // tp
    q, v = heads * (job.qk_head_dim + job.qk_pos_emb_head_dim), heads * job.v_head_dim
    kv = heads * (job.qk_head_dim + job.v_head_dim)
    latent = job.kv_lora_rank
    before = norm(job, "attention")
    recomputes = job.recomputes("mla_up_proj")
    pieces: Pieces = [before.saved]
    parameters = before.parameters
    if job.q_lora_rank is None:
        pieces.append(column(job, "input of queries", h, q, input=before.input))
    else:
        pieces.append(_down(job, "input of compressed queries", job.q_lora_rank, before.input))
        pieces += _up(job, "queries", job.q_lora_rank, q)
    down = _down(job, "input of compressed keys", latent + job.qk_pos_emb_head_dim, before.input)
    # The same input as the queries'.
    down = down._replace(input="kept" if before.input == "own" else before.input, waits=False)
    pieces += [down, *_up(job, "keys and values", latent, kv)]
    # A view: the down-projection's whole output stays, with the rotary part of the keys.
    rotary = e * job.sharded_tokens * job.qk_pos_emb_head_dim
    pieces.append(SavedTensor("rotary part of keys", rotary, 0 if job.qk_layernorm else rotary))
    if job.qk_layernorm:
        parameters += norm_parameters(job, latent)
        parameters += norm_parameters(job, job.q_lora_rank) if job.q_lora_rank else 0
    made = SavedTensor("queries, keys, values", e * t * (2 * q + v))
    pieces += dropped([made], really=recomputes)
    pieces += scores(job)
    core = _core_work(job, q, v, None)
    rope = 2 * e * t * (q + kv)
    own = Work(moved=rope, moved_back=rope, kernels=4)
    again = (core if job.recomputes("core_attn") else Work()).plus(before.again)
    return Part(
        (*pieces, *_projection(job, v), *dropout_mask(job)),
        parameters,
        own.plus(core).plus(exchange(job)).plus(before.work).plus(waits(job, LATENT)),
        again.plus(own) if recomputes else again,
        _gathered(job, q + v),
        carried=e * t * (q + v),
    )


def _down(job: Job, what: str, width: int, source: str) -> Linear:
    """A down-projection: every rank has all of it with Transformer Engine, a part of it if not."""
    if job.transformer_engine:
        return Linear(what, job.sharded_tokens, job.hidden_size, width, input=source)
    part = width // job.tensor_model_parallel_size
    return column(job, what, job.hidden_size, part, input=source)


def _up(job: Job, what: str, rank: int, width: int) -> Pieces:
    """The norm of a latent and the up-projection to ``width``."""
    layer = column(job, f"latent of {what}", rank, width)
    if not job.qk_layernorm:
        return [layer]
    numbers = 1 if job.normalization == "RMSNorm" else 2
    rows = job.sharded_tokens
    size = job.element_bytes * rows * rank + FP32 * numbers * rows
    # Transformer Engine has norm and layer in one module, so that --recompute-modules mla_up_proj
    # covers its output.
    fused = job.transformer_engine and job.recomputes("mla_up_proj")
    return [
        SavedTensor(f"norm of the latent of {what}", size),
        layer.dropped() if fused else layer,
    ]
