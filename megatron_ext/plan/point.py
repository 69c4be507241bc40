"""One point of the search: what was asked of the generators, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..schedule.costs import Costs, number_to_json
from ..schedule.generators import GENERATORS, generate
from ..schedule.generators.request import Objective
from ..schedule.link import Link
from ..schedule.passes.offload import offload
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule
from ..schedule.simulate import simulate
from .layout import Split
from .memory import RankBytes, StageBytes, message_bytes, rank_bytes
from .model import Job
from .times import mean_costs


@dataclass(frozen=True)
class Shape:
    """What the generators are asked for, beside sizes and costs.

    Attributes:
        name: of the schedule.
        chunks: model chunks a rank.
        group_size, memory_cap: options of its generator, or None; the cap in activation sets.
    """

    name: str
    chunks: int
    group_size: int | None = None
    memory_cap: int | None = None

    def placement(self, pp: int) -> Placement:
        """Where its stages lie."""
        if GENERATORS[self.name].placement == "vee":
            return Placement.vee(pp)
        return Placement.loop(pp, self.chunks)

    def make(
        self, pp: int, microbatches: int, costs: Costs, objective: Objective = "makespan"
    ) -> Schedule:
        """The schedule; arguments as of ``generate``."""
        return generate(
            self.name,
            pp,
            microbatches,
            self.chunks,
            costs,
            group_size=self.group_size,
            memory_cap=self.memory_cap,
            objective=objective,
        )


@dataclass(frozen=True)
class Case:
    """A job with a layer split on a placement: what costs and bytes follow from.

    Attributes:
        job: with its microbatch size and recompute.
        microbatches: of one iteration.
        split: layers of every stage.
        costs: of the stages, in microseconds.
        stages: bytes of every stage.
    """

    job: Job
    microbatches: int
    split: Split
    costs: Costs
    stages: tuple[StageBytes, ...]


@dataclass(frozen=True)
class Away:
    """Which sets leave the device: as ``--offload``, ``--offload-time``, ``--offload-transfer``."""

    what: str
    time: str
    policy: str


@dataclass(frozen=True)
class Point:
    """A simulated point.

    Attributes:
        shape, case, away: what it is; ``away`` is None without offload.
        makespan_us: of one iteration's passes, in microseconds.
        bubble, peak_activation, peak_host_activation: as ``simulate`` says.
        ranks: every rank's bytes at its peak.
    """

    shape: Shape
    case: Case
    away: Away | None
    makespan_us: Fraction
    bubble: Fraction
    peak_activation: tuple[Fraction, ...]
    peak_host_activation: tuple[Fraction, ...]
    ranks: tuple[RankBytes, ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def worst(self) -> RankBytes:
        """The rank with most bytes."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def host_bytes(self) -> int:
        """Of the rank that has most on the host."""
        return max(rank.host for rank in self.ranks)

    def key(self) -> tuple[Fraction, int, int]:
        """What the front compares: time, bytes on the device, bytes on the host."""
        return self.makespan_us, self.worst.total, self.host_bytes

    def schedule(self, objective: Objective = "makespan") -> Schedule:
        """The schedule itself, with its offload, made anew."""
        return _scheduled(self.shape, self.case, self.away, self.pp, objective)

    def as_named(self) -> Fraction:
        """Microseconds if the order is made for the mean costs of a rank, as ``--pp-cost`` has it.

        The stages' times are the same; only the order of the passes does not know them.
        """
        costs = self.case.costs
        named = self.shape.make(self.pp, self.case.microbatches, mean_costs(costs, self.pp))
        return simulate(named, costs).makespan

    def simulate_arguments(self, stage_file: str) -> list[str]:
        """Of ``megatron-ext simulate``, which gives the same numbers.

        Args:
            stage_file: where ``stage_cost`` was written to.
        """
        shape, words = self.shape, ["--schedule", self.shape.name]
        words += ["--pp", str(self.pp), "--microbatches", str(self.case.microbatches)]
        words += ["--chunks", str(shape.chunks), "--stage-cost", stage_file]
        words += ["--hop", str(number_to_json(self.case.costs.hop))]
        if shape.group_size is not None:
            words += ["--group-size", str(shape.group_size)]
        if shape.memory_cap is not None:
            words += ["--memory-cap", cap_text(shape, self.pp)]
        if self.away is not None:
            words += ["--offload", self.away.what, "--offload-time", self.away.time]
            words += ["--offload-transfer", self.away.policy]
        return words

    def flags(self, file: str | None = None) -> list[str]:
        """Of training: ours, and Megatron's own that the point needs.

        Args:
            file: a schedule file that holds this point's order; None: by name.
        """
        job, shape, split = self.case.job, self.shape, self.case.split
        words = [f"--pipeline-model-parallel-size {self.pp}"]
        words += [f"--micro-batch-size {job.micro_batch_size}"]
        if not split.even:
            words += [f"--pipeline-model-parallel-layout '{split.text()}'"]
        elif shape.chunks > 1 and GENERATORS[shape.name].placement == "loop":
            words += [f"--num-virtual-stages-per-pipeline-rank {shape.chunks}"]
        if job.cheap_recompute:
            words += ["--pp-cheap-recompute"]
        if file is not None:
            return [*words, f"--pp-schedule {file}"]
        words += [f"--pp-schedule {shape.name}"]
        if shape.group_size is not None:
            words += [f"--pp-group-size {shape.group_size}"]
        if shape.memory_cap is not None:
            words += [f"--pp-memory-cap {cap_text(shape, self.pp)}"]
        mean = mean_costs(self.case.costs, self.pp)
        numbers = mean.forward, mean.backward_input, mean.backward_weight, mean.hop
        words += ["--pp-cost " + ",".join(str(number_to_json(x)) for x in numbers)]
        if self.away is not None:
            words += [f"--pp-offload {self.away.what} --pp-offload-time {self.away.time}"]
            words += [f"--pp-offload-transfer {self.away.policy}"]
        return words

    def stage_cost(self) -> dict[str, Any]:
        """The content of the file for ``--stage-cost``."""
        rows = self.case.costs.stages or ()
        return {"stages": [[number_to_json(x) for x in row] for row in rows]}


def cap_text(shape: Shape, pp: int) -> str:
    """A cap in sets as the fraction of 1F1B's peak that the flags take."""
    assert shape.memory_cap is not None
    return str(Fraction(shape.memory_cap, pp * shape.chunks))


def _scheduled(
    shape: Shape, case: Case, away: Away | None, pp: int, objective: Objective = "makespan"
) -> Schedule:
    schedule = shape.make(pp, case.microbatches, case.costs, objective)
    if away is None:
        return schedule
    return offload(schedule, Link.of(pp, away.time, None, away.policy), away.what).schedule


def evaluate(shape: Shape, case: Case, away: Away | None, pp: int) -> Point:
    """Generate, offload and simulate, and count every rank's bytes.

    Raises:
        ValueError: the schedule does not exist for these numbers.
    """
    schedule = _scheduled(shape, case, away, pp)
    run = simulate(schedule)
    return Point(
        shape,
        case,
        away,
        run.makespan,
        run.bubble,
        tuple(run.peak_activation),
        tuple(run.peak_host_activation),
        tuple(rank_bytes(schedule, case.stages, message_bytes(case.job))),
    )


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other one beats or equals in all three; fastest first."""
    best: list[Point] = []
    for point in sorted(points, key=Point.key):
        if not any(_beats(q, point) for q in best):
            best.append(point)
    return best


def _beats(one: Point, other: Point) -> bool:
    (time, device, host), (its_time, its_device, its_host) = one.key(), other.key()
    return time <= its_time and device <= its_device and host <= its_host
