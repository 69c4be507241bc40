"""Optimizer post-validation: a rank's step, and the next iteration, do not wait for all ranks.

Stock reduces gradient norm and inf/nan flags over the whole pipeline before any rank may step, so
an iteration takes the makespan of its passes. Here a rank steps by what the ranks before it know,
begins the next iteration, and learns during its first forward passes whether that was right (ZB,
section 4; the order is the lowered schedule's, see ``schedule.lower``). All of it happens inside
``optimizer.step``: what that returns, and whatever Megatron does afterwards, is validated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....plan.post_validation import CONFLICTS, FLAG
from ....runtime.channel import Channel
from ....runtime.edges import connected
from ....schedule.placement import Placement
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...feature import Flag, Run, require_no_conflict
from ...hooks import hooked
from ...pipeline import start_param_sync
from ...targets import CHAINED_STEP, DECIDE_EXIT, SAVE
from .eager_step import PIPELINES, EagerStep, StageGroups
from .head import Head

logger = logging.getLogger(__name__)

# Iterations; gradients that had to be clipped once will soon be again.
PATIENCE = 10


class PostValidation(Head):
    """On with ``--pp-post-validation``: steps the optimizer ahead of validation, while recent steps
    needed no clipping."""

    flags = (
        Flag(
            FLAG,
            "step the optimizer and begin the next iteration before the gradient norm of all "
            "pipeline ranks is known, and roll back if it requires clipping; used after N "
            f"iterations in a row without clipping (default {PATIENCE})",
            "N",
            int,
            const=PATIENCE,
            least=0,
            not_in_library="it steps the optimizer in the place of Megatron's own training loop; "
            "start the run with the launcher, or drop it",
        ),
    )
    conflicts = CONFLICTS
    rules = (PIPELINES,)

    def check(self, run: Run) -> None:
        if run.args.pp_post_validation is None or run.request is None:
            return
        require_no_conflict(run.args, self.conflicts, {"": FLAG})

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or run.args.pp_post_validation is None:
            return ()
        assert run.pipeline is not None
        self._set_up(run.pipeline)
        self._patience = run.args.pp_post_validation
        self._plain = 0  # iterations in a row
        self._stepped = False
        self._groups: StageGroups | None = None
        self._ahead = self._undone = 0  # steps taken ahead, and those of them that were undone
        return (self,)

    @hooked(CHAINED_STEP, "the optimizer would wait for all ranks")
    def _with_validation(
        self, original: Callable[..., Any], optimizer: Any
    ) -> tuple[bool, Any, Any]:
        if self._may_step_ahead(optimizer):
            return self._step_ahead(optimizer, original)
        result: tuple[bool, Any, Any] = original(optimizer)
        self._count(optimizer, result)
        return result

    @hooked(SAVE, "a checkpoint could hold random states of an iteration that has only begun")
    def _after_dropping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.drop()
        return original(*args, **kwargs)

    @hooked(DECIDE_EXIT, "a run could end with messages in flight")
    def _before_exit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ends = original(*args, **kwargs)
        if ends:
            self.drop()
        return ends

    def _may_step_ahead(self, optimizer: Any) -> bool:
        from megatron.training import get_args

        if self._groups is None and self.possible:
            # Collective over the job, so before anything that only some ranks do.
            self._groups = StageGroups(optimizer.chained_optimizers, self.last.group)
        return (
            self._stepped
            and self._plain >= self._patience
            and self.possible
            and goes_on(get_args())
        )

    def _count(self, optimizer: Any, result: tuple[bool, Any, Any]) -> None:
        """Take a step of Megatron's own into account."""
        success, norm, _ = result
        limit = optimizer.config.clip_grad
        self._stepped |= success
        clipped = norm is not None and limit > 0 and not float(norm) <= limit
        self._plain = self._plain + 1 if success and not clipped else 0

    def _step_ahead(self, optimizer: Any, original: Callable[..., Any]) -> tuple[bool, Any, Any]:
        assert self._groups is not None
        attempt = Attempt(optimizer, self._groups, self)
        self._ahead += 1
        self.run(attempt)
        assert attempt.state is not None
        if attempt.step_of.is_plain(attempt.state):
            return attempt.step_of.accept(attempt.state)
        self.drop()
        self._undone += 1
        result = attempt.step_of.redo(original, attempt.state)
        self._plain = 0
        self._count(optimizer, result)
        if dist.get_rank() == 0:
            logger.info(
                "post-validation rolled back %d of %d steps that were taken ahead "
                "(gradient norm %s); the next %d wait for all ranks",
                self._undone,
                self._ahead,
                result[1] if result[0] else "not finite",
                self._patience,
            )
        return result


class Attempt:
    """One step ahead, as the executor runs it (see ``StepValidator``).

    Attributes:
        channel: for its messages.
        state: statistics of all ranks, once they are here.
        step_of: the optimizer's part.
    """

    def __init__(self, optimizer: Any, groups: StageGroups, head: Head) -> None:
        self._call = head.last
        device = self._call.device
        group = self._call.group
        chain = Placement.loop(group.size()).edges
        edges = connected(group, "post-validation", chain, device, head.messages)
        self.channel = Channel(edges, (groups.size,), torch.float64, device)
        self.step_of = EagerStep(optimizer, groups, device)
        self.state: torch.Tensor | None = None
        self._so_far = torch.empty(0)

    def statistics(self) -> None:
        self._so_far = self.step_of.statistics()

    def prefix(self, before: torch.Tensor | None) -> torch.Tensor:
        self._so_far = self.step_of.combine(self._so_far, before)
        return self._so_far

    def step(self) -> None:
        """STEP, unless the statistics so far say that it has to be another one, or none."""
        if self.step_of.is_plain(self._so_far):
            self.step_of.step()
        start_param_sync(self._call)

    def validate(self, state: torch.Tensor | None) -> torch.Tensor:
        self.state = self._so_far if state is None else state
        return self.state


def goes_on(args: MegatronArgs) -> bool:
    """True if after this iteration the next one follows at once, with nothing in between.

    Where that is known beforehand, nothing is begun that would be dropped. What cannot be known
    (a signal, the time limit) drops it.
    """
    done = args.curr_iteration + 1
    # Before core_v0.17 Megatron numbers an iteration that it skips by those done before it.
    if done >= args.train_iters or {done, done + 1} & {*(args.iterations_to_skip or ())}:
        return False
    if done in (args.phase_transition_iterations or ()):
        return False
    intervals = [args.exit_interval, args.check_weight_hash_across_dp_replicas_interval]
    if getattr(args, "do_valid", False):  # set where Megatron itself builds the datasets
        intervals.append(args.eval_interval)
    if args.save:
        intervals += [args.save_interval, args.non_persistent_save_interval]
    if args.adlr_autoresume:
        intervals.append(args.adlr_autoresume_interval)
    return not any(interval and done % interval == 0 for interval in intervals)
