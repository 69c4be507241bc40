"""Times of a stage's F, B and W on a device, from operations, bytes and rates.

Every matrix product takes what its tiles or its bytes take, whichever is more; everything between
them what its bytes take; a kernel some microseconds more. So small microbatches and narrow shards
pay for idle multiprocessors, W is as long as its products alone, and F and B have the rest.
``published.json`` has the measured passes that the devices' numbers are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import NamedTuple

from ..schedule.costs import Costs, merged
from .gpu import Gpu
from .kinds import embedding, last_norm, layer, loss, prediction_layer
from .launches import HOST_S
from .layout import Split
from .memory import message_bytes
from .model import Job
from .moe_job import without_chunks
from .moe_times import Price, Runs, chunk_gain, exchange_rate, job_run, variants
from .parts import Linear, Part, Work

KERNEL_S = 4e-6  # between one kernel's end and the next one's work
MESSAGE_S = 15e-6  # of a point-to-point message, before its first byte arrives
_SPEED_OF_QUANTIZED = 2  # products in FP8 beside 16 bits
_TILE = 128 * 128  # outputs of a matrix product that one multiprocessor computes at a time

ASSUMPTIONS = (
    "times: matrix products in tiles over the multiprocessors, half of the last round idle, or "
    "what their bytes take; flash attention causal, its backward pass 2.5 times the forward one",
    f"{KERNEL_S * 1e6:g} microseconds a kernel, {MESSAGE_S * 1e6:g} a message, messages at the "
    "network's rate and beside the passes",
    "tensor-parallel communication is not hidden; context-parallel communication over a ring is",
    f"FP8 products run at {_SPEED_OF_QUANTIZED} times the 16-bit rate",
    "not in an iteration's time: loading data, evaluation, checkpoints",
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
        peak = gpu.flops / 2 if job.params_dtype == "fp32" else gpu.flops
        self.rate, self.attention = peak * gpu.efficiency, peak * gpu.attention
        self.bandwidth = gpu.bandwidth * gpu.stream
        self.expert_link = exchange_rate(job, gpu)
        self.tensor_link = gpu.ring(job.tensor_model_parallel_size) * gpu.collective

    def multiply(self, outputs: int, inner: float, rate: float) -> float:
        """Seconds of products with ``outputs`` numbers, each the sum of ``inner`` ones.

        Multiprocessors compute tiles in rounds, and half of the last round is idle on average; a
        tile takes ``ramp`` sums longer. So products that tensor parallelism makes narrow are slow.
        """
        round_ = self.gpu.units * _TILE
        return 2 * max(round_, outputs + round_ / 2) * (inner + self.gpu.ramp) / rate

    def product(self, layer: Linear) -> PassTimes:
        """A linear layer: F, and B and W."""
        m, n, k = layer.rows, layer.outputs, layer.inputs
        if not m:
            return PassTimes()
        e, weights = self.job.element_bytes, n * k * layer.weights
        rate = self.rate
        if layer.quantized and self.job.quantization is not None:
            rate *= _SPEED_OF_QUANTIZED
        moved = e * (m * n + m * k + weights)
        gradient = 4 if self.job.grads_in_fp32 else e
        bytes_s = moved / self.bandwidth
        forward = max(self.multiply(m * n, k, rate), bytes_s) + KERNEL_S
        backward = max(self.multiply(m * k, n, rate), bytes_s) + KERNEL_S
        # W's sums are over one weight's rows. It adds to a gradient, which it reads and writes.
        sums = self.multiply(weights, m / layer.weights, rate)
        added = 2 * gradient * weights
        if self.job.no_gradient_accumulation_fusion:
            # The product is written first; then a kernel for each weight reads it and adds it.
            adding = (added + e * weights) / self.bandwidth + layer.weights * KERNEL_S
            weight = max(sums, bytes_s) + KERNEL_S + adding
        else:
            weight = max(sums, (moved + added - e * weights) / self.bandwidth) + KERNEL_S
        if not layer.splits:
            return PassTimes(forward, backward + weight)
        return PassTimes(forward, backward, weight)

    def work(self, work: Work) -> PassTimes:
        """Kernels between the products, from the bytes that they read and write."""
        gpu = self.gpu
        sent = work.tensor_bytes / self.tensor_link + work.collectives * gpu.collective_s
        sent += self.exchange(work)
        kernels = work.kernels * KERNEL_S
        ahead, back = work.launches * HOST_S, work.launches_back * HOST_S
        forward = work.flops / self.attention + work.moved / self.bandwidth + kernels
        backward = work.flops_back / self.attention + work.moved_back / self.bandwidth + 2 * kernels
        return PassTimes(forward + sent + ahead, backward + sent + back)

    def exchange(self, work: Work) -> float:
        """Seconds of all-to-alls between experts, in F and in B each."""
        if not work.expert_bytes:
            return 0.0
        return work.expert_bytes / self.expert_link + 2 * MESSAGE_S

    def part(self, part: Part) -> PassTimes:
        """One part; what it recomputes is part of B."""
        total = self.work(part.work)
        for linear in part.linears:
            total = total.plus(self.product(linear))
        again = total if part.repeated else self.work(part.again)
        return total.plus((0.0, again.forward, 0.0))

    def parts(self, parts: Iterable[Part], kinds: str = "") -> PassTimes:
        """Several, one after the other; ``kinds``: what MoE layers in chunks gain among these."""
        runs = _runs(self.job, self.gpu)
        total = PassTimes(*chunk_gain(self.job, runs, self.part, kinds))
        for part in parts:
            total = total.plus(self.part(part))
        return total


def price_of(job: Job, gpu: Gpu) -> Price:
    """Gives a part's F, B and W in seconds."""
    return _Model(job, gpu).part


def moe_variants(job: Job, gpu: Gpu) -> list[Job]:
    """The job with each plan of its MoE layers that is worth a search."""
    return variants(job, _runs(job, gpu))


def _runs(job: Job, gpu: Gpu) -> Runs:
    """Of each plan of the job's MoE layers one call."""
    return _all_runs(without_chunks(job.of_layers), gpu)


@lru_cache(maxsize=256)
def _all_runs(job: Job, gpu: Gpu) -> Runs:
    return cache(partial(job_run, job, gpu, price_of(job, gpu)))


@lru_cache(maxsize=256)
def _model(job: Job, gpu: Gpu) -> _Model:
    return _Model(job, gpu)


@lru_cache(maxsize=256)
def _layers(job: Job, gpu: Gpu) -> dict[str, PassTimes]:
    """Of one layer of every kind: computed once, for all splits of a search."""
    model, stock = _model(job, gpu), without_chunks(job)
    return {kinds: model.parts(layer(stock, kinds), kinds) for kinds in set(job.layers)}


def forget() -> None:
    """Drop what was computed once, after a rate has changed."""
    _all_runs.cache_clear()
    _model.cache_clear()
    _layers.cache_clear()


def stage_times(job: Job, split: Split, gpu: Gpu) -> list[PassTimes]:
    """F, B and W of every stage for one microbatch, in seconds."""
    model, each = _model(job, gpu), _layers(job.of_layers, gpu)
    full, out = job.recompute_granularity == "full", []
    for stage in split.stages:
        total = PassTimes()
        for place, number in enumerate(stage.layers):
            time = each[job.layers[number]]
            total = total.plus(time)
            if full and (job.recompute_method != "block" or place < job.recompute_num_layers):
                total = total.plus((0.0, time.forward, 0.0))
        if stage.first and not job.vocab_parallel:
            total = total.plus(model.part(embedding(job)))
        if stage.predicts:
            for kinds in job.mtp_layers:
                if not job.vocab_parallel:
                    total = total.plus(model.part(embedding(job)))
                time = model.parts(prediction_layer(without_chunks(job), kinds), kinds)
                total = total.plus(time).plus((0.0, time.forward if full else 0.0, 0.0))
        if stage.last:
            losses = [] if job.vocab_parallel else [loss(job)] * job.heads
            total = total.plus(model.parts([last_norm(job), *losses]))
        out.append(total)
    return out


def exchange_times(job: Job, split: Split, gpu: Gpu) -> list[float]:
    """All-to-alls between experts in F, and as much in B, of every stage for one microbatch, in
    seconds; they are part of ``stage_times``."""
    model, stock = _Model(job, gpu), without_chunks(job)
    each = {
        kinds: sum(model.exchange(part.work) for part in layer(stock, kinds))
        for kinds in set(job.layers)
    }
    return [sum(each[job.layers[number]] for number in stage.layers) for stage in split.stages]


def exchange_shares(job: Job, split: Split, gpu: Gpu) -> list[Fraction]:
    """The all-to-alls' share of every stage's F, in 64ths, as training takes it for its orders."""
    sent, every = exchange_times(job, split, gpu), stage_times(job, split, gpu)
    return [Fraction(round(_PARTS * n / one.forward), _PARTS) for n, one in zip(sent, every)]


def with_exchange(costs: Costs, shares: Sequence[Fraction], pp: int) -> Costs:
    """``costs`` with all-to-alls in F and as much in B, by their share of every stage's F."""
    chunks = len(shares) // pp
    one = costs.forward / chunks, costs.backward_input / chunks
    rows = [one] * len(shares) if costs.stages is None else [row[:2] for row in costs.stages]
    return costs.with_exchange([(f * x, min(f * x, b)) for (f, b), x in zip(rows, shares)])


def vocabulary_times(job: Job, gpu: Gpu) -> tuple[float, float, float, float, float] | None:
    """Seconds of a rank's S, T, E and G for one microbatch, and from the end of the last rank's
    pass to when a collective has ended; None if the vocabulary is not sharded over the pipeline.

    Multi-token prediction has all of this once more for each depth.
    """
    if not job.vocab_parallel:
        return None
    job = job.with_(cross_entropy_loss_fusion=False)  # the shards have a loss of their own
    model = _Model(job, gpu)
    output, words = loss(job), model.part(embedding(job))
    (linear,) = output.linears
    product, between = model.product(linear._replace(splits=True)), model.work(output.work)
    s = product.forward + product.backward_input + between.forward
    t = product.backward_weight + between.backward_input
    # A broadcast or a reduction brings every rank's bytes over its link once.
    n = job.heads
    latency = gpu.collective_s + MESSAGE_S + n * message_bytes(job) / gpu.network
    g = words.backward_input + words.backward_weight
    return n * s, n * t, n * words.forward, n * g, latency


def hop_time(job: Job, gpu: Gpu) -> float:
    """Seconds from a pass's end to when its output is on the next rank."""
    return MESSAGE_S + message_bytes(job) / gpu.network


def costs_in_us(
    stages: Sequence[Sequence[float]], hop: float, vocabulary: Sequence[float] | None = None
) -> Costs:
    """As costs for the generators and the simulator: whole microseconds, at least one a pass.

    The rank's own F, B and W, which training's ``--pp-cost`` takes, are the means over all ranks
    where the stages differ (``mean_costs``); without it training makes this very estimate.
    """
    rows = [[max(1, round(x * 1e6)) for x in row] for row in stages]
    times = None if vocabulary is None else [max(1, round(x * 1e6)) for x in vocabulary]
    return Costs.of(1, 1, 1, round(hop * 1e6), rows, times)


def costs_in_parts(
    stages: Sequence[Sequence[float]], hop: float, vocabulary: Sequence[float] | None = None
) -> Costs:
    """Measured seconds as costs, in 64ths of the mean pass: finer is noise, and plans need small
    numbers. A pass takes one of them at least."""
    mean = sum(map(sum, stages)) / (3 * len(stages)) or 1.0
    rows = [[max(1, round(_PARTS * x / mean)) for x in row] for row in stages]
    times = None
    if vocabulary is not None:
        *passes, latency = (_PARTS * x / mean for x in vocabulary)
        times = [*(max(1, round(x)) for x in passes), round(latency)]
    return Costs.of(hop=Fraction(round(_PARTS * hop / mean)), stages=rows, vocabulary=times)


_PARTS = 64


def mean_costs(costs: Costs, pp: int) -> Costs:
    """One F, B and W for all ranks: the mean work of a rank, in whole units."""
    whole = merged(costs, 1)
    assert whole is not None and whole.stages is not None
    f, b, w = (max(1, round(total / pp)) for total in whole.stages[0])
    return Costs.of(f, b, w, costs.hop, vocabulary=costs.vocabulary)
