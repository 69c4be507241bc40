"""One simulated point of the search: request, workload, time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

from ..schedule.costs import number_to_json
from ..schedule.generators import Objective
from ..schedule.memory_cap import ShareCap
from ..schedule.passes.lower import simulate_messages
from ..schedule.schedule import Schedule
from ..schedule.select import select
from ..schedule.spec import ScheduleSpec
from . import node_order
from .memory import RankBytes
from .moe_job import flags as moe_flags
from .overlap import FLAG as PAIRS
from .space import Workload


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

    def key(self) -> Key:
        """What the front compares."""
        return self.makespan_us, self.worst.total, self.host_bytes

    @property
    def offload(self) -> str | None:
        """What is offloaded, as ``--offload``."""
        return None if self.spec.offload is None else str(self.spec.offload.wanted)

    def node_host_bytes(self, per_node: int) -> tuple[list[int], list[int]] | None:
        """Host memory of every node, with ranks in order and balanced (``node_order``).

        None where nothing is offloaded, there is one node, or nodes cannot be balanced.
        """
        job = self.workload.job
        each = job.tensor_model_parallel_size * job.context_parallel_size * job.data_parallel_size
        world = self.spec.pp * each
        group = node_order.group_size(
            job.tensor_model_parallel_size,
            job.context_parallel_size,
            job.expert_model_parallel_size,
            job.expert_tensor_parallel_size,
        )
        if not self.host_bytes or world <= per_node:
            return None
        try:
            node_order.check_group(per_node, group)
            return node_order.host_bytes([rank.host for rank in self.ranks], world, per_node)
        except ValueError:
            return None

    @property
    def cap(self) -> Fraction | None:
        """The cap that the order was made for, as a fraction of 1F1B's peak."""
        return self.spec.cap.share if isinstance(self.spec.cap, ShareCap) else None

    def schedule(self, objective: Objective = "makespan") -> Schedule:
        """The schedule itself, with its offload, made again."""
        return select(replace(self.spec, objective=objective)).schedule

    def as_named(self) -> Fraction:
        """Microseconds if training makes the order, by the schedule's name.

        The stages' times are the same; only the order of the passes may be made for others.
        """
        costs = self.workload.by_name.costs
        if costs == self.spec.costs:
            return self.makespan_us
        made = select(replace(self.spec, costs=costs)).schedule
        work = self.workload
        return simulate_messages(made, work.network, work.costs).makespan

    def simulate_arguments(self, stage_file: str) -> list[str]:
        """Of ``megatron-ext simulate``, which gives the same numbers.

        Args:
            stage_file: where ``stage_cost`` was written to.
        """
        spec = self.spec
        words = ["--schedule", spec.name, "--pp", str(spec.pp)]
        words += ["--microbatches", str(spec.microbatches), "--chunks", str(spec.chunks)]
        words += ["--stage-cost", stage_file, "--hop", str(number_to_json(spec.costs.hop))]
        for option, value in self._options():
            words += [f"--{option}", value]
        if spec.overlap:
            words.append("--overlap")
        if spec.costs.vocabulary is not None:
            times = (str(number_to_json(x)) for x in spec.costs.vocabulary)
            words += ["--vocabulary", ",".join(times)]
        network = self.workload.network
        return words if network is None else words + network.words

    def flags(self, file: str | None = None) -> list[str]:
        """Of training: ours, and Megatron's own that the point needs.

        Args:
            file: a schedule file that holds this point's order; None: by name.
        """
        job, spec, split = self.workload.job, self.spec, self.workload.split
        words = [f"--pipeline-model-parallel-size {spec.pp}"]
        words += [f"--micro-batch-size {job.micro_batch_size}"]
        if not split.even or (job.hybrid and spec.placement.chunks > 1):
            flag, value = split.flag(job)
            words += [f"{flag} '{value}'"]
        elif spec.placement.chunks > 1 and not spec.placement.is_vee():
            words += [f"--num-virtual-stages-per-pipeline-rank {spec.chunks}"]
        if job.cheap_recompute:
            words += ["--pp-cheap-recompute"]
        if job.vocab_parallel:
            words += ["--pp-vocab-parallel"]
            words += [f"--pp-vocab-chunks {job.vocab_chunks}"] if job.vocab_chunks > 1 else []
        if job.overlap_moe_expert_parallel_comm:
            words += [PAIRS]
        words += moe_flags(job)
        if file is not None:
            return [*words, f"--pp-schedule {file}"]
        words += [f"--pp-schedule {spec.name}"]
        words += [flag for flag in (self.workload.by_name.flag,) if flag]
        return words + [f"--pp-{option} {value}" for option, value in self._options()]

    def _options(self) -> list[tuple[str, str]]:
        """Options that the command line and training (after ``--pp-``) share, with values."""
        words = []
        if self.spec.group_size is not None:
            words.append(("group-size", str(self.spec.group_size)))
        if self.cap is not None:
            words.append(("memory-cap", str(self.cap)))
        if self.spec.offload is not None:
            link = self.spec.offload.link
            words.append(("offload", str(self.spec.offload.wanted)))
            words.append(("offload-time", link.text))
            words.append(("offload-transfer", link.policy))
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


def evaluate(spec: ScheduleSpec, workload: Workload) -> Point:
    """Generate, offload and simulate, and count every rank's bytes.

    Raises:
        ValueError: the schedule does not exist for these numbers, or nothing keeps its cap.
    """
    found = select(spec)
    run = simulate_messages(found.schedule, workload.network)
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
