"""Times of a stage's F, B and W on a device, from operations, bytes and rates.

Every matrix product takes what its FLOPs or its bytes take, whichever is more (the roofline);
everything between them what its bytes take; a kernel some microseconds more. So small microbatches
pay for reading weights and adding to gradients, and W pays for the fp32 gradients that it adds to.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from ..schedule.costs import Costs
from .activations import routed_tokens
from .gpu import Gpu
from .layout import Split
from .memory import message_bytes
from .model import Job

KERNEL_S = 4e-6  # between one kernel's end and the next one's work
MESSAGE_S = 15e-6  # of a point-to-point message, before its first byte arrives

ASSUMPTIONS = (
    "times: the roofline of each matrix product at the device's efficiency; flash attention at "
    "the same efficiency, causal, its backward pass 2.5 times the forward one",
    f"{KERNEL_S * 1e6:g} microseconds a kernel, {MESSAGE_S * 1e6:g} a message, messages at the "
    "network's rate and beside the passes",
    "tensor-parallel communication is not hidden; context-parallel communication is",
    "not in a step's time: the optimizer, data-parallel communication and loading data",
)


class PassTimes(NamedTuple):
    """Seconds of one microbatch's F, B and W."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def plus(self, other: Sequence[float]) -> PassTimes:
        """Both, one after the other."""
        return PassTimes(*(a + b for a, b in zip(self, other)))


class _Model:
    """The rates, and what is made of them."""

    def __init__(self, job: Job, gpu: Gpu) -> None:
        self.job, self.gpu = job, gpu
        # 32-bit products run on other units, at about half the 16-bit rate (TF32).
        rate = gpu.flops * gpu.efficiency
        self.rate = rate / 2 if job.params_dtype == "fp32" else rate

    def product(self, m: int, n: int, k: int, groups: int = 1) -> PassTimes:
        """A linear layer from k to n features of m rows, divided over ``groups`` weights."""
        if not m:
            return PassTimes()
        e = self.job.element_bytes
        weights = n * k * groups
        moved = e * (m * n + m * k + weights)
        gradient = 4 if self.job.grads_in_fp32 else e
        compute = 2 * m * n * k / self.rate
        once = max(compute, moved / self.gpu.bandwidth)
        # W reads and writes the gradient that it adds to.
        weight = max(compute, (moved + (2 * gradient - e) * weights) / self.gpu.bandwidth)
        return PassTimes(once + KERNEL_S, once + KERNEL_S, weight + KERNEL_S)

    def bytes_moved(self, forward: float, backward: float, kernels: int) -> PassTimes:
        """What lies between the products, from the bytes that it reads and writes."""
        wait = kernels * KERNEL_S
        return PassTimes(
            forward / self.gpu.bandwidth + wait, backward / self.gpu.bandwidth + 2 * wait
        )

    def norm(self) -> PassTimes:
        """A norm and the residual sum before it."""
        size = self.job.element_bytes * self.job.sharded_tokens * self.job.hidden_size
        return self.bytes_moved(5 * size, 7 * size, 2)

    def attention_core(self) -> PassTimes:
        """Between queries, keys, values and the output."""
        job = self.job
        tp = job.tensor_model_parallel_size
        # Two products of s x s scores, the half of them that causal attention needs.
        flops = 2 * job.tokens * job.seq_length * job.query_width / tp
        forward = flops / self.rate
        if job.flash_attention:
            return PassTimes(forward + KERNEL_S, 2.5 * forward + 2 * KERNEL_S)
        # All scores, and softmax reads and writes them in between.
        scores = job.tokens * job.seq_length * job.num_attention_heads / tp
        size = scores * (job.element_bytes + 4)
        return PassTimes(2 * forward, 4 * forward).plus(self.bytes_moved(3 * size, 4 * size, 5))

    def exchange(self) -> PassTimes:
        """Tensor-parallel communication of attention or an MLP: all-gather and reduce-scatter."""
        tp = self.job.tensor_model_parallel_size
        if tp == 1:
            return PassTimes()
        size = self.job.element_bytes * self.job.tokens * self.job.hidden_size
        once = 2 * size * (tp - 1) / tp / self.gpu.peer + 2 * KERNEL_S
        return PassTimes(once, once)

    def attention(self) -> PassTimes:
        """Self-attention without its norm."""
        job = self.job
        tp, h = job.tensor_model_parallel_size, job.hidden_size
        qkv = (job.query_width + 2 * job.key_width) // tp
        rope = job.element_bytes * job.tokens * qkv * 2
        total = self.product(job.tokens, qkv, h).plus(self.bytes_moved(rope, rope, 2))
        total = total.plus(self.attention_core())
        total = total.plus(self.product(job.tokens, h, job.query_width // tp))
        return total.plus(self.exchange())

    def activation(self, rows: int, width: int) -> PassTimes:
        """The activation function between fc1 and fc2."""
        size = self.job.element_bytes * rows * width
        gates = self.job.gates
        return self.bytes_moved(size * (gates + 1), size * (2 * gates + 1), 1)

    def mlp(self, rows: int, width: int, groups: int = 1) -> PassTimes:
        """An MLP, or several whose rows are ``rows`` together."""
        h = self.job.hidden_size
        total = self.product(rows, self.job.gates * width, h, groups)
        total = total.plus(self.activation(rows, width))
        return total.plus(self.product(rows, h, width, groups))

    def experts(self) -> PassTimes:
        """Router, dispatch, experts and combine; the shared expert too."""
        job = self.job
        e, h, routed = job.element_bytes, job.hidden_size, routed_tokens(job)
        total = self.product(job.sharded_tokens, job.num_experts, h)._replace(backward_weight=0.0)
        sorted_twice = 4 * e * routed * h
        total = total.plus(self.bytes_moved(sorted_twice, sorted_twice, 10))
        ep = job.expert_model_parallel_size
        if ep > 1:
            near = ep * job.expert_tensor_parallel_size <= 8
            rate = self.gpu.peer if near else self.gpu.network
            once = 2 * e * routed * h * (ep - 1) / ep / rate + 2 * MESSAGE_S
            total = total.plus((once, once, 0.0))
        own = job.num_experts // ep
        width = job.moe_ffn_hidden_size // job.expert_tensor_parallel_size
        total = total.plus(self.mlp(routed, width, own))
        if not job.moe_grouped_gemm:
            wait = 3 * (own - 1) * KERNEL_S
            total = total.plus((wait, wait, wait))
        if job.moe_shared_expert_intermediate_size:
            shared = job.moe_shared_expert_intermediate_size // job.tensor_model_parallel_size
            total = total.plus(self.mlp(job.tokens, shared))
        return total

    def layer(self, moe: bool) -> PassTimes:
        """One transformer layer; what it recomputes is part of B."""
        job = self.job
        norm, attention = self.norm(), self.attention()
        width = job.ffn_hidden_size // job.tensor_model_parallel_size
        mlp = self.experts() if moe else self.mlp(job.tokens, width).plus(self.exchange())
        total = norm.plus(norm).plus(attention).plus(mlp)
        recompute, modules = 0.0, job.recompute_modules
        if "core_attn" in modules:
            recompute += self.attention_core().forward
        if ("moe" in modules and moe) or ("mlp" in modules and not moe):
            recompute += mlp.forward
        elif job.cheap_recompute or ("moe_act" in modules and moe):
            rows = routed_tokens(job) if moe else job.tokens
            own = job.moe_ffn_hidden_size // job.expert_tensor_parallel_size if moe else width
            recompute += self.activation(rows, own).forward
        if (job.cheap_recompute or "layernorm" in modules) and not job.transformer_engine:
            recompute += 2 * norm.forward
        elif moe and (job.cheap_recompute or "layernorm" in modules):
            recompute += norm.forward
        return total.plus((0.0, recompute, 0.0))

    def embedding(self) -> PassTimes:
        """Look-up, and adding to its gradient, which is part of B."""
        size = self.job.element_bytes * self.job.tokens * self.job.hidden_size
        return self.bytes_moved(2 * size, 4 * size, 3)

    def output(self) -> PassTimes:
        """Last norm, output layer and loss."""
        job = self.job
        words = job.padded_vocab_size // job.tensor_model_parallel_size
        rows, e = job.tokens, job.element_bytes
        # The loss reads and writes fp32 logits a few times.
        loss = self.bytes_moved(rows * words * (e + 5 * 4), rows * words * (3 * 4 + e), 10)
        return self.product(rows, words, job.hidden_size).plus(loss).plus(self.norm())


def stage_times(job: Job, split: Split, gpu: Gpu) -> list[PassTimes]:
    """F, B and W of every stage for one microbatch, in seconds."""
    model, last = _Model(job, gpu), len(split.counts) - 1
    kinds = {moe: model.layer(moe) for moe in set(job.moe_layers)}
    full, out = job.recompute_granularity == "full", []
    for stage, (begin, count) in enumerate(zip(split.first_layers, split.counts)):
        total = PassTimes()
        for place, moe in enumerate(job.moe_layers[begin : begin + count]):
            total = total.plus(kinds[moe])
            if full and (job.recompute_method != "block" or place < job.recompute_num_layers):
                total = total.plus((0.0, kinds[moe].forward, 0.0))
        if stage == 0:
            total = total.plus(model.embedding())
        if stage == last:
            total = total.plus(model.output())
        out.append(total)
    return out


def hop_time(job: Job, gpu: Gpu) -> float:
    """Seconds from a pass's end to when its output is on the next rank."""
    return MESSAGE_S + message_bytes(job) / gpu.network


def costs_in_us(stages: Sequence[Sequence[float]], hop: float) -> Costs:
    """As costs for the generators and the simulator: whole microseconds, at least one a pass.

    The rank's own F, B and W, which training's ``--pp-cost`` takes, are the means over all ranks
    where the stages differ; see ``mean_costs``.
    """
    rows = [[max(1, round(x * 1e6)) for x in row] for row in stages]
    return Costs.of(1, 1, 1, round(hop * 1e6), rows)


def costs_in_parts(stages: Sequence[Sequence[float]], hop: float) -> Costs:
    """Measured seconds as costs, in 64ths of the mean pass: finer is noise, and plans need small
    numbers. A pass takes one of them at least."""
    mean = sum(map(sum, stages)) / (3 * len(stages)) or 1.0
    rows = [[max(1, round(_PARTS * x / mean)) for x in row] for row in stages]
    return Costs.of(hop=Fraction(round(_PARTS * hop / mean)), stages=rows)


_PARTS = 64


def mean_costs(costs: Costs, pp: int) -> Costs:
    """One F, B and W for all ranks: the mean work of a rank, in whole units."""
    assert costs.stages is not None
    sums = [sum((row[i] for row in costs.stages), Fraction(0)) for i in range(3)]
    f, b, w = (max(1, round(total / pp)) for total in sums)
    return Costs.of(f, b, w, costs.hop)
