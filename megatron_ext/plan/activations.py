"""An activation set of a stage: bytes from F to B, and from B to W.

Sources: "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section
4) for the tensors of a layer; "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, table 2) for
what W needs; PipeOffload (arXiv 2503.01328, section 4) for recomputed norms and activation
functions. Tests compare with what autograd holds for Megatron's own layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from .kinds import embedding, last_norm, layer, logit_bytes, loss, prediction_layer
from .layout import Stage
from .model import Job
from .parts import FP32, Part


class SetBytes(NamedTuple):
    """One activation set of one stage, in bytes.

    Attributes:
        bytes_f_to_b: from F's start to the end of B (or BW).
        bytes_b_to_w: from the end of a split B to the end of W.
        recompute_bytes: what is computed again during B, on top, at its largest.
        logits: short-lived, in F and in B of the stage with the loss.
        layer: the gradients that are alive beside all that while B runs through the widest layer:
            of its activation function's input and output.
        gathered: what sequence parallelism gathers at once in B, and in W, where the next layer's
            is gathered ahead.
        buffers: that all sets and stages of a device share, at any time (MoE layers in chunks).
        host: on the host from F to B, of layers that copy there by themselves.
        shard: from S to T, what the rank's vocabulary passes keep of one microbatch; of its first
            stage.
        scores: while S or T runs, the logits.
        waiting: of the stage with the loss, the depths' embeddings from E to F, and their gradient
            from B to G, if the vocabulary is sharded.
        carried: the keys and values of a microbatch, which its slices share; nothing where
            sequences are not cut.
        carried_back: their gradients, in fp32.
    """

    bytes_f_to_b: int
    bytes_b_to_w: int
    recompute_bytes: int = 0
    logits: int = 0
    layer: int = 0
    gathered: int = 0
    buffers: int = 0
    host: int = 0
    shard: int = 0
    scores: int = 0
    waiting: int = 0
    carried: int = 0
    carried_back: int = 0


def sums(job: Job, parts: Iterable[Part]) -> tuple[int, int, int]:
    """Bytes of the parts' tensors: F to B, B to W, computed again."""
    rows = [tensor for part in parts for tensor in part.tensors(job)]
    return (
        sum(row.bytes_f_to_b for row in rows),
        sum(row.bytes_b_to_w for row in rows),
        sum(row.recompute_bytes for row in rows),
    )


@lru_cache(maxsize=1024)
def _layer(job: Job, kinds: str) -> tuple[Sequence[Part], tuple[int, int, int]]:
    parts = layer(job, kinds)
    return parts, sums(job, parts)


def stage_set(job: Job, stage: Stage) -> SetBytes:
    """One activation set of a stage."""
    bytes_f_to_b = bytes_b_to_w = recompute = group = 0
    parts: list[Part] = []
    full = job.recompute_granularity == "full"
    each = job.element_bytes * job.sharded_tokens * job.hidden_size
    if job.distribute_saved_activations:
        each //= job.tensor_model_parallel_size
    for place, number in enumerate(stage.layers):
        own, (b, w, extra) = _layer(job.of_layers, job.layers[number])
        parts += own
        bytes_b_to_w += w
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
    for kinds in job.mtp_layers if stage.predicts else ():
        predicting = prediction_layer(job, kinds)
        b, w, extra = sums(job, predicting)
        parts += predicting
        bytes_b_to_w += w
        # Recomputed as a whole it keeps its two inputs: hidden states and embeddings.
        bytes_f_to_b += 2 * each if full else b
        recompute = max(recompute, b if full else extra)
    ends: list[Part] = [embedding(job)] if stage.first else []
    logits = waiting = 0
    if stage.last and job.vocab_parallel:
        ends.append(last_norm(job))
        waiting = job.element_bytes * job.tokens * job.hidden_size * (job.heads - 1)
    elif stage.last:
        ends += [last_norm(job), *[loss(job)] * job.heads]
        words = job.words
        # Beside the fp32 softmax: the logits as they were computed, and their gradient in B, which
        # the output layer takes in the type of its input.
        stays = job.in_place_loss and logit_bytes(job) == job.element_bytes
        logits = 0 if stays else job.element_bytes * job.tokens * words
    b, w, _ = sums(job, ends)
    # An input, and an output's gradient of this or of the next layer.
    several = job.tokens != job.sharded_tokens and len(stage.layers) > 0
    gathered = 2 * job.element_bytes * job.tokens * job.hidden_size * several
    carried = sum(part.carried for part in parts)
    return SetBytes(
        *(bytes_f_to_b + b, bytes_b_to_w + w, recompute, logits),
        max((part.widest for part in parts), default=0),
        gathered,
        max((part.buffers for part in parts), default=0),
        sum(part.host for part in parts),
        waiting=waiting,
        carried=carried,
        carried_back=FP32 * carried // job.element_bytes,
    )


def with_shard(job: Job, sets: SetBytes) -> SetBytes:
    """The set of a rank's first stage, with what vocabulary passes keep there.

    Of each microbatch and head the last stage's output, the input's gradient, and the exponentials
    of the shard's logits. In S and T the logits, also in fp32.
    """
    if not job.vocab_parallel:
        return sets
    e, t = job.element_bytes, job.heads * job.tokens
    hidden = e * job.hidden_size * (job.heads * job.sharded_tokens + t)
    scores = t * job.words
    return sets._replace(shard=hidden + e * scores, scores=(e + FP32) * scores)
