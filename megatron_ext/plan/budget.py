"""A budget in bytes a rank: which schedules fit it, and how many whole activation sets that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .._input import size_text
from ..schedule.costs import Costs
from ..schedule.effects import peak_sets
from ..schedule.generators import GENERATORS, NAMES
from ..schedule.generators.auto import costs_for, simplest_first, time_taken
from ..schedule.generators.cap import v_cap_limits
from ..schedule.generators.request import Objective
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule
from ..schedule.simulate import simulate
from .layout import Split
from .memory import MESSAGES, RankBytes, StageBytes, message_bytes, rank_bytes, stage_bytes
from .model import Job, PlanError
from .point import Shape
from .profile import Profile


@dataclass(frozen=True)
class Fitting:
    """A schedule that keeps a budget.

    Attributes:
        shape: what its generator was asked for.
        schedule: for all microbatches.
        note: why this one, and what the budget is in activation sets.
    """

    shape: Shape
    schedule: Schedule
    note: str


@dataclass(frozen=True)
class Budget:
    """What a rank may hold on its device, for one job.

    Attributes:
        job: what is trained.
        size: bytes per rank.
        splits: layers of every stage, for a number of stages.
        profile: measured bytes in place of estimated ones, and measured times.
    """

    job: Job
    size: int
    splits: Callable[[int], Split]
    profile: Profile | None = None

    def stages(self, placement: Placement) -> list[StageBytes]:
        """Bytes of every stage."""
        split = self.splits(placement.num_stages)
        stages = stage_bytes(self.job, split)
        return stages if self.profile is None else self.profile.sized(stages, split)

    def ranks(self, schedule: Schedule) -> list[RankBytes]:
        """Every rank's peak under ``schedule``."""
        return rank_bytes(schedule, self.stages(schedule.placement), message_bytes(self.job))

    def worst(self, schedule: Schedule) -> RankBytes:
        """The rank with most bytes at its peak."""
        return max(self.ranks(schedule), key=lambda rank: rank.total)

    def sets(self, placement: Placement, split_backward: bool) -> list[int]:
        """Whole activation sets for which every rank has room, whichever sets these are.

        Beside parameters, gradients, optimizer states, messages and the running pass. Each set
        counts with the bytes of the rank's largest, at its largest.
        """
        stages = self.stages(placement)
        out = []
        for row, each in zip(placement.stages, self._largest_sets(placement, split_backward)):
            free = self.size - MESSAGES * message_bytes(self.job)
            free -= sum(stages[s].states.total for s in row)
            sets = [stages[s].sets for s in row]
            free -= max(one.again + one.layer + one.logits for one in sets)
            out.append(max(0, free // each))
        return out

    def cap(self, placement: Placement, split_backward: bool) -> Fraction:
        """The same as a fraction of 1F1B's peak, for the rank with least room.

        Raises:
            PlanError: there is no room for a set.
        """
        every = self.sets(placement, split_backward)
        if min(every) < 1:
            rank = every.index(min(every))
            states = sum(self.stages(placement)[s].states.total for s in placement.stages[rank])
            raise PlanError(
                f"{size_text(self.size)} a rank leave no room for an activation set on rank "
                f"{rank}, which has {size_text(states)} of parameters, gradients and optimizer "
                "states; give more, or use more ranks"
            )
        return Fraction(min(every), placement.num_stages)

    def fastest(
        self,
        pp: int,
        microbatches: int,
        chunks: int,
        costs: Costs,
        names: Sequence[str] = NAMES,
        objective: Objective = "makespan",
    ) -> Fitting:
        """The fastest of ``names`` that fits, the simpler one of those equally fast.

        Args:
            pp, microbatches, costs, objective: as ``generate``.
            chunks: of the families that take any number.

        Raises:
            PlanError: nothing fits; says what would, and what binds.
        """
        fitting: list[tuple[Fraction, Shape, Schedule]] = []
        small: list[tuple[RankBytes, str]] = []
        for name in simplest_first(names):
            shapes = _shapes(name, pp, chunks)
            family = costs_for(costs, pp * shapes[0].chunks) if shapes else None
            if family is None:
                continue
            found = self._largest(shapes, pp, microbatches, family, objective)
            if isinstance(found, RankBytes):
                small.append((found, name))
            else:
                fitting.append((time_taken(simulate(found[1]), objective), *found))
        if not fitting:
            raise PlanError(self._nothing_fits(small, names))
        _, shape, schedule = min(fitting, key=lambda one: one[0])  # the first of the fastest
        count = f"the fastest of {len(fitting)} that fit" if len(names) > 1 else "which fits"
        note = f"{schedule.name}, {count} {size_text(self.size)} a rank: {self.describe(schedule)}"
        return Fitting(shape, schedule, note)

    def describe(self, schedule: Schedule) -> str:
        """The budget in whole activation sets beside those that ``schedule`` holds, in words.

        Of the rank that could hold fewest: what it holds, and as many of its largest as still fit.
        """
        made = GENERATORS.get(schedule.name)
        each = self._largest_sets(schedule.placement, made is None or made.split_backward)
        ranks, held = self.ranks(schedule), peak_sets(schedule.ranks)
        room = [h + (self.size - r.total) // e for h, r, e in zip(held, ranks, each)]
        binds = min(range(len(room)), key=lambda rank: (room[rank], -ranks[rank].total))
        source = "measured" if self.profile and self.profile.set_bytes else "estimated"
        return (
            f"a cap of {room[binds]} activation sets ({source}, {size_text(each[binds])} at most) "
            f"on rank {binds}, which has least room; it holds {held[binds]} there and needs "
            f"{size_text(ranks[binds].total)}"
        )

    def _largest_sets(self, placement: Placement, split_backward: bool) -> list[int]:
        """Bytes of each rank's largest set, at its largest."""
        sets = [stage.sets for stage in self.stages(placement)]
        size = [max(1, one.until_b, one.until_w * split_backward) for one in sets]
        return [max(size[s] for s in row) for row in placement.stages]

    def _largest(
        self,
        shapes: Sequence[Shape],
        pp: int,
        microbatches: int,
        costs: Costs,
        objective: Objective,
    ) -> tuple[Shape, Schedule] | RankBytes:
        """The last of ``shapes``, which grow, that fits; or the bytes of the first."""
        few = min(microbatches, 2 * pp)  # as many as peaks need
        low, high = 0, len(shapes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.worst(shapes[middle].make(pp, few, costs, objective)).total <= self.size:
                low = middle
            else:
                high = middle - 1
        for shape in shapes[low::-1]:
            schedule = shape.make(pp, microbatches, costs, objective)
            worst = self.worst(schedule)
            if worst.total <= self.size:
                return shape, schedule
        return worst

    def _nothing_fits(self, small: Sequence[tuple[RankBytes, str]], names: Sequence[str]) -> str:
        tried = "no schedule" if len(names) > 3 else " or ".join(names)
        if not small:
            return f"{tried} is possible with these chunks; name another schedule"
        least, name = min(small, key=lambda one: one[0].total)
        part, size = least.largest_part()
        return (
            f"{tried} fits {size_text(self.size)} a rank; the smallest budget that one fits is "
            f"{size_text(least.total)} ({name}), where rank {least.rank} binds with "
            f"{size_text(size)} of {part}"
        )


def _shapes(name: str, pp: int, chunks: int) -> list[Shape]:
    """What a family may be generated as, smallest in memory first."""
    generator = GENERATORS[name]
    if generator.any_chunks and chunks < generator.default_chunks:
        return []
    v = chunks if generator.any_chunks else generator.default_chunks
    if generator.takes_group_size:
        return [Shape(name, v, size) for size in range(-(-pp // 2) + 1, pp + 1)]  # less is gis-h
    if generator.takes_memory_cap:
        low, high = v_cap_limits(pp)
        return [Shape(name, v, memory_cap=cap) for cap in range(low, high + 1)]
    return [Shape(name, v)]
