"""Times of MoE layers in chunks: a job's costs, what chunks gain a pass, plans worth a search.

Products, kernels and messages have the planner's prices (``times.price_of``), so that one chunk
with nothing restored takes what Megatron's layer takes. A call pays for the kernels that sort the
rows of all its chunks, a chunk for its own (``_ONCE``, ``_OURS``: counted on CPU tensors, without
those of the experts), and reads all weights of its experts; where their input is not kept, it adds
to all their gradients, and otherwise all chunks do so at once, behind their input gradients: why
many small chunks are slower than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, inf

from ..moe.plan import (
    STOCK,
    Footprint,
    LayerPlan,
    Strategy,
    copied_bytes,
    footprint,
)
from .gpu import Gpu
from .launches import of_experts
from .mlp import _activation, _routing, experts, routed_tokens
from .model import Job
from .moe_job import (
    fixed_plan,
    has_experts,
    obstacle,
    open_plans,
    shape_of,
    with_plan,
    within,
    without_chunks,
)
from .moe_layer import ChunkTimes, Costs, LayerRun, Local, run_layer
from .parts import Part, Work

ASSUMPTIONS = (
    "MoE layers in chunks: balanced routing; copies, all-to-alls and products do not slow each "
    "other down; weight gradients wait for W with none and s0, and are part of B with s1 to s4",
    "all-to-alls: at --peer-bandwidth in a node and --network-bandwidth between nodes, at once; a "
    "flex dispatcher (DeepEP) sends a token once to each node",
)

# (F, B, W) seconds of a part; ``times.price_of`` makes one.
Price = Callable[[Part], Sequence[float]]
Runs = Callable[[LayerPlan], LayerRun]  # ``job_run`` of a job

# Small kernels a chunk: Local's steps, in forward, in backward, and there for rows that are sent
# again; all chunks are split at once. Of Megatron's own layer those that the planner counts.
_ONCE = 53
_OURS = (Local(0, 2, 4, 1, 2), Local(0, 1, 1, 2, 4))
_AGAIN = Local(0, 2, 2, 0, 0)
_STOCK = (Local(0, 3, 2, 2, 3), Local(0, 6, 4, 4, 6))

MARGIN = 0.02  # a plan must be faster than a simpler one by this, as in training


def exchange_rate(job: Job, gpu: Gpu) -> float:
    """Bytes/s at which rows travel between a device and other expert-parallel ranks.

    Rows to ranks of the same node go over the peer link, at the same time as the others over the
    network; the slower of both counts. A flex dispatcher (DeepEP, HybridEP) sends a token once to
    each node that has one of its experts, where an all-to-all sends it once for each expert.
    ``--exchange-bandwidth`` takes the place of all that.
    """
    ep, node = job.expert_model_parallel_size, gpu.devices_per_node
    if gpu.exchange:
        return gpu.exchange
    near = min(ep, max(1, node // job.expert_tensor_parallel_size))
    if near == ep:
        return gpu.peer
    if job.moe_token_dispatcher_type == "allgather":
        return gpu.ring(ep * job.expert_tensor_parallel_size)
    inside, outside = (near - 1) / (ep - 1), (ep - near) / (ep - 1)
    if job.moe_token_dispatcher_type == "flex":
        # What arrives in a node is passed on there.
        inside, outside = 1.0, outside * _nodes_per_token(job, near) / job.moe_router_topk
    rate = gpu.network / outside
    return min(rate, gpu.peer / inside) if inside else rate


def _nodes_per_token(job: Job, near: int) -> float:
    """Expected number of nodes that have experts of one token, all choices as likely."""
    experts, k = job.num_experts, job.moe_router_topk
    own = experts * near // job.expert_model_parallel_size
    nodes = job.expert_model_parallel_size / near
    return nodes * (1 - comb(experts - own, k) / comb(experts, k))


def job_footprint(job: Job, plan: LayerPlan, in_flight: int = 1) -> Footprint:
    """Bytes of ``in_flight`` calls that are kept, and of the buffers, by ``moe/plan.py``."""
    return footprint(shape_of(job), routed_tokens(job), in_flight, plan)


def job_costs(job: Job, gpu: Gpu, price: Price) -> Costs:
    """Seconds of one chunk's operations, for any plan of the job's MoE layers.

    Args:
        job: with experts.
        gpu: of whose rates copies take theirs.
        price: of products, kernels and messages.
    """
    shape, rows = shape_of(job), routed_tokens(job)
    linears = [one for one in experts(without_chunks(job)).linears if one.expert]
    own = linears[0].weights
    gathers = job.moe_token_dispatcher_type == "allgather"
    sends = job.with_(moe_token_dispatcher_type="alltoall")
    rate = exchange_rate(sends, gpu)
    slower = 1.0 if rate == inf else exchange_rate(job, gpu) / rate

    def costs(plan: LayerPlan) -> ChunkTimes:
        chunk = -(-rows // plan.chunks)
        own_messages = gathers and not plan.stock  # all-to-alls in place of the dispatcher's
        routing = _routing(sends if own_messages else job, chunk)
        sent = routing.expert_bytes * (slower if own_messages else 1)
        message = price(Part((), work=Work(expert_bytes=sent)))[0] / 2
        activation, launched = _activation(job, chunk, shape.ffn), of_experts(job, own)
        fc1, fc2 = (one._replace(rows=chunk) for one in linears)
        whole = price(Part(tuple(linears)))[2]
        if plan.chunks > 1:  # the rows of all chunks are joined before: read and written
            joined = 2 * rows * shape.element_bytes * sum(x.inputs + x.outputs for x in linears)
            whole += price(Part((), work=Work(moved=joined)))[0]
        f, b, w = price(Part((fc1, fc2), work=activation.plus(launched)))
        again = price(Part((fc1,), work=activation.plus(launched.half())))[0]
        moved = routing.moved / 4  # rows read and written by each of pack, sort, unsort and add

        def local(kernels: Local, times: int = 1) -> Local:
            seconds = [
                price(Part((), work=Work(moved=times * moved, kernels=count)))[0]
                for count in kernels[1:]
            ]
            return Local(price(Part((), work=Work(kernels=kernels.split)))[0], *seconds)

        forward, backward = _STOCK if plan.stock else _OURS
        if not plan.stock:
            forward = forward._replace(split=_ONCE / plan.chunks)
        given = copied_bytes(shape, chunk, Strategy.S3)  # the input alone
        inside = copied_bytes(shape, chunk, Strategy.S2)
        return ChunkTimes(
            *(message, message, f, b, w, whole, again, price(Part((), work=activation))[0]),
            given / gpu.to_host,
            inside / gpu.to_host,
            given / gpu.to_device,
            inside / gpu.to_device,
            *(local(forward), local(backward), local(_AGAIN)),
        )

    return costs


def job_run(job: Job, gpu: Gpu, price: Price, plan: LayerPlan) -> LayerRun:
    """One call of a MoE layer of the job by ``plan``, in seconds; weight gradients wait for W
    passes, where the plan lets them."""
    return run_layer(plan, job_costs(job, gpu, price), split=True)


def chunk_gain(job: Job, runs: Runs, price: Price, kinds: str) -> tuple[float, float, float]:
    """Seconds of F, B and W of a layer with these parts that the job's plan adds to Megatron's."""
    plan = fixed_plan(job)
    if plan is None or "E" not in kinds:
        return (0.0, 0.0, 0.0)
    ours, stock = runs(plan), runs(STOCK)
    f, b = (
        getattr(ours, name).makespan - getattr(stock, name).makespan
        for name in ("forward", "backward")
    )
    if job.recomputes("moe"):
        b += f
    if job.cheap_recompute or job.recomputes("moe_act"):  # otherwise than Megatron's layer
        work = _activation(job, routed_tokens(job), shape_of(job).ffn)
        b -= price(Part((), work=work))[0]
    count = kinds.count("E")
    return (count * f, count * b, count * (ours.weights - stock.weights))


def variants(job: Job, runs_of: Runs) -> list[Job]:
    """The job with each plan of its MoE layers that is worth a search; Megatron's own first.

    Of plans that keep everything the fastest, if it is faster than Megatron's layer; the fastest
    that computes the activation function again; of those that restore the experts' input the
    fastest, and the one that needs least memory. What
    ``--moe-pipeline-chunks`` and ``--moe-memory-reuse`` fix stays fixed.

    Raises:
        PlanError: nothing keeps ``--moe-memory-budget``.
    """
    if not has_experts(job) or job.moe_pipeline_chunks == "off":
        return [job]
    if obstacle(job, "none") is not None or fixed_plan(job) is not None:
        return [job]
    plans, in_flight = allowed_plans(job), calls(job)
    runs = {plan: runs_of(plan) for plan in plans}
    sizes = {plan: job_footprint(job, plan, in_flight).peak_bytes for plan in plans}
    keeping = [plan for plan in plans if plan.strategy is Strategy.NONE]
    activating = [plan for plan in plans if plan.strategy is Strategy.S0]
    restoring = [plan for plan in plans if not plan.strategy.keeps_products]
    found = [STOCK] if STOCK in plans else []
    if keeping:
        best = min(keeping, key=lambda plan: runs[plan].time)
        if STOCK not in plans or runs[best].time < (1 - MARGIN) * runs[STOCK].time:
            found.append(best)
    if activating:
        found.append(min(activating, key=lambda plan: (runs[plan].time, sizes[plan])))
    if restoring:
        fastest = min(restoring, key=lambda plan: (runs[plan].time, sizes[plan]))
        least = min(restoring, key=lambda plan: (sizes[plan], runs[plan].time))
        found += [fastest, *([] if least == fastest else [least])]
    return [with_plan(job, plan) for plan in dict.fromkeys(found)]


def allowed_plans(job: Job) -> list[LayerPlan]:
    """The plans that the job's flags leave open and its other settings allow, simplest first.

    Raises:
        PlanError: nothing keeps ``--moe-memory-budget``.
    """
    plans = open_plans(job.moe_pipeline_chunks, job.moe_memory_reuse)
    plans = [plan for plan in plans if obstacle(job, plan.strategy.value) is None]
    if obstacle(job, "none") is not None:
        plans = [STOCK]
    if job.moe_memory_budget is None:
        return plans
    return within(job, plans, routed_tokens(job), calls(job))


def layers_of_rank(job: Job) -> int:
    """MoE layers of the pipeline rank that has most, evenly divided."""
    layers = sum("E" in kinds for kinds in (*job.layers, *job.mtp_layers))
    return max(1, -(-layers // job.pipeline_model_parallel_size))


def calls(job: Job) -> int:
    """MoE layers of a rank times microbatches in flight, of 1F1B's first rank."""
    pp = job.pipeline_model_parallel_size
    in_flight = pp if job.global_batch_size is None else min(pp, job.microbatches())
    return layers_of_rank(job) * in_flight
