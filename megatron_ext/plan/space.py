"""The search space: schedules to try, and the job's workloads with their times and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..schedule import (
    GENERATORS,
    NAMES,
    Link,
    Placement,
    Schedule,
    ScheduleSpec,
)
from .balance import balanced
from .collectives import NO_OVERLAP, Overlap
from .gpu import Gpu
from .layout import Split, split_of
from .memory import stage_bytes
from .model import Job, PlanError
from .times import (
    costs_in_us,
    exchange_shares,
    hop_time,
    moe_variants,
    stage_times,
    vocabulary_times,
    with_exchange,
)
from .vocabulary import settings, shard_states
from .workload import Workload, cost_flag


@dataclass(frozen=True)
class SearchSpace:
    """What the search may choose from.

    Attributes:
        job: the job; its microbatch size and cheap recompute are replaced.
        chunks: of the schedules that take any number.
        micro_batch_sizes: in samples.
        cheap_recompute: which of False and True.
        offload: as ``--offload``, in the order in which they are tried; empty for none. ``auto``
            after others is for links that are too slow for those.
        balance: layouts other than Megatron's even one may be proposed.
        always_offload: every point has an offload of ``offload``; False: where it is of use.
        vocabulary: try the vocabulary in one piece and sharded, as far as the job allows.
        full_recompute: try full recompute too, where the job has none of its own.
        overlap: which data-parallel exchange passes hide.
        slices: numbers of slices that every sequence may be cut into, where that is worth it.
        stock: Megatron's own schedules, as it runs them, and no flag of ours.
    """

    job: Job
    gpu: Gpu
    pp: int
    schedules: tuple[str, ...] = NAMES
    chunks: tuple[int, ...] = (2, 4)
    micro_batch_sizes: tuple[int, ...] = (1,)
    cheap_recompute: tuple[bool, ...] = (False, True)
    offload: tuple[str, ...] = ("half", "full", "auto")
    balance: bool = True
    always_offload: bool = False
    vocabulary: bool = False
    full_recompute: bool = False
    overlap: Overlap = NO_OVERLAP
    slices: tuple[int, ...] = ()
    stock: bool = False

    def specs(self) -> list[ScheduleSpec]:
        """Every schedule, for one microbatch, but those at any cap, which depends on what fits."""
        out = []
        for name in self.schedules:
            generator = GENERATORS[name]
            if generator.takes_memory_cap:
                continue
            counts: Sequence[int] = [generator.default_chunks]
            if generator.any_chunks:
                counts = [v for v in self.chunks if v >= generator.default_chunks]
            out += [ScheduleSpec(name, self.pp, 1, v) for v in counts]
        return out

    def jobs(self) -> list[tuple[Job, int]]:
        """The job with every microbatch size, recompute and plan of its MoE layers, and its
        number of microbatches.

        Raises:
            PlanError: none is possible.
        """
        out = []
        failed: PlanError | None = None
        for size in self.micro_batch_sizes:
            for job in self._recomputes(size):
                try:
                    microbatches = job.microbatches()
                except PlanError as error:
                    failed = error
                    continue
                each = moe_variants(job, self.gpu)
                both = settings(job, choose=self.vocabulary and self.pp > 1)
                out += [(o.with_(vocab_parallel=v), microbatches) for v in both for o in each]
        if failed is not None and not out:
            raise failed
        return out

    def _recomputes(self, size: int) -> list[Job]:
        """The job with this microbatch size and every kind of recompute."""
        out = [
            self.job.with_(micro_batch_size=size, cheap_recompute=cheap)
            for cheap in self.cheap_recompute
        ]
        if self.full_recompute and self.job.recompute_granularity is None:
            pairs = self.job.overlap_moe_expert_parallel_comm
            full = self.job.with_(
                micro_batch_size=size,
                cheap_recompute=False,
                recompute_granularity="full",
                recompute_method="uniform",
                recompute_modules=(),
            )
            out += [] if pairs else [full]
        return out

    def workload(self, job: Job, microbatches: int, split: Split) -> Workload:
        """Costs and bytes of one split."""
        times, hop = stage_times(job, split, self.gpu), hop_time(job, self.gpu)
        costs = costs_in_us(times, hop, vocabulary_times(job, self.gpu))
        by_name = cost_flag(costs, self.gpu, self.pp)
        if job.overlap_moe_expert_parallel_comm:
            shares = exchange_shares(job, split, self.gpu)
            costs = with_exchange(costs, shares, self.pp)
        return Workload(
            *(job, microbatches, split, costs, tuple(stage_bytes(job, split)), by_name),
            *(self.gpu, self.overlap),
        )

    def splits(self, job: Job, order: Schedule, peaks: Sequence[int]) -> list[Split]:
        """Megatron's own, and balanced ones that differ, for an order with these peaks, in sets."""
        placement = order.placement
        found = [self.even(job, placement)]
        # With a sharded vocabulary equal stages are balanced in time, but not in bytes.
        if found[0] is None or not job.vocab_parallel:
            found.append(self.balanced_in_time(job, placement))
        found.append(self.balanced_in_bytes(job, order, peaks))
        splits: dict[tuple[int, ...], Split] = {}
        for split in found:
            if split is not None:
                splits.setdefault(split.counts, split)
        return list(splits.values())

    def even(self, job: Job, placement: Placement) -> Split | None:
        """The split of Megatron's flags, or its own even one; None if there is none."""
        return split_of(job, placement.num_stages, placement.looped)

    def balanced_in_time(self, job: Job, placement: Placement) -> Split | None:
        """The split that evens out the ranks' work; None if it has to stay or cannot be."""
        if not self.balance or job.stages_are_given or placement.num_stages < 3:
            return None
        first, middle, last = map(sum, stage_times(job, _ends(job), self.gpu))
        each = [middle / job.num_layers] * placement.pp
        return balanced(placement, job.num_layers, each, first, last)

    def balanced_in_bytes(self, job: Job, order: Schedule, peaks: Sequence[int]) -> Split | None:
        """The split that evens out the ranks' bytes under an order with these peaks, in sets."""
        placement = order.placement
        if not self.balance or job.stages_are_given or placement.num_stages < 3:
            return None
        first, middle, last = stage_bytes(job, _ends(job))
        layers, v = job.num_layers, placement.chunks
        # Every rank has a shard of the vocabulary, if it is sharded: it counts for none.
        shard = shard_states(job)
        states = middle.states.total - shard
        each = [(states + middle.sets.bytes_f_to_b * peak / v) / layers for peak in peaks]
        loss = last.states.total - shard + last.sets.bytes_f_to_b + last.sets.logits
        return balanced(placement, layers, each, first.states.total - shard, loss)

    def link(self, workload: Workload, placement: Placement) -> Link:
        """Transfer times of every stage's sets beside its passes."""
        durations = workload.costs.durations(placement)
        rows = zip(durations.forward, durations.backward_input, durations.backward_weight)
        seconds = [float(Fraction(sum(row), durations.scale)) / 1e6 for row in rows]
        sizes = [stage.sets.bytes_f_to_b for stage in workload.stages]
        return Link.measured(placement, sizes, seconds, (self.gpu.to_host, self.gpu.to_device))


def _ends(job: Job) -> Split:
    """Embedding, all layers, output layer and loss, apart."""
    return Split((0, job.num_layers, 0))
