"""Saved tensors of one microbatch, one by one: bytes from F to B, and from B to W.

Sources: "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section
4) for the tensors of a layer; "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, table 2) for
what W needs; PipeOffload (arXiv 2503.01328, section 4) for recomputed norms and activation
functions. Tests compare with what autograd holds for Megatron's own layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .model import Job


class SavedTensor(NamedTuple):
    """One tensor (or several of one kind).

    Attributes:
        what: which, for people.
        bytes_f_to_b: bytes from F to the end of B.
        bytes_b_to_w: bytes from B to W, if the backward pass is split: inputs of linear layers and
            the gradients of their outputs.
        recompute_bytes: bytes that are not kept from F on but computed again during B.
    """

    what: str
    bytes_f_to_b: int = 0
    bytes_b_to_w: int = 0
    recompute_bytes: int = 0

    def recomputed(self) -> SavedTensor:
        """The same, computed again during B instead of saved in F."""
        return SavedTensor(
            self.what, 0, self.bytes_b_to_w, self.bytes_f_to_b + self.recompute_bytes
        )


class SetBytes(NamedTuple):
    """One activation set of one stage, in bytes.

    Attributes:
        bytes_f_to_b: from F's start to the end of B (or BW).
        bytes_b_to_w: from the end of a split B to the end of W.
        recompute_bytes: what is computed again during B, on top, at its largest.
        logits: short-lived, in F and in B of the stage with the loss.
        layer: the gradients that are alive beside all that while B runs through the widest layer:
            of its activation function's input and output.
    """

    bytes_f_to_b: int
    bytes_b_to_w: int
    recompute_bytes: int = 0
    logits: int = 0
    layer: int = 0


_FLOAT = 4


def _norm(job: Job, name: str, *, discards: bool) -> list[SavedTensor]:
    """A norm and its output, which is the input of the linear layers after it."""
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    # Mean and reciprocal deviation of each token; RMSNorm has no mean.
    statistics = _FLOAT * t * (1 if job.normalization == "RMSNorm" else 2)
    out = e * t * h
    needed = _gathered(job, h)
    if discards:
        return [
            SavedTensor(f"{name} norm's input", e * t * h),
            SavedTensor(f"{name} norm's output", 0, needed, out + statistics),
        ]
    return [
        SavedTensor(f"{name} norm's input", e * t * h + statistics),
        SavedTensor(f"{name} norm's output", out, needed),
    ]


def _gathered(job: Job, width: int) -> int:
    """A column-parallel layer's input as W has it.

    Local layers gather it over sequence-parallel ranks in W, Transformer Engine's do so in B.
    """
    tokens = job.tokens if job.transformer_engine else job.sharded_tokens
    return job.element_bytes * tokens * width


def _norm_discards(job: Job, *, fused: bool) -> bool:
    """True if a norm's output is recomputed; ``fused``: TE has it in one module with a linear."""
    asked = job.cheap_recompute or "layernorm" in job.recompute_modules
    return asked and not (fused and job.transformer_engine)


def attention(job: Job) -> list[SavedTensor]:
    """Input norm and self-attention of one layer."""
    e, t, tp = job.element_bytes, job.tokens, job.tensor_model_parallel_size
    q, k = job.query_width // tp, job.key_width // tp
    recomputed = "core_attn" in job.recompute_modules
    items = _norm(job, "attention", discards=_norm_discards(job, fused=True))
    if not job.flash_attention:
        # Without a flash kernel keys and values are repeated for every query head first.
        keys = 2 * (k if recomputed else q)
        items.append(SavedTensor("queries, keys, values", e * t * (q + keys), e * t * (q + 2 * k)))
        items += _scores(job, recomputed)
    else:
        items.append(SavedTensor("queries, keys, values", e * t * (q + 2 * k), e * t * (q + 2 * k)))
        # The logarithm of each row's sum of exponentials, one fp32 number a head and token.
        items.append(
            SavedTensor("flash attention's row sums", _FLOAT * t * job.num_attention_heads // tp)
        )
    if job.qk_layernorm:
        numbers = 2 if job.normalization == "LayerNorm" else 1
        rows = t * (job.num_attention_heads + job.num_query_groups) // tp
        items.append(
            SavedTensor("inputs of query and key norms", e * t * (q + k) + _FLOAT * numbers * rows)
        )
    items.append(SavedTensor("attention's output", e * t * q, e * t * q))
    # Row-parallel layers get the gradient of their output gathered.
    items.append(SavedTensor("gradient of the projection", 0, e * t * job.hidden_size))
    items += _dropout_mask(job)
    return items


def _scores(job: Job, recomputed: bool) -> list[SavedTensor]:
    """The quadratic part, 5as/h of arXiv 2205.05198 with dropout and 16 bits.

    Where softmax runs in fp32 at 16 bits, both its own output and the one that is cast are there.
    """
    scores = job.tokens * job.seq_length * job.num_attention_heads // job.tensor_model_parallel_size
    e = job.element_bytes
    size = scores * e
    if job.attention_softmax_in_fp32 and e != _FLOAT:
        size += scores * _FLOAT
    if job.attention_dropout:
        size += scores * (1 + e)
    return [
        SavedTensor("attention scores", 0 if recomputed else size, 0, size if recomputed else 0)
    ]


def _dropout_mask(job: Job) -> list[SavedTensor]:
    if not job.hidden_dropout:
        return []
    return [SavedTensor("dropout mask", job.sharded_tokens * job.hidden_size)]


def _mlp(job: Job, name: str, tokens: int, width: int, *, discards: bool) -> list[SavedTensor]:
    """fc1, activation function and fc2 of ``width`` hidden units on this rank for ``tokens``.

    Without fc1's input, which belongs to whoever makes it.
    """
    e, f, q = job.element_bytes, width, job.gates
    out = e * tokens * f
    return [
        SavedTensor(f"{name} fc1's output", e * tokens * q * f, e * tokens * q * f),
        SavedTensor(
            f"{name} activation function's output",
            0 if discards else out,
            out,
            out if discards else 0,
        ),
        SavedTensor(f"gradient of {name} fc2", 0, e * tokens * job.hidden_size),
    ]


def dense_mlp(job: Job) -> list[SavedTensor]:
    """The MLP of one layer and the norm before it."""
    width = job.ffn_hidden_size // job.tensor_model_parallel_size
    items = _mlp(job, "MLP", job.tokens, width, discards=job.cheap_recompute)
    if "mlp" in job.recompute_modules:
        # Nothing inside is kept but the input, here the norm's output.
        items = [item.recomputed() for item in items]
    norm = _norm(job, "MLP", discards=_norm_discards(job, fused=True))
    return [*norm, *items, *_dropout_mask(job)]


def routed_tokens(job: Job) -> int:
    """Tokens that one rank's experts get together, with balanced routing."""
    tokens = job.tokens * job.moe_router_topk
    # Sequence-sharded tokens meet those of the other ranks that share the experts.
    share = job.expert_tensor_parallel_size / job.tensor_model_parallel_size
    routed = int(tokens * share) if job.sequence_parallel else tokens
    if job.moe_expert_capacity_factor:
        routed = int(routed * job.moe_expert_capacity_factor)
    return routed


def moe_mlp(job: Job) -> list[SavedTensor]:
    """Router, experts and shared expert of one layer and the norm before them."""
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    routed, experts = routed_tokens(job), job.num_experts
    norm = _norm(job, "MLP", discards=_norm_discards(job, fused=False))
    shared = job.moe_shared_expert_intermediate_size
    if not shared:
        # Only the router reads it after the tokens were sorted; its gradient is not split off.
        norm[-1] = norm[-1]._replace(bytes_b_to_w=0)
    items = [
        # Logits, scores and probabilities, in fp32, and which token goes where.
        SavedTensor("router", 3 * _FLOAT * t * experts + t * experts),
        SavedTensor("experts' input", e * routed * h, e * routed * h),
        SavedTensor("probabilities of routed tokens", _FLOAT * routed),
        *_mlp(
            job,
            "experts'",
            routed,
            job.moe_ffn_hidden_size // job.expert_tensor_parallel_size,
            discards=job.cheap_recompute or "moe_act" in job.recompute_modules,
        ),
    ]
    if shared:
        width = shared // job.tensor_model_parallel_size
        tokens = job.tokens
        inner = _mlp(job, "shared expert's", tokens, width, discards=job.cheap_recompute)
        if "shared_experts" in job.recompute_modules:
            inner = [item.recomputed() for item in inner]
        items += inner
    if "moe" in job.recompute_modules:
        items = [item.recomputed() for item in items]
    return [*norm, *items, *_dropout_mask(job)]


def layer(job: Job, number: int) -> list[SavedTensor]:
    """What one transformer layer keeps, without full recomputation."""
    return [*attention(job), *(moe_mlp(job) if job.moe_layers[number] else dense_mlp(job))]


def output_layer(job: Job) -> list[SavedTensor]:
    """Last norm, output layer and loss. Softmax of the logits is kept in fp32."""
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    numbers = 1 if job.normalization == "RMSNorm" else 2
    words = job.padded_vocab_size // job.tensor_model_parallel_size
    return [
        SavedTensor("last norm's input", e * t * h + _FLOAT * numbers * t),
        SavedTensor("output layer's input", e * t * h, e * t * h),
        SavedTensor("softmax of the logits", _FLOAT * job.tokens * words, e * job.tokens * words),
        # Which labels lie in this rank's part of the vocabulary, and which they are there.
        SavedTensor("labels", 9 * job.tokens),
    ]


def embedding(job: Job) -> list[SavedTensor]:
    """Token and position numbers, and a mask if there is dropout."""
    return [SavedTensor("token numbers", 8 * job.tokens), *_dropout_mask(job)]


def _widest(job: Job, number: int) -> int:
    if job.moe_layers[number]:
        rows, width = routed_tokens(job), job.moe_ffn_hidden_size
        width //= job.expert_tensor_parallel_size
    else:
        rows, width = job.tokens, job.ffn_hidden_size // job.tensor_model_parallel_size
    return job.element_bytes * rows * width * (job.gates + 1)


def _sum(items: Iterable[SavedTensor]) -> tuple[int, int, int]:
    rows = list(items)
    return (
        sum(i.bytes_f_to_b for i in rows),
        sum(i.bytes_b_to_w for i in rows),
        sum(i.recompute_bytes for i in rows),
    )


def stage_set(job: Job, layers: range, *, first: bool, last: bool) -> SetBytes:
    """One activation set of a stage.

    Args:
        job: the job.
        layers: numbers of its layers.
        first, last: it has the embedding, or the output layer and the loss.
    """
    bytes_f_to_b = bytes_b_to_w = recompute = widest = 0
    group = 0
    full = job.recompute_granularity == "full"
    each = job.element_bytes * job.sharded_tokens * job.hidden_size
    if job.distribute_saved_activations:
        each //= job.tensor_model_parallel_size
    for place, number in enumerate(layers):
        b, w, extra = _sum(layer(job, number))
        bytes_b_to_w += w
        widest = max(widest, _widest(job, number))
        if full and job.recompute_method == "block" and place >= job.recompute_num_layers:
            bytes_f_to_b += b
        elif full:
            of_group = 1 if job.recompute_method == "block" else job.recompute_num_layers
            bytes_f_to_b += each if place % of_group == 0 else 0
            group = (group if place % of_group else 0) + b
            recompute = max(recompute, group)
        else:
            bytes_f_to_b += b
            # One layer's at a time; what a split W needs of it is in ``bytes_b_to_w``.
            recompute = max(recompute, extra)
    logits = 0
    for there, part in ((first, embedding), (last, output_layer)):
        if there:
            b, w, _ = _sum(part(job))
            bytes_f_to_b, bytes_b_to_w = bytes_f_to_b + b, bytes_b_to_w + w
    if last:
        words = job.padded_vocab_size // job.tensor_model_parallel_size
        # Beside the fp32 softmax: the logits as they were computed, and their gradient in B.
        logits = job.element_bytes * job.tokens * words
    return SetBytes(bytes_f_to_b, bytes_b_to_w, recompute, logits, widest)
