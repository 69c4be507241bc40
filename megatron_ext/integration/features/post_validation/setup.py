"""Optimizer post-validation: a rank's step, and the next iteration, do not wait for all ranks.

Stock reduces gradient norm and inf/nan flags over the whole pipeline before any rank may step, so
an iteration takes the makespan of its passes. Here a rank steps by what the ranks before it know,
begins the next iteration, and learns during its first forward passes whether that was right (ZB,
section 4; the order is the lowered schedule's, see ``schedule.lower``). All of it happens inside
``optimizer.step``: what that returns, and whatever Megatron does afterwards, is validated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ....runtime.channel import Channel
from ...arguments import MegatronArgs
from ...hooks import Hook
from ...rejections import Rejection
from .eager_step import EagerStep, StageGroups

if TYPE_CHECKING:
    from ...pipeline import ScheduledPipeline

logger = logging.getLogger(__name__)

# Iterations; gradients that had to be clipped once will soon be again.
PATIENCE = 10

_AHEAD = "the next iteration has begun when Megatron comes to it; drop it"
_HOOKED = "the first passes of an iteration run before Megatron prepares for them; drop it"
_STATE = "its state is not known to be restored exactly; drop it"

REJECTIONS = (
    Rejection(
        "--rerun-mode",
        "the rerun machinery agrees over all ranks at the end of every iteration, which is what "
        "post-validation does away with; add --rerun-mode disabled",
        off="disabled",
    ),
    Rejection(
        "--optimizer",
        "only the steps of adam and sgd are known to be restored exactly; use one of them",
        off=("adam", "sgd"),
    ),
    Rejection("--optimizer-cpu-offload", _STATE),
    Rejection("--use-precision-aware-optimizer", _STATE),
    Rejection("--optimizer-cuda-graph", "it is captured with Megatron's reductions in it; drop it"),
    Rejection("--use-layer-wise-distributed-optimizer", _STATE),
    Rejection("--fp8", "scaling factors change with every forward pass; drop it", off=None),
    Rejection("--fp4", "scaling factors change with every forward pass; drop it", off=None),
    Rejection("--num-distributed-optimizer-instances", _STATE, off=1),
    Rejection("--mtp-num-layers", "its gradients may be clipped by a norm of their own; drop it"),
    Rejection("--qk-clip", "it changes parameters behind the optimizer; drop it"),
    Rejection("--log-max-attention-logit", _AHEAD),
    Rejection("--save-activations-interval", _HOOKED, off=None),
    Rejection("--save-tokens-per-expert-interval", _HOOKED, off=None),
    Rejection("--save-dgrads-interval", _HOOKED, off=None),
    Rejection("--moe-routing-trace-path", _HOOKED, off=None),
    Rejection("--dsa-indexer-loss-coeff", "its loss would be logged too early; drop it"),
    Rejection(
        "--dataloader-type",
        "a loader of one's own may save how far it has been read; use single or cyclic",
        off=("single", "cyclic"),
    ),
)


class PostValidation:
    """Steps the optimizer ahead of validation, where the last steps say that it will be right.

    Args:
        patience: iterations in a row without clipping, inf or nan before a step is taken ahead.

    Attributes:
        ahead, undone: steps that were taken ahead, and how many of them had to be undone.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._plain = 0  # iterations in a row
        self._stepped = False
        self._groups: StageGroups | None = None
        self._pipeline: ScheduledPipeline | None = None
        self.ahead = self.undone = 0

    def attach(self, pipeline: ScheduledPipeline) -> None:
        """Say which pipeline's optimizer it is."""
        self._pipeline = pipeline

    def hooks(self) -> tuple[Hook, ...]:
        """What has to be hooked."""
        return (
            Hook(
                ("megatron.core.optimizer.optimizer:ChainedOptimizer.step",),
                self._with_validation,
                ("self",),
                "the optimizer would wait for all ranks",
            ),
            Hook(
                ("megatron.training.checkpointing:save_checkpoint",),
                self._after_dropping,
                ("iteration", "model", "optimizer"),
                "a checkpoint could hold random states of an iteration that has only begun",
            ),
            Hook(
                ("megatron.training.training:checkpoint_and_decide_exit",),
                self._before_exit,
                ("iteration", "model"),
                "a run could end with messages under way",
            ),
        )

    def _after_dropping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            assert self._pipeline is not None
            self._pipeline.drop_head()
            return original(*args, **kwargs)

        return save_checkpoint

    def _before_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
            assert self._pipeline is not None
            ends = original(*args, **kwargs)
            if ends:
                self._pipeline.drop_head()
            return ends

        return checkpoint_and_decide_exit

    def _with_validation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(optimizer: Any) -> tuple[bool, Any, Any]:
            if self._may_step_ahead(optimizer):
                return self._step_ahead(optimizer, original)
            result: tuple[bool, Any, Any] = original(optimizer)
            self._count(optimizer, result)
            return result

        return step

    def _may_step_ahead(self, optimizer: Any) -> bool:
        from megatron.training import get_args

        assert self._pipeline is not None
        if self._groups is None and self._pipeline.can_run_head:
            # Collective over the job, so before anything that only some ranks do.
            group = self._pipeline.group
            self._groups = StageGroups(optimizer.chained_optimizers, group)
        return (
            self._stepped
            and self._plain >= self._patience
            and self._pipeline.can_run_head
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
        assert self._pipeline is not None and self._groups is not None
        attempt = Attempt(optimizer, self._groups, self._pipeline)
        self.ahead += 1
        self._pipeline.run_head(attempt)
        assert attempt.state is not None
        if attempt.step_of.is_plain(attempt.state):
            return attempt.step_of.accept(attempt.state)
        self._pipeline.drop_head()
        self.undone += 1
        result = attempt.step_of.redo(original, attempt.state)
        self._plain = 0
        self._count(optimizer, result)
        if dist.get_rank() == 0:
            logger.warning(
                "megatron_ext: post-validation undid step %d of %d that were taken ahead "
                "(gradient norm %s); the next %d wait for all ranks",
                self.undone,
                self.ahead,
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

    def __init__(self, optimizer: Any, groups: StageGroups, pipeline: ScheduledPipeline) -> None:
        device = pipeline.device
        self.channel = Channel(pipeline.group, (groups.size,), torch.float64, device)
        self.step_of = EagerStep(optimizer, groups, device)
        self.state: torch.Tensor | None = None
        self._pipeline = pipeline
        self._so_far = torch.empty(0)

    def statistics(self) -> None:
        """Before PREFIX."""
        self._so_far = self.step_of.statistics()

    def prefix(self, before: torch.Tensor | None) -> torch.Tensor:
        """PREFIX."""
        self._so_far = self.step_of.combine(self._so_far, before)
        return self._so_far

    def step(self) -> None:
        """STEP, unless the statistics so far say that it has to be another one, or none."""
        if self.step_of.is_plain(self._so_far):
            self.step_of.step()
        self._pipeline.start_param_sync()

    def validate(self, state: torch.Tensor | None) -> torch.Tensor:
        """VALIDATE."""
        self.state = self._so_far if state is None else state
        return self.state


def goes_on(args: MegatronArgs) -> bool:
    """True if after this iteration the next one follows at once, with nothing in between.

    Where that is known beforehand, nothing is begun that would be dropped. What cannot be known
    (a signal, the time limit) drops it.
    """
    done = args.curr_iteration + 1
    if done >= args.train_iters or done + 1 in (args.iterations_to_skip or ()):
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
