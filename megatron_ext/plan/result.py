"""What a search found: points, those that fit, the front, the fastest."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import Job
from .point import Point, front


@dataclass
class Result:
    """What was found.

    Attributes:
        budget, host_budget: bytes per rank, of the device and of the host (None: no limit).
        points: all that were simulated, the given ones among them.
        divisions, cases: how many there are; of ``pruned`` cases nothing can fit.
        candidates: configurations that may fit.
        alone: the fastest that fits without a pipeline.
    """

    budget: int
    host_budget: int | None
    points: list[Point] = field(default_factory=list)
    divisions: int = 0
    cases: int = 0
    pruned: int = 0
    candidates: int = 0
    alone: Point | None = None

    def fits(self, point: Point) -> bool:
        """True if it keeps both budgets."""
        host = self.host_budget is None or point.host_bytes <= self.host_budget
        return host and point.worst.total <= self.budget

    @property
    def front(self) -> list[Point]:
        """The points that fit and that no other one beats."""
        return front(filter(self.fits, self.points), Point.key)

    @property
    def best(self) -> Point | None:
        """Of those that fit; of equally fast ones what needs least of the host, then least."""
        fitting = [point for point in self.points if self.fits(point)]
        return min(
            fitting,
            key=lambda point: (point.iteration_us, point.host_bytes, point.worst.total),
            default=None,
        )

    @property
    def smallest(self) -> Point:
        """The point with fewest bytes on its fullest rank, of those that keep the host's budget."""
        usable = [
            p for p in self.points if self.host_budget is None or p.host_bytes <= self.host_budget
        ]
        return min(usable, key=lambda point: (point.worst.total, point.iteration_us))


def division_text(job: Job) -> str:
    """A division for people."""
    sizes = [
        ("TP", job.tensor_model_parallel_size),
        ("PP", job.pipeline_model_parallel_size),
        ("DP", job.data_parallel_size),
        ("CP", job.context_parallel_size),
        ("EP", job.expert_model_parallel_size),
    ]
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one device"


def sizes_of(job: Job) -> tuple[int, ...]:
    """All parallel sizes of a division."""
    return (
        *(job.tensor_model_parallel_size, job.pipeline_model_parallel_size),
        *(job.context_parallel_size, job.data_parallel_size),
        *(job.expert_model_parallel_size, job.expert_tensor_parallel_size),
    )
