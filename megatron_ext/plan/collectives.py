"""Seconds of an iteration beside its passes: data- and context-parallel exchange, the optimizer.

A ring over n ranks moves (n - 1) / n of the bytes over every rank's link, once for a reduce-scatter
or an all-gather and twice for an all-reduce ("Reducing Activation Recomputation in Large
Transformer Models", arXiv 2205.05198, section 4.2.2; ZeRO, arXiv 1910.02054, section 7). Megatron
numbers ranks tensor, context, expert, data, pipeline from the innermost, so what lies in one node
follows from the sizes. Members of a ring that share a node share its adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .gpu import Gpu
from .memory import StageBytes
from .model import Job
from .parameters import Count, gathered_bytes, state_bytes
from .times import MESSAGE_S

ATTENTION = "*+"  # kinds of layers whose keys and values context-parallel ranks exchange

ASSUMPTIONS = (
    "data-parallel exchange: gradients and parameters once an iteration, over rings, at the rate "
    "of NVLink inside a node and of one network adapter a device between nodes; with "
    "--overlap-grad-reduce and --overlap-param-gather what one microbatch's passes do not hide",
    "context-parallel exchange: keys and values over a ring, hidden by attention itself as far as "
    "that takes as long; with --cp-comm-type all_gather or a2a before and after it, not hidden",
    "the optimizer's step: its states, read and written once at the memory's rate; with "
    "--optimizer-cpu-offload gradients of what is on the host go there and parameters come back, "
    "at the link's rate; what the host computes is not counted",
)


class Overhead(NamedTuple):
    """Seconds of one iteration beside its passes, on the rank where they are most.

    Attributes:
        data: gradients and parameters over data-parallel ranks, as far as nothing hides them.
        context: keys and values over context-parallel ranks, likewise.
    """

    data: float
    context: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them, one after the other."""
        return sum(self)


class Overlap(NamedTuple):
    """Megatron's ``--overlap-grad-reduce`` and ``--overlap-param-gather``."""

    gradients: bool = False
    parameters: bool = False


NO_OVERLAP = Overlap()


class Links:
    """Rates between the ranks of a job."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def ring(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of one reduce-scatter or all-gather of ``size`` bytes.

        Args:
            size: bytes of the whole.
            ranks: members.
            stride: distance of neighbours in the numbering of ranks.
        """
        if ranks < 2:
            return 0.0
        return (ranks - 1) * (size / ranks / self.gpu.ring(ranks, stride)) + 2 * MESSAGE_S

    def data(self, job: Job, count: Count) -> tuple[float, float]:
        """Seconds for the gradients, and for the parameters, of one rank's ``count``."""
        wide = (job.grads_in_fp32 or job.params_dtype == "fp32") and not job.grad_reduce_in_bf16
        gradient = 4 if wide else job.element_bytes
        sharded = job.use_distributed_optimizer or job.optimizer == "dist_muon"
        # Every instance has all states: shards are reduced once more over the instances.
        instances = job.num_distributed_optimizer_instances if sharded else 1
        ranks = job.data_parallel_size * job.context_parallel_size
        of_experts = job.expert_model_parallel_size * job.expert_tensor_parallel_size
        shared = (
            (Count(count.dense, other=count.other), ranks, job.tensor_model_parallel_size),
            (Count(expert=count.expert), job.expert_data_parallel_size, of_experts),
        )
        gradients = parameters = 0.0
        for part, ranks, stride in shared:
            if not part.total:
                continue
            own = max(1, ranks // instances)
            size = part.total * gradient
            gradients += self.ring(size, own, stride) * (1 if sharded else 2)
            gradients += 2 * self.ring(size / own, instances, stride * own)
            parameters += self.ring(gathered_bytes(job, part), own, stride) if sharded else 0.0
        return gradients, parameters

    def context(self, job: Job) -> tuple[float, float]:
        """Seconds of one attention layer's exchange that its F, and its B, do not hide."""
        cp, tp = job.context_parallel_size, job.tensor_model_parallel_size
        if cp < 2:
            return 0.0, 0.0
        keys = values = job.key_width
        queries = outputs = job.query_width
        if job.multi_latent_attention:
            queries = keys = job.num_attention_heads * (job.qk_head_dim + job.qk_pos_emb_head_dim)
            values = outputs = job.num_attention_heads * job.v_head_dim
        each = job.tokens / tp * job.element_bytes
        if job.cp_comm_type == "a2a":
            # Before attention and after it; in B their gradients, the other way.
            sent = self.ring(each * (queries + keys + values + outputs), cp, tp)
            return sent, sent
        sent = self.ring(each * cp * (keys + values), cp, tp)
        if job.cp_comm_type == "all_gather":
            return sent, 2 * sent
        # Causal attention, of which every rank has an equal part.
        flops = job.tokens * job.seq_length * 2 * queries / tp
        hidden = flops / (self.gpu.flops * self.gpu.efficiency)
        # Back, keys and values travel again and their gradients with them.
        return max(0.0, sent - hidden), max(0.0, 2 * sent - 2.5 * hidden)

    def optimizer(self, job: Job, count: Count) -> float:
        """Seconds of its step: what it keeps is read and written, and what is on the host (an fp32
        parameter and two moments each) gets its gradient from here and gives the parameter."""
        own = state_bytes(job, count).optimizer
        here = 2 * own / self.gpu.bandwidth
        if not job.optimizer_cpu_offload:
            return here
        away = state_bytes(job.with_(optimizer_offload_fraction=0.0), count).optimizer - own
        sent = away / 3
        return here + sent / self.gpu.to_host + sent / self.gpu.to_device


def overhead(
    job: Job,
    links: Links,
    rows: Sequence[Sequence[StageBytes]],
    passes: Sequence[tuple[float, float]],
    attention: Sequence[int],
    microbatches: int,
    overlap: Overlap,
) -> Overhead:
    """Of the rank that takes longest.

    Args:
        links: between its ranks.
        rows: the stages of every pipeline rank.
        passes: per rank, seconds of one microbatch's F, and of its B and W.
        attention: per rank, layers with attention.
        overlap: which exchange passes hide.
    """
    exposed = sum(links.context(job))
    found = []
    for row, (forward, backward), layers in zip(rows, passes, attention):
        count = sum((stage.parameters for stage in row), Count())
        gradients, parameters = links.data(job, count)
        if overlap.gradients:
            gradients = max(0.0, gradients - backward)
        if overlap.parameters:
            parameters = max(0.0, parameters - forward)
        context = exposed * layers * microbatches
        found.append(Overhead(gradients + parameters, context, links.optimizer(job, count)))
    return max(found, key=lambda one: one.total)
