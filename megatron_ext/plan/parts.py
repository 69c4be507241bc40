"""What a part of a model consists of: linear layers, other saved tensors, parameters, work.

Everything that is computed about a kind of layer follows from one ``Part``: its parameters, the
bytes of an activation set, the bytes between B and W, and the time of its passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .model import Job


class SavedTensor(NamedTuple):
    """One tensor (or several of one kind).

    Attributes:
        bytes_f_to_b: bytes from F to the end of B.
        bytes_b_to_w: bytes from B to W, if the backward pass is split: inputs of linear layers and
            the gradients of their outputs.
        recompute_bytes: bytes that are not kept from F on but computed again during B.
    """

    what: str
    bytes_f_to_b: int = 0
    bytes_b_to_w: int = 0
    recompute_bytes: int = 0

    def dropped(self) -> SavedTensor:
        """The same, computed again in B instead of saved in F."""
        return SavedTensor(
            self.what, 0, self.bytes_b_to_w, self.bytes_f_to_b + self.recompute_bytes
        )


class Linear(NamedTuple):
    """A linear layer on one rank.

    Attributes:
        rows: tokens that it multiplies, of all its weights together.
        inputs, outputs: features of one weight on this rank.
        weights: how many there are (experts).
        input: who keeps its input from F to B. "own": the layer itself. "kept": another tensor of
            the part, in 16 bits, and a quantized layer a copy of its own. "original": another
            tensor, and a quantized layer needs no copy if its recipe can use that one. "dropped":
            nobody, it is computed again.
        input_rows: rows of its input that this rank keeps; None: all.
        gradient_rows: rows of its output's gradient that it keeps; None: all.
        quantized: in FP8 where the job is.
        splits: W can be apart from B.
        waits: its 16-bit input is not another layer's that waits for W too.
        expert: its weights are experts.
    """

    what: str
    rows: int
    inputs: int
    outputs: int
    weights: int = 1
    bias: bool = False
    input: str = "own"
    input_rows: int | None = None
    gradient_rows: int | None = None
    quantized: bool = True
    splits: bool = True
    waits: bool = True
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Of all its weights and biases."""
        return self.weights * self.outputs * (self.inputs + self.bias)

    def dropped(self) -> Linear:
        """The same, with its input computed again during B."""
        return self._replace(input="dropped")

    def saved(self, job: Job, *, repeated: bool = False) -> SavedTensor:
        """Its input from F to B; input and output gradient from B to W.

        What sequence parallelism gathers in B stays gathered until W only where it is quantized:
        scales belong to the whole tensor.

        Args:
            repeated: it runs in B once more, and keeps what it makes of its weights only then.
        """
        recipe = job.quantization if self.quantized else None
        rows = self.rows if self.input_rows is None else self.input_rows
        gradients = self.rows if self.gradient_rows is None else self.gradient_rows
        waiting = rows
        if recipe is not None:
            waiting = gradients = self.rows

        def size(elements: int) -> int:
            return job.element_bytes * elements if recipe is None else recipe.bytes(elements)

        copied = recipe is not None and (
            self.input == "kept" or (self.input == "original" and not recipe.saves_originals)
        )
        kept = size(rows * self.inputs) if self.input == "own" or copied else 0
        needed = 0
        if self.splits:
            needed = size(gradients * self.outputs)
            if recipe is not None or self.waits:
                needed += size(waiting * self.inputs)
            grouped = self.expert and job.transformer_engine and job.moe_grouped_gemm
            if grouped and job.no_gradient_accumulation_fusion:
                # Allocated in B for all experts, whatever tokens they get.
                needed += job.element_bytes * self.weights * self.inputs * self.outputs
        again = job.element_bytes * rows * self.inputs if self.input == "dropped" else 0
        if recipe is not None and copies_weights(job):
            copies = 2 * recipe.bytes(self.weights * self.inputs * self.outputs)
            kept, again = (kept, again + copies) if repeated else (kept + copies, again)
        return SavedTensor(self.what, kept, needed, again)


class Work(NamedTuple):
    """Work between the linear layers, on one rank for one microbatch.

    Attributes:
        flops, flops_back: of attention and scans, which are no linear layers, in F and in B.
        moved, moved_back: bytes that other kernels read and write, in F and in B.
        kernels: of F; B has twice as many.
        launches, launches_back: kernels that wait for the host, in F and in B (``launches.py``).
        tensor_bytes: that tensor-parallel ranks exchange, in F and in B.
        collectives: in how many collectives they do so, in F and in B.
        expert_bytes: that expert-parallel ranks exchange, in F and in B.
    """

    flops: float = 0
    flops_back: float = 0
    moved: float = 0
    moved_back: float = 0
    kernels: float = 0
    launches: float = 0
    launches_back: float = 0
    tensor_bytes: float = 0
    collectives: float = 0
    expert_bytes: float = 0

    def plus(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(*(a + b for a, b in zip(self, other)))

    def half(self) -> Work:
        """Half of it, such as one of the two collectives around a part."""
        return Work(*(a / 2 for a in self))


class Part(NamedTuple):
    """A norm with what follows it (attention, an MLP, ...), or another piece of a stage.

    Attributes:
        pieces: linear layers and other saved tensors.
        parameters: beside those of linear layers.
        work: beside that of linear layers.
        again: of ``work``, what B computes once more.
        widest: bytes of gradients of its widest activation, inputs and outputs together.
        repeated: B runs all linear layers and all work once more.
        buffers: bytes that are there once on a device, however many such parts it has.
        host: bytes on the host from F to B.
        carried: of the keys and values of all tokens, where sequences are cut into slices.
    """

    pieces: tuple[Linear | SavedTensor, ...]
    parameters: int = 0
    work: Work = Work()
    again: Work = Work()
    widest: int = 0
    repeated: bool = False
    buffers: int = 0
    host: int = 0
    carried: int = 0

    @property
    def linears(self) -> list[Linear]:
        """Its linear layers."""
        return [piece for piece in self.pieces if isinstance(piece, Linear)]

    def tensors(self, job: Job) -> list[SavedTensor]:
        """Everything that autograd keeps of it."""
        again = self.repeated
        return [p.saved(job, repeated=again) if isinstance(p, Linear) else p for p in self.pieces]


Pieces = list[Linear | SavedTensor]

FP32 = 4  # bytes


def dropped(pieces: Iterable[Linear | SavedTensor], *, really: bool = True) -> Pieces:
    """The pieces, recomputed in B if ``really``."""
    return [piece.dropped() if really else piece for piece in pieces]


class Norm(NamedTuple):
    """A norm before other layers.

    Attributes:
        saved: what it keeps itself.
        input: for the linear layer after it, as ``Linear.input``.
        again: what B computes once more.
    """

    saved: SavedTensor
    input: str
    parameters: int
    work: Work
    again: Work


def norm_parameters(job: Job, width: int) -> int:
    """Of one norm: LayerNorm has a bias beside its weight."""
    return width if job.normalization == "RMSNorm" else 2 * width


def norm_work(job: Job) -> Work:
    """A norm over the hidden size, and the residual sum and the dropout before it."""
    numbers = job.sharded_tokens * job.hidden_size
    mask = numbers if job.hidden_dropout else 0
    e = job.element_bytes
    return Work(moved=5 * e * numbers + mask, moved_back=7 * e * numbers + mask, kernels=2)


def norm(job: Job, what: str, *, fused: bool = False) -> Norm:
    """A norm over the hidden size.

    Args:
        what: name of the part.
        fused: Transformer Engine has it in one module with a linear layer, so that its output
            cannot be recomputed.
    """
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    asked = job.cheap_recompute or "layernorm" in job.recompute_modules
    drops = asked and not (fused and job.transformer_engine)
    # Mean and reciprocal deviation of each token; RMSNorm has no mean.
    statistics = FP32 * t * (1 if job.normalization == "RMSNorm" else 2)
    saved = SavedTensor(
        f"{what} norm's input",
        e * t * h + (0 if drops else statistics),
        0,
        statistics if drops else 0,
    )
    work = norm_work(job)
    return Norm(
        saved,
        "dropped" if drops else "own",
        norm_parameters(job, h),
        work,
        work if drops else Work(),
    )


def copies_weights(job: Job) -> bool:
    """True where every microbatch quantizes the weights, and keeps that until its B. Weights
    that are gathered as they are quantized are used as they are."""
    return job.disable_parameter_transpose_cache and not job.quantized_parameters


def column(job: Job, what: str, inputs: int, outputs: int, **more: Any) -> Linear:
    """A column-parallel layer, whose input sequence parallelism shards."""
    layer = Linear(what, job.tokens, inputs, outputs, input_rows=job.sharded_tokens)
    return layer._replace(**more)


def row(job: Job, what: str, inputs: int, outputs: int, **more: Any) -> Linear:
    """A row-parallel layer, whose output's gradient sequence parallelism shards."""
    layer = Linear(what, job.tokens, inputs, outputs, gradient_rows=job.sharded_tokens)
    return layer._replace(**more)


def exchange(job: Job) -> Work:
    """All-gather and reduce-scatter around a tensor-parallel part, or one all-reduce."""
    tp = job.tensor_model_parallel_size
    if tp == 1:
        return Work()
    size = 2 * job.element_bytes * job.tokens * job.hidden_size * (tp - 1) / tp
    return Work(tensor_bytes=size, collectives=2 if job.sequence_parallel else 1)


def dropout_mask(job: Job) -> Pieces:
    """One byte a number, before the residual sum."""
    if not job.hidden_dropout:
        return []
    return [SavedTensor("dropout mask", job.sharded_tokens * job.hidden_size)]
