"""Times of MoE layers in chunks by a closed form: what chunks gain a pass, plans worth a search.

Products, kernels and messages have the planner's prices (``times.price_of``), so that one chunk
with nothing restored takes what Megatron's layer takes. The order is the paper's: while a chunk's
experts compute, the next one's rows arrive and the last one's return. So of n chunks the first
message and the last are exposed, and between them the slowest of compute, network and copies
counts (MPMoE, paradigm 1). A call pays for the kernels that sort the rows of all its chunks, a
chunk for its own, and reads all weights of its experts; where their input is not kept, it adds to
all their gradients, and otherwise all chunks do so at once, in W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, inf
from typing import NamedTuple

from ..moe.plan import STOCK, LayerPlan, Restore, copied_bytes, saved_bytes
from .gpu import Gpu
from .launches import of_experts
from .mlp import _activation, _routing, experts, routed_tokens
from .model import Job
from .moe_job import (
    buffer_bytes,
    fixed_plan,
    has_experts,
    open_plans,
    shape_of,
    with_plan,
    without_chunks,
    without_chunks_because,
)
from .parts import Linear, Part, Work

ASSUMPTIONS = (
    "MoE layers in chunks: balanced routing; copies, all-to-alls and products do not slow each "
    "other down; weight gradients wait for W with none and s0, and are part of B with s1 to s4",
    "all-to-alls: at --peer-bandwidth in a node and --network-bandwidth between nodes, at once; a "
    "flex dispatcher (DeepEP) sends a token once to each node",
)

# (F, B, W) seconds of a part; ``times.price_of`` makes one.
Price = Callable[[Part], Sequence[float]]

# Small kernels around the experts, counted on CPU tensors: once a call, to split the rows of all
# chunks; a chunk's, in forward, in backward, and there for rows that are sent again. Of Megatron's
# own layer those that the planner counts.
_ONCE, _OURS, _AGAIN = 53, (9, 8), 4
_STOCK = (10, 20)

MARGIN = 0.02  # a plan must be faster than the first by this
SMALLER = 0.1  # or smaller than all that are faster


class LayerRun(NamedTuple):
    """Seconds of one call of a layer.

    Attributes:
        weights: of W passes, where weight gradients wait for them; 0: they are part of backward.
    """

    forward: float
    backward: float
    weights: float

    @property
    def time(self) -> float:
        """Forward, backward and W, one after the other."""
        return sum(self)


Runs = Callable[[LayerPlan], LayerRun]  # ``job_run`` of a job


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


def pass_time(
    chunks: int,
    there: float,
    compute: float,
    back: float,
    saved: float = 0.0,
    loaded: float = 0.0,
) -> float:
    """One direction of a call.

    Args:
        there, compute, back: times of one chunk's message to the experts, of the experts, and of
            the message from them.
        saved: of one chunk's copy to the host: its memory is the next chunk's but one, which waits.
        loaded: of one chunk's copy from the host, which its experts wait for.
    """
    first = max(there, loaded)
    if chunks == 1:
        return first + compute + back
    steady = (chunks - 2) * max(there + back, compute, saved, loaded)
    return first + max(there, compute, loaded) + steady + max(back, compute) + back


@dataclass(frozen=True)
class _Chunk:
    """Prices of one of a job's chunks.

    Attributes:
        job: whose messages are the plan's: chunks have all-to-alls in place of an allgather.
        slower: the rate of these over that of the job's dispatcher.
    """

    job: Job
    rows: int
    slower: float
    linears: Sequence[Linear]
    price: Price

    def work(self, work: Work) -> float:
        """Forward seconds of kernels."""
        return self.price(Part((), work=work))[0]

    def message(self) -> float:
        """Of its rows, one way."""
        sent = _routing(self.job, self.rows).expert_bytes * self.slower
        return self.work(Work(expert_bytes=sent)) / 2

    def around(self, kernels: int, moves: float = 1.0) -> float:
        """Rows packed, sorted, taken apart and added up, by so many kernels."""
        moved = moves * _routing(self.job, self.rows).moved
        return self.work(Work(moved=moved, kernels=kernels))

    def products(self, count: int = 2, more: Work | None = None) -> Sequence[float]:
        """F, B and W of fc1 and fc2, or of fc1 alone, with ``more``."""
        linears = [one._replace(rows=self.rows) for one in self.linears[:count]]
        return self.price(Part(tuple(linears), work=more or Work()))


def job_run(job: Job, gpu: Gpu, price: Price, plan: LayerPlan) -> LayerRun:
    """One call of a MoE layer of the job by ``plan``; weight gradients wait for W passes, where
    the plan lets them.

    Args:
        job: with experts.
        gpu: of whose rates copies take theirs.
        price: of products, kernels and messages.
    """
    shape, n, strategy = shape_of(job), plan.chunks, plan.strategy
    linears = [one for one in experts(without_chunks(job)).linears if one.expert]
    rows = -(-routed_tokens(job) // n)
    sends, slower = job, 1.0
    if job.moe_token_dispatcher_type == "allgather" and not plan.stock:
        sends = job.with_(moe_token_dispatcher_type="alltoall")
        rate = exchange_rate(sends, gpu)
        slower = 1.0 if rate == inf else exchange_rate(job, gpu) / rate
    chunk = _Chunk(sends, rows, slower, linears, price)
    activation, launched = _activation(job, rows, shape.ffn), of_experts(job, linears[0].weights)
    f, b, w = chunk.products(more=activation.plus(launched))
    again = {
        Restore.RECOMPUTE: chunk.products(1, activation.plus(launched.half()))[0],
        Restore.ACTIVATE: chunk.work(activation),
    }
    resends, message = strategy.input is Restore.RESEND, chunk.message()
    there, back = _STOCK if plan.stock else _OURS
    once = 0.0 if plan.stock else chunk.work(Work(kernels=_ONCE))
    copied, late = copied_bytes(shape, rows, strategy), strategy.keeps_products
    compute = f + chunk.around(there)
    forward = once + pass_time(n, message, compute, message, saved=copied / gpu.to_host)
    compute = b + again.get(strategy.inside, 0.0) + (0.0 if late else w)
    compute += chunk.around(back + resends * _AGAIN, 1.5 if resends else 1.0)
    sent = message * (1 + resends)
    backward = pass_time(n, sent, compute, message, loaded=copied / gpu.to_device)
    return LayerRun(forward, backward, _weights(chunk, job, n) if late else 0.0)


def _weights(chunk: _Chunk, job: Job, chunks: int) -> float:
    """Weight gradients of all chunks at once, whose rows are joined before: read and written."""
    rows = routed_tokens(job)
    whole = chunk.price(Part(tuple(chunk.linears)))[2]
    joined = 2 * rows * job.element_bytes * sum(x.inputs + x.outputs for x in chunk.linears)
    return whole + (chunk.work(Work(moved=joined)) if chunks > 1 else 0.0)


def chunk_gain(job: Job, runs: Runs, price: Price, kinds: str) -> tuple[float, float, float]:
    """Seconds of F, B and W of a layer with these parts that the job's plan adds to Megatron's."""
    plan = fixed_plan(job)
    if plan is None or "E" not in kinds:
        return (0.0, 0.0, 0.0)
    f, b, w = (ours - stock for ours, stock in zip(runs(plan), runs(STOCK)))
    if job.recomputes("moe"):
        b += f
    if job.cheap_recompute or job.recomputes("moe_act"):  # otherwise than Megatron's layer
        work = _activation(job, routed_tokens(job), shape_of(job).ffn)
        b -= price(Part((), work=work))[0]
    count = kinds.count("E")
    return (count * f, count * b, count * w)


def variants(job: Job, runs_of: Runs) -> list[Job]:
    """The job with each plan of its MoE layers that is worth a search; Megatron's own first.

    Of all plans that ``--moe-pipeline-chunks`` and ``--moe-memory-reuse`` allow those that no
    other one beats in time and memory: each is much smaller than all that are faster.
    """
    if not has_experts(job) or job.moe_pipeline_chunks == "off" or fixed_plan(job) is not None:
        return [job]
    if without_chunks_because(job) or job.recipe == "delayed":
        return [job]
    shape, rows, in_flight = shape_of(job), routed_tokens(job), calls(job)
    first, *others = open_plans(job)
    own = runs_of(first).time

    def size(plan: LayerPlan) -> int:
        kept = saved_bytes(shape, rows, plan.strategy)
        return in_flight * kept + buffer_bytes(shape, rows, plan)

    found, least = [first], float("inf")
    for plan in sorted(others, key=lambda plan: (runs_of(plan).time, size(plan))):
        faster = runs_of(plan).time < (1 - MARGIN) * own
        if size(plan) < (1 - SMALLER) * min(least, float("inf") if faster else size(first)):
            found.append(plan)
            least = size(plan)
    return [with_plan(job, plan) for plan in found]


def layers_of_rank(job: Job) -> int:
    """MoE layers of the pipeline rank that has most, evenly divided."""
    layers = sum("E" in kinds for kinds in (*job.layers, *job.mtp_layers))
    return max(1, -(-layers // job.pipeline_model_parallel_size))


def calls(job: Job) -> int:
    """MoE layers of a rank times microbatches in flight, of 1F1B's first rank."""
    pp = job.pipeline_model_parallel_size
    in_flight = pp if job.global_batch_size is None else min(pp, job.microbatches())
    return layers_of_rank(job) * in_flight
