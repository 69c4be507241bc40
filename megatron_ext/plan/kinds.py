"""The table of layer kinds, and the pieces at both ends of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from .attention import attention, latent_attention
from .mlp import dense, experts
from .model import _BYTES, Job
from .parts import (
    FP32,
    Part,
    Pieces,
    SavedTensor,
    Work,
    column,
    dropout_mask,
    exchange,
    norm_parameters,
    norm_work,
)

# By their symbols in ``Job.layers``: a layer is two of them, such as "*-".
PARTS: dict[str, Callable[[Job], Part]] = {
    "*": attention,
    "+": latent_attention,
    "-": dense,
    "E": experts,
}


def layer(job: Job, kinds: str) -> Sequence[Part]:
    """The parts of one layer."""
    return _layer(job.of_layers, kinds)


@lru_cache(maxsize=1024)
def _layer(job: Job, kinds: str) -> tuple[Part, ...]:
    return tuple(PARTS[kind](job) for kind in kinds)


def prediction_layer(job: Job, kinds: str) -> list[Part]:
    """One depth of multi-token prediction: two norms, a projection, a layer, a last norm.

    DeepSeek-V3 (arXiv 2412.19437, section 2.2); Megatron's ``MultiTokenPredictionLayer``.
    """
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    numbers = 1 if job.normalization == "RMSNorm" else 2
    inputs = 2 * (e * t * h + FP32 * numbers * t)
    part = h // job.tensor_model_parallel_size
    # The projection's input is what both norms make, side by side.
    projection = column(job, "input of the projection", 2 * h, part)
    pieces: Pieces = [SavedTensor("inputs of both norms", inputs), projection]
    begin = Part((*pieces, *dropout_mask(job)), 2 * norm_parameters(job, h))
    return [begin, *layer(job, kinds), last_norm(job)]


def embedding(job: Job) -> Part:
    """Word and learned position embeddings; token numbers are kept, and a mask with dropout."""
    words = job.words * job.hidden_size + position_parameters(job)
    size = job.element_bytes * job.tokens * job.hidden_size
    # Its look-up, and adding to its gradient, which is part of B.
    work = Work(moved=2 * size, moved_back=4 * size, kernels=3).plus(exchange(job).half())
    tokens = SavedTensor("token numbers", 8 * job.tokens)
    return Part((tokens, *dropout_mask(job)), words, work)


def position_parameters(job: Job) -> int:
    """Of learned position embeddings."""
    learned = job.position_embedding_type == "learned_absolute"
    return job.max_position_embeddings * job.hidden_size if learned else 0


def last_norm(job: Job) -> Part:
    """The norm after all layers."""
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    numbers = 1 if job.normalization == "RMSNorm" else 2
    work = norm_work(job)
    saved = SavedTensor("last norm's input", e * t * h + FP32 * numbers * t)
    return Part((saved,), norm_parameters(job, h), work)


def logit_bytes(job: Job) -> int:
    """Bytes of one logit, as the output layer computes it."""
    return _BYTES[job.output_logit_dtype or job.params_dtype]


def loss(job: Job) -> Part:
    """Output layer and loss, without the layer's own weight.

    Softmax of the logits is kept in fp32. Transformer Engine's fused loss
    (``--cross-entropy-fusion-impl te``) writes the logits' gradient in their place instead.
    """
    e, t, h = job.element_bytes, job.tokens, job.hidden_size
    words, size = job.words, logit_bytes(job)
    # Its W is part of B: the logits' gradient would wait with every set.
    output = column(job, "output layer's input", h, words, quantized=False, splits=False)
    kept = SavedTensor("softmax of the logits", (size if job.in_place_loss else FP32) * t * words)
    # Which labels lie in this rank's part of the vocabulary, and which they are there.
    labels = SavedTensor("labels", 9 * t)
    # The loss reads and writes fp32 logits a few times.
    work = Work(moved=t * words * (size + 5 * 4), moved_back=t * words * (3 * 4 + e), kernels=10)
    return Part((output, kept, labels), 0, work.plus(exchange(job).half()))
