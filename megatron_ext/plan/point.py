"""One simulated point of the search: request, workload, time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

from ..schedule import Schedule, ScheduleSpec, select, simulate
from ..schedule.costs import number_to_json
from ..schedule.memory_cap import ShareCap
from .collectives import Overhead
from .memory import RankBytes
from .model import Job
from .moe_job import flags as moe_flags
from .slices import FLAG as SLICES
from .slices import simulate_words
from .workload import Workload


@dataclass(frozen=True)
class Point:
    """A simulated point.

    Attributes:
        makespan_us: of one iteration's passes, in microseconds.
        bubble, peak_activation, peak_host_activation: as ``simulate`` says.
        ranks: every rank's bytes at its peak.
        note: how many sets are offloaded, how many stay and why; empty without offload.
    """

    spec: ScheduleSpec
    workload: Workload
    makespan_us: Fraction
    bubble: Fraction
    peak_activation: tuple[Fraction, ...]
    peak_host_activation: tuple[Fraction, ...]
    ranks: tuple[RankBytes, ...]
    note: str = ""

    @property
    def worst(self) -> RankBytes:
        """The rank with most bytes."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def host_bytes(self) -> int:
        """Of the rank that has most on the host."""
        return max(rank.host for rank in self.ranks)

    @cached_property
    def overhead(self) -> Overhead:
        """Of an iteration beside its passes."""
        return self.workload.overhead(self.spec.placement)

    @cached_property
    def iteration_us(self) -> Fraction:
        """Passes, then what is beside them, in microseconds."""
        return self.makespan_us + round(self.overhead.total * 1e6)

    @property
    def job(self) -> Job:
        """With its division, microbatch size and recompute."""
        return self.workload.job

    @property
    def is_pipeline(self) -> bool:
        """False without a pipeline, on Megatron alone."""
        return self.spec.pp > 1

    @property
    def name(self) -> str:
        """The schedule's."""
        return self.spec.name if self.is_pipeline else NO_PIPELINE

    def key(self) -> Key:
        """What the front compares."""
        return self.iteration_us, self.worst.total, self.host_bytes

    @property
    def offload(self) -> str | None:
        """What is offloaded, as ``--offload``."""
        return None if self.spec.offload is None else str(self.spec.offload.wanted)

    @property
    def cap(self) -> Fraction | None:
        """The cap that the order was made for, as a fraction of 1F1B's peak."""
        return self.spec.cap.share if isinstance(self.spec.cap, ShareCap) else None

    def schedule(self) -> Schedule:
        """The schedule itself, with its offload, made again."""
        return select(self.spec).schedule

    def simulate_arguments(self, stage_file: str) -> list[str]:
        """Of ``megatron-ext simulate``, which gives the same numbers.

        Args:
            stage_file: where ``stage_cost`` was written to.
        """
        spec = self.spec
        if not self.is_pipeline:
            return []
        words = ["--schedule", spec.name, "--pp", str(spec.pp)]
        words += ["--microbatches", str(spec.microbatches), "--chunks", str(spec.chunks)]
        words += ["--stage-cost", stage_file, "--hop", str(number_to_json(spec.costs.hop))]
        for option, value in self._options():
            words += [f"--{option}", value]
        if spec.offload is not None:
            words += ["--offload-time", spec.offload.link.text]
        if spec.overlap:
            words.append("--overlap")
        words += simulate_words(spec, self.job)
        if spec.costs.vocabulary is not None:
            times = (str(number_to_json(x)) for x in spec.costs.vocabulary)
            words += ["--vocabulary", ",".join(times)]
        return words

    def flags(self, file: str | None = None, *, ours: bool = True) -> list[str]:
        """Of training: ours, and Megatron's own that the point needs.

        Args:
            file: a schedule file that holds this point's order; None: by name.
            ours: training takes ``--pp-schedule``; else the point is stock's own.
        """
        job, spec, split = self.workload.job, self.spec, self.workload.split
        words = [*_division_flags(job), f"--pipeline-model-parallel-size {spec.pp}"]
        words += [f"--micro-batch-size {job.micro_batch_size}"]
        if not self.is_pipeline:
            return words
        if not split.even:
            flag, value = split.flag(job)
            words += [f"{flag} '{value}'"]
        elif spec.placement.chunks > 1 and not spec.placement.is_vee():
            words += [f"--num-virtual-stages-per-pipeline-rank {spec.chunks}"]
        if job.cheap_recompute:
            words += ["--pp-cheap-recompute"]
        if job.vocab_parallel:
            words += ["--pp-vocab-parallel"]
        if job.overlap_moe_expert_parallel_comm:
            words += ["--overlap-moe-expert-parallel-comm"]
        words += moe_flags(job)
        if not ours:
            return words
        if file is not None:
            return [*words, f"--pp-schedule {file}"]
        words += [f"--pp-schedule {spec.name}"]
        words += [flag for flag in (self.workload.cost_flag,) if flag]
        words += [f"{SLICES} {spec.slices[0]}"] if spec.slices else []
        return words + [
            f"--pp-{option} {value}"
            for option, value in self._options()
            if option != "offload-time"  # which training measures
        ]

    def _options(self) -> list[tuple[str, str]]:
        """Options that the command line and training (after ``--pp-``) share, with values."""
        words = []
        if self.cap is not None:
            words.append(("memory-cap", str(self.cap)))
        if self.spec.offload is not None:
            words.append(("offload", str(self.spec.offload.wanted)))
        return words

    def stage_cost(self) -> dict[str, Any]:
        """The content of the file for ``--stage-cost``."""
        costs = self.workload.costs
        found = {"stages": costs.stages or (), "exchange": costs.exchange}
        return {
            name: [[number_to_json(x) for x in row] for row in rows]
            for name, rows in found.items()
            if rows is not None
        }


def _division_flags(job: Job) -> list[str]:
    """Megatron's flags of the other parallel sizes, and of full recompute."""
    tp, cp = job.tensor_model_parallel_size, job.context_parallel_size
    words = [f"--tensor-model-parallel-size {tp}"]
    words += ["--sequence-parallel"] if job.sequence_parallel else []
    words += [f"--context-parallel-size {cp}"] if cp > 1 else []
    if job.num_experts:
        words += [f"--expert-model-parallel-size {job.expert_model_parallel_size}"]
        words += [f"--expert-tensor-parallel-size {job.expert_tensor_parallel_size}"]
    words += ["--use-distributed-optimizer"] if job.use_distributed_optimizer else []
    if job.recompute_granularity == "full":
        words += [
            f"--recompute-granularity full --recompute-method {job.recompute_method} "
            f"--recompute-num-layers {job.recompute_num_layers}"
        ]
    return words


NO_PIPELINE = "no-pipeline"


def evaluate(spec: ScheduleSpec, workload: Workload) -> Point:
    """Generate, offload and simulate, and count every rank's bytes.

    Raises:
        ValueError: the schedule does not exist for these numbers, or nothing keeps its cap.
    """
    found = select(spec)
    run = simulate(found.schedule)
    return Point(
        found.spec,
        workload,
        run.makespan,
        run.bubble,
        tuple(run.peak_activation),
        tuple(run.peak_host_activation),
        tuple(workload.ranks(found.schedule)),
        "" if found.plan is None else found.plan.note,
    )


Key = tuple[Fraction, int, int]  # time, bytes on the device, bytes on the host
T = TypeVar("T")


def front(points: Iterable[T], key: Callable[[T], Key]) -> list[T]:
    """Those that no other one beats or equals in all three numbers of ``key``; fastest first."""
    best: list[T] = []
    kept: list[Key] = []
    for point in sorted(points, key=key):
        time, device, host = key(point)
        if not any(t <= time and d <= device and h <= host for t, d, h in kept):
            best.append(point)
            kept.append(key(point))
    return best
