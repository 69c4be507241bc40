"""A memory cap in bytes a rank: parameters, gradients, optimizer states, sets and passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .._input import size_text
from ..schedule.memory_cap import number_text
from ..schedule.named import held_sets
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule
from ..schedule.select import ONE_CHUNK
from ..schedule.spec import AUTO, ScheduleSpec
from .layout import Split
from .memory import MESSAGES, RankBytes, StageBytes, message_bytes, rank_bytes, stage_bytes
from .model import Job, PlanError

_SCORED = 4  # microbatches
_EARLY = 3  # microbatches that are embedded or in the pipeline beside one a rank
Splits = Callable[[int], Split]  # layers of every stage, for a number of stages


@dataclass(frozen=True)
class Budget:
    """What a rank may hold on its device, for one job; a ``Cap`` of the selector.

    Attributes:
        size: bytes per rank.
        splits: layers of every stage, for a number of stages.
    """

    job: Job
    size: int
    splits: Splits

    def stages(self, placement: Placement) -> list[StageBytes]:
        """Bytes of every stage."""
        return stage_bytes(self.job, self.splits(placement.num_stages))

    def ranks(self, schedule: Schedule) -> list[RankBytes]:
        """Every rank's peak under ``schedule``."""
        return rank_bytes(schedule, self.stages(schedule.placement), message_bytes(self.job))

    def worst(self, schedule: Schedule) -> RankBytes:
        """The rank with most bytes at its peak."""
        return max(self.ranks(schedule), key=lambda rank: rank.total)

    def room(self, placement: Placement, split_backward: bool) -> list[int]:
        """Per rank, whole activation sets for which it has room, whichever sets these are.

        Beside parameters, gradients, optimizer states, messages and the running pass. Each set
        counts with the bytes of the rank's largest, at its largest.
        """
        stages = self.stages(placement)
        out = []
        for row, each in zip(placement.stages, self._largest_sets(placement, split_backward)):
            free = self.size - MESSAGES * message_bytes(self.job)
            free -= sum(stages[s].states.total for s in row)
            sets = [stages[s].sets for s in row]
            free -= max(one.recompute_bytes + one.layer + one.logits + one.gathered for one in sets)
            # Between S and T are seldom more microbatches' scores than four.
            free -= max(one.buffers + one.scores + _SCORED * one.shard for one in sets)
            free -= (placement.pp + _EARLY) * max(one.waiting for one in sets)
            out.append(max(0, free // each))
        return out

    def sets(self, placement: Placement, split_backward: bool) -> int:
        """``room`` of the rank that has least.

        Raises:
            PlanError: there is no room for a set.
        """
        room = self.room(placement, split_backward)
        if min(room) < 1:
            rank = room.index(min(room))
            states = sum(self.stages(placement)[s].states.total for s in placement.stages[rank])
            raise PlanError(
                f"{size_text(self.size)} a rank leave no room for an activation set on rank "
                f"{rank}, which has {size_text(states)} of parameters, gradients and optimizer "
                "states; give more, or use more ranks"
            )
        return min(room)

    def most_sets(self, placement: Placement) -> int:
        """Of the rank with least room, as many of its smallest sets as fit beside its states, each
        counted where it is smallest: before its B, or between B and W."""
        stages, most = self.stages(placement), []
        for row in placement.stages:
            sets = [stages[s].sets for s in row]
            each = max(1, min(min(one.bytes_f_to_b, one.bytes_b_to_w) for one in sets))
            most.append((self.size - sum(stages[s].states.total for s in row)) // each)
        return max(0, min(most))

    def needed(self, schedule: Schedule) -> int:
        return self.worst(schedule).total

    def fits(self, schedule: Schedule) -> bool:
        return self.needed(schedule) <= self.size

    def amount(self, pp: int) -> str:
        return f"{size_text(self.size)} a rank"

    def taken(self, schedule: Schedule) -> str:
        return size_text(self.needed(schedule))

    def binding(self, schedule: Schedule) -> str:
        worst = self.worst(schedule)
        part, size = worst.largest_part()
        return f", where rank {worst.rank} binds with {size_text(size)} of {part}"

    def enough(self, schedule: Schedule) -> str:
        if not schedule.has_offload:
            return self.taken(schedule)
        # Under offload the cap counts in sets of the largest size.
        placement, split = schedule.placement, schedule.splits_backward
        more = math.ceil(held_sets(schedule)) - min(self.room(placement, split))
        return size_text(self.size + more * max(self._largest_sets(placement, split)))

    def detail(self, schedule: Schedule) -> str:
        """The budget in whole activation sets beside those that ``schedule`` holds.

        Of the rank that could hold fewest: what it holds, and as many of its largest as still fit.
        With offload: the number of sets that limits every rank.
        """
        placement, split = schedule.placement, schedule.splits_backward
        if schedule.has_offload:
            return self.in_sets_text(placement, split)
        each = self._largest_sets(placement, split)
        ranks = self.ranks(schedule)
        held = [peak * schedule.chunks for peak in schedule.peak_activation()]
        room = [h + (self.size - r.total) // e for h, r, e in zip(held, ranks, each)]
        binds = min(range(len(room)), key=lambda rank: (room[rank], -ranks[rank].total))
        taken = size_text(ranks[binds].total)
        largest = f"estimated, {size_text(each[binds])} at most"
        most = number_text(room[binds])
        return (
            f"a cap of {most} activation sets ({largest}) on rank {binds}, which "
            f"has least room; it holds {number_text(held[binds])} there and needs {taken}"
        )

    def in_sets_text(self, placement: Placement, split_backward: bool) -> str:
        """The cap on sets that stands for the budget under offload, in words."""
        return (
            f"{self.amount(placement.pp)} are a cap of {self.sets(placement, split_backward)} "
            "activation sets of estimated size on a device"
        )

    def _largest_sets(self, placement: Placement, split_backward: bool) -> list[int]:
        """Bytes of each rank's largest set, at its largest."""
        sets = [stage.sets for stage in self.stages(placement)]
        size = [max(1, one.bytes_f_to_b, one.bytes_b_to_w * split_backward) for one in sets]
        return [max(size[s] for s in row) for row in placement.stages]


def stages_of(spec: ScheduleSpec) -> int:
    """How many stages the costs of ``spec`` are needed for; ``auto`` takes sums of neighbours for
    schedules with fewer chunks."""
    if spec.name != AUTO:
        return spec.placement.num_stages
    one = set(spec.names) <= set(ONE_CHUNK)
    return spec.pp * (1 if one else spec.chunks or 2)
