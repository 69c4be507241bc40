"""Parts with an MLP: one, or experts behind a router with a shared one beside them."""

from __future__ import annotations

from .launches import DISPATCH, ROUTER, SHARED, of_experts, waits
from .model import Job
from .moe_job import fixed_plan, in_chunks
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
)


def _activation(job: Job, rows: int, width: int) -> Work:
    """The activation function between fc1 and fc2."""
    size, gates = job.element_bytes * rows * width, job.gates
    return Work(moved=size * (gates + 1), moved_back=size * (2 * gates + 1), kernels=1)


def _inner(job: Job, name: str, fc1: Linear, outputs: int, *, drops: bool) -> Pieces:
    """``fc1``, its activation function and fc2; ``drops``: the function's output is recomputed.

    Experts get tokens that are divided and gathered by their dispatcher, not by these layers.
    """
    width = fc1.outputs // job.gates
    fc2 = fc1._replace(
        what=f"{name} activation function's output",
        inputs=width,
        outputs=outputs,
        input="dropped" if drops else "own",
        input_rows=None,
        gradient_rows=None if fc1.expert else job.sharded_tokens,
    )
    kept = SavedTensor(f"{name} fc1's output", job.element_bytes * fc1.rows * fc1.outputs)
    return [fc1, kept, fc2]


def dense(job: Job) -> Part:
    """The MLP of one layer and the norm before it."""
    h, width = job.hidden_size, job.ffn_hidden_size // job.tensor_model_parallel_size
    before = norm(job, "MLP", fused=True)
    fc1 = column(
        *(job, "input of the MLP", h, job.gates * width),
        bias=job.add_bias_linear,
        input=before.input,
    )
    pieces = _inner(job, "MLP", fc1, h, drops=job.cheap_recompute)
    recomputed = job.recomputes("mlp")
    if recomputed:
        # Nothing inside is kept but the input: the norm's, where one module has both.
        kept = 0 if job.transformer_engine else 1
        pieces = [*pieces[:kept], *dropped(pieces[kept:])]
    activation = _activation(job, job.tokens, width)
    return Part(
        (before.saved, *pieces, *dropout_mask(job)),
        before.parameters,
        activation.plus(exchange(job)).plus(before.work),
        (activation if job.cheap_recompute else Work()).plus(before.again),
        job.element_bytes * job.tokens * width * (job.gates + 1),
        recomputed,
    )


def routed_tokens(job: Job) -> int:
    """Tokens that one rank's experts get together, with balanced routing."""
    # A rank's own tokens meet those of the other ranks that share the experts.
    tp, etp = job.tensor_model_parallel_size, job.expert_tensor_parallel_size
    routed = job.tokens * job.moe_router_topk * etp // tp
    if job.moe_expert_capacity_factor:
        routed = int(routed * job.moe_expert_capacity_factor)
    return routed


def _group_bytes(job: Job) -> int:
    """All tokens of the ranks that share the experts, which the dispatcher allgather brings to each
    of them; of other dispatchers, and on one rank, nothing."""
    ranks = job.expert_model_parallel_size * job.expert_tensor_parallel_size
    if job.moe_token_dispatcher_type != "allgather" or ranks == 1:
        return 0
    latent = job.moe_latent_size or job.hidden_size
    return job.element_bytes * job.sharded_tokens * ranks * latent


def experts(job: Job) -> Part:
    """Router, experts and shared expert of one layer and the norm before them."""
    e, h, t = job.element_bytes, job.hidden_size, job.sharded_tokens
    routed, count = routed_tokens(job), job.num_experts
    own = count // job.expert_model_parallel_size
    width = job.moe_ffn_hidden_size // job.expert_tensor_parallel_size
    latent = job.moe_latent_size or h
    bias = job.add_bias_linear
    before = norm(job, "MLP")
    # The router keeps it in 16 bits; what is quantized keeps a copy, unless the norm is recomputed.
    normed = SavedTensor("MLP norm's output", e * t * h)
    source = "kept" if before.input == "own" else "original"
    router = Linear(
        "router", t, h, count, bias=bias, input="original", quantized=False, splits=False
    )
    # Logits, scores and probabilities, in fp32, and which token goes where.
    inner: Pieces = [router, SavedTensor("scores", 3 * FP32 * t * count + t * count)]
    if job.moe_latent_size:
        inner.append(Linear("input of the latent", t, h, latent, bias=bias, input=source))
        inner.append(Linear("experts' outputs in the latent", t, latent, h, bias=bias))
    fc1 = Linear("experts' input", routed, latent, job.gates * width, own, bias, expert=True)
    # Cheap recompute leaves experts in chunks alone; where it asks for moe_act, the plan is s0.
    drops = (job.cheap_recompute and fixed_plan(job) is None) or job.recomputes("moe_act")
    routed_pieces = _inner(job, "experts'", fc1, latent, drops=drops)
    inner += [*routed_pieces, SavedTensor("probabilities of routed tokens", FP32 * routed)]
    parameters, shared = before.parameters, job.moe_shared_expert_intermediate_size
    if shared:
        inner += _shared_expert(job, source)
        parameters += h if job.moe_shared_expert_gate else 0
    pieces: Pieces = dropped([normed], really=before.input == "dropped")
    recomputed = job.recomputes("moe")
    pieces += dropped(inner, really=recomputed)
    work, activation = _routing(job, routed), _activation(job, routed, width)
    work = work.plus(waits(job, ROUTER)).plus(waits(job, DISPATCH))
    work = work.plus(of_experts(job, own))
    if shared:
        tp = job.tensor_model_parallel_size
        work = work.plus(_activation(job, job.tokens, shared // tp)).plus(waits(job, SHARED))
        work = work.plus(exchange(job))
    whole = Part(
        (before.saved, *pieces, *dropout_mask(job)),
        parameters,
        work.plus(activation).plus(before.work),
        (activation if drops else Work()).plus(before.again),
        # As many gradients as gathered tokens, before and after those inside the experts.
        max(e * routed * width * (job.gates + 1), _group_bytes(job)),
        recomputed,
        _group_bytes(job),  # in Megatron's global memory buffer, which stays
    )
    return in_chunks(job, whole)


def _shared_expert(job: Job, source: str) -> Pieces:
    width = job.moe_shared_expert_intermediate_size // job.tensor_model_parallel_size
    h, what = job.hidden_size, "input of the shared expert"
    fc1 = column(job, what, h, job.gates * width, input=source)
    pieces = _inner(job, "shared expert's", fc1, h, drops=job.cheap_recompute)
    return [fc1, *dropped(pieces[1:], really=job.recomputes("shared_experts"))]


def _routing(job: Job, routed: int) -> Work:
    """Sorting tokens to experts and back, and the exchange with the ranks of all experts.

    Every rank gets all tokens from the dispatcher allgather, and routed rows from others: of
    expert-parallel ranks by all-to-alls, then of the ranks that have parts of the same experts.
    """
    row = 2 * job.element_bytes * (job.moe_latent_size or job.hidden_size)  # there and back
    ep, etp = job.expert_model_parallel_size, job.expert_tensor_parallel_size
    own = routed / etp
    sent, gathered = own * (ep - 1) / ep, own * (etp - 1)
    if job.moe_token_dispatcher_type == "allgather":
        sent, gathered = job.sharded_tokens * (ep * etp - 1), 0
    return Work(
        moved=2 * row * routed,
        moved_back=2 * row * routed,
        kernels=10,
        tensor_bytes=row * gathered,
        collectives=2 * (gathered > 0),
        expert_bytes=row * sent,
    )
