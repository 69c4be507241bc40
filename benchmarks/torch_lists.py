"""The action lists of torch.distributed.pipelining, as schedules of ours; only where torch is."""

from __future__ import annotations

from typing import Any

from megatron_ext.schedule import Costs, Placement, Schedule, check
from megatron_ext.schedule.actions import Action, Op

# Our name of each, its class in torch, and whether its stages lie on the V.
CLASSES = (
    ("torch Interleaved1F1B", "ScheduleInterleaved1F1B", False),
    ("torch InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", False),
    ("torch ZBVZeroBubble", "ScheduleZBVZeroBubble", True),
    ("torch DualPipeV", "ScheduleDualPipeV", True),
)

OPERATIONS = {
    "FORWARD": Op.F,
    "BACKWARD_INPUT": Op.B,
    "BACKWARD_WEIGHT": Op.W,
    "FULL_BACKWARD": Op.BW,
}


def version() -> str | None:
    """torch's version, None where it cannot be imported."""
    try:
        import torch
        import torch.distributed.pipelining
    except ImportError:
        return None
    return str(torch.__version__)


class _Stage:
    """As much of a pipeline stage as a schedule's constructor reads."""

    def __init__(self, pp: int, stages: int, index: int) -> None:
        self.group_size, self.num_stages, self.group_rank = pp, stages, 0
        self.stage_index, self.submod, self.device = index, None, "cpu"
        self.is_first, self.is_last = index == 0, index == stages - 1


def schedule(name: str, pp: int, microbatches: int, costs: Costs) -> Schedule:
    """Torch's order for two stages a rank.

    Raises:
        ValueError: torch refuses the sizes.
    """
    return order(name, construct(name, pp, microbatches), microbatches, costs)


def construct(name: str, pp: int, microbatches: int) -> Any:
    """Torch's schedule object for two stages a rank; its stages cannot run.

    Raises:
        ValueError: torch refuses the sizes.
    """
    import torch
    from torch.distributed.pipelining import schedules

    _, cls, vee = next(row for row in CLASSES if row[0] == name)
    held = (0, 2 * pp - 1) if vee else (0, pp)
    stages: list[Any] = [_Stage(pp, 2 * pp, index) for index in held]
    for stage in stages:
        stage.submod = torch.nn.Identity()  # torch asks whether it has been compiled
    return getattr(schedules, cls)(stages, microbatches, loss_fn=lambda *_: None)


def order(name: str, made: Any, microbatches: int, costs: Costs) -> Schedule:
    """The order of one of torch's schedule objects, with several stages a rank.

    DualPipeV's overlapped pairs are one forward and one backward at the same time; here, one after
    the other: overlapping compute with compute does not make it cheaper, and the simulator has no
    communication inside a pass that could be hidden.

    Raises:
        ScheduleError: it is none that can run.
    """
    vee = next(row[2] for row in CLASSES if row[0] == name)
    pp = len(made.pipeline_order)
    placement = Placement.vee(pp) if vee else Placement.loop(pp, 2)
    ranks = []
    for rank in range(pp):
        passes = []
        for action in made.pipeline_order[rank]:
            parts = () if action is None else action.sub_actions or (action,)
            for part in parts:
                if part.is_compute_op:
                    op = OPERATIONS[part.computation_type.name]
                    passes.append(Action(op, part.stage_index, part.microbatch_index))
        ranks.append(tuple(passes))
    found = Schedule(name, placement, microbatches, tuple(ranks), costs)
    check(found)
    return found
