"""``--pp-profile-steps``: times of passes and messages, measured in training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ...plan.times import costs_in_parts
from ...runtime.trace import Recorder
from ...schedule.actions import Action, Op
from ...schedule.costs import Costs
from ...schedule.placement import Placement
from ...schedule.schedule import Schedule
from ..arguments import MegatronArgs
from ..callbacks import Callback, Duration, Step
from ..errors import ConfigError
from ..feature import Feature, Flag, Run
from ..measuring import Seconds, hop_seconds, pass_seconds
from ..utils import gather_over

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 2  # on CUDA devices
# Training steps before the measured ones, which load kernels and tune them; by kind of device.
_WARM_UP = {"cuda": 2}
# Options under which nothing is measured by default: a captured or paired pass has no time of its
# own, microbatches of a step's own lengths have an order of their own, passes of a sharded
# vocabulary are not measured, a user's costs are meant, and plans of MoE layers that are tried
# change the times of passes.
_UNMEASURED = (
    *("pp_cost", "pp_vocab_parallel", "pp_slice_tokens", "overlap_moe_expert_parallel_comm"),
    *("enable_cuda_graph", "external_cuda_graph"),
)


class ProfileSteps(Feature):
    """On with ``--pp-profile-steps``, and by default on CUDA devices."""

    per_model = True

    flags = (
        Flag(
            "--pp-profile-steps",
            "measure F, B, W of every stage and the hop for N steps, then plan again for them, "
            f"if the new order is faster; default: {DEFAULT_STEPS} steps from the third on, on "
            "CUDA devices; 0: off",
            "N",
            int,
            least=0,
        ),
    )

    def check_flags(self, run: Run) -> None:
        steps = run.args.pp_profile_steps
        if run.request is not None and steps:
            flag = f"--pp-profile-steps {steps}"
            if run.request.file is not None:
                raise ConfigError(f"{flag} makes orders, and a file has one; name a schedule")

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None:
            return ()
        self._inputs, steps = run.inputs, run.args.pp_profile_steps
        if steps is None and (run.request.file is not None or _unmeasured(run.args)):
            steps = 0
        self._wanted: int | None = steps
        self._left = self._trained = 0
        self._recorders: list[tuple[Recorder, Placement]] = []
        return (self,)

    # --- an iteration; the device is waited for once, when all measured ones are over ---

    def times(self, training: bool) -> bool:
        return training and self._left > 0

    def before_plan(self, step: Step) -> None:
        if not step.training:
            return
        kind = step.call.device.type
        if self._trained == _WARM_UP.get(kind, 0):
            default = DEFAULT_STEPS if kind == "cuda" else 0
            self._left = default if self._wanted is None else self._wanted
            self._inputs.reorder = self._left > 0
        self._trained += 1
        self._left = max(self._left, self._inputs.steps_to_measure)
        self._inputs.steps_to_measure = 0

    def planned(self, plan: Schedule) -> None:
        replanned = self._inputs.reorder and self._inputs.costs is not None
        if replanned and plan.note and dist.get_rank() == 0:
            logger.info("%s", plan.note)

    def end(self, step: Step) -> None:
        if not self.times(step.training):
            return
        self._recorders.append((step.recorder, step.plan.placement))
        self._left -= 1
        if self._left == 0:
            self._finish(step)

    def _finish(self, step: Step) -> None:
        """Take the times of the measured steps into the plans of those that follow."""
        call = step.call
        found = durations(self._recorders)
        self._recorders = []
        hop = hop_seconds(step.channel, call.group) if self._inputs.reorder else 0.0
        seconds = pass_seconds(found)
        self._inputs.costs = agree(step.plan.placement, step.rank, seconds, hop, call.groups)
        self._inputs.changed = True
        for callback in step.callbacks:
            callback.profiled(step, found)


def _unmeasured(args: MegatronArgs) -> bool:
    lengths = getattr(args, "pp_microbatch_costs", None) not in (None, "equal")
    graphs = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    moe = "moe_pipeline_chunks", "moe_memory_reuse"
    tries = any(getattr(args, name, None) == "auto" for name in moe)
    return lengths or graphs or tries or any(getattr(args, name, None) for name in _UNMEASURED)


def durations(recorders: Iterable[tuple[Recorder, Placement]]) -> list[Duration]:
    """All passes of these iterations; waits for the device. Joint actions, whose passes have no
    times of their own, do not count."""
    return [
        (placement.chunk_of(action.stage), action.op, action.microbatch, seconds)
        for recorder, placement in recorders
        for action, seconds in recorder.durations()
        if isinstance(action, Action) and isinstance(action.op, Op)
    ]


def agree(
    placement: Placement, rank: int, seconds: Seconds, hop: float, groups: Sequence[Any]
) -> Costs:
    """The measured costs of all stages; all ranks of a call do this together.

    Args:
        hop: seconds of a message between neighbours.
        groups: of the call.

    Returns:
        The same on all ranks: of ranks that hold the same stage, the slowest.
    """
    mine = {
        stage: [seconds.get((chunk, op), 0.0) for op in (Op.F, Op.B, Op.W)]
        for chunk, stage in enumerate(placement.stages[rank])
    }
    every = gather_over((mine, hop), groups)
    stages = range(placement.num_stages)
    rows = [[part[stage] for part, _ in every if stage in part] for stage in stages]
    slowest = [[max(1e-9, *column) for column in zip(*row)] for row in rows]
    return costs_in_parts(slowest, max(hop for _, hop in every))
