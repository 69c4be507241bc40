"""Switching us on: from the flags on a command line to all seams in force."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import vee, wgrad
from .errors import ConfigError
from .flags import add_arguments, options_without_schedule, wanted
from .seams import Seam, Seams
from .versions import megatron_version, require_supported

logger = logging.getLogger(__name__)

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


class Installation:
    """What is hooked into this process's Megatron, and how to undo it."""

    def __init__(self) -> None:
        version = megatron_version()
        require_supported(version)
        self.seams = Seams(version)
        self.pipeline: Any = None
        self._choice: Any = None

    def hook_arguments(self) -> None:
        """Add our flags to Megatron's parser and our checks to its validation.

        Raises:
            ConfigError: this Megatron lacks a seam.
        """
        self.seams.apply(
            [
                Seam(
                    ("megatron.training.arguments:add_megatron_arguments",),
                    self._with_flags,
                    ("parser",),
                    "our flags would be unknown",
                ),
                Seam(
                    ("megatron.training.arguments:validate_args",),
                    self._with_validation,
                    ("args",),
                    "our flags would not be checked",
                ),
            ]
        )

    def hook_schedule(self, args: Any, choice: Any, chunks: int) -> None:
        """Bring the chosen schedule into force for a run with the validated ``args``.

        Raises:
            ConfigError: this Megatron lacks a seam.
        """
        from ..runtime.wgrad import WeightGradStore
        from .checkpoint import Checkpoints, Layout
        from .forward_backward import ScheduledPipeline

        # Checkpoints carry the arguments, and a schedule file's name says nothing of its placement.
        args.pp_placement = "vee" if choice.vee else "loop"
        store = WeightGradStore()
        pp = args.pipeline_model_parallel_size
        self.pipeline = ScheduledPipeline(
            functools.partial(choice.plan, pp, chunks),
            choice.placement(pp, chunks),
            store,
            args.pp_trace,
            60.0 * args.distributed_timeout_minutes,
        )
        seams = [
            Seam(
                (f"{_SCHEDULES}:forward_backward_pipelining_{kind}_interleaving",),
                self._scheduled,
                ("forward_step_func", "data_iterator", "model", "num_microbatches", "forward_only"),
                "stock's schedule would run",
            )
            for kind in ("with", "without")
        ]
        if choice.splits_backward:
            seams += wgrad.seams(store)
        training = "megatron.training" in sys.modules
        if training:
            seams += Checkpoints(choice.name, Layout.of(args)).seams()
        if choice.vee:
            seams += vee.SEAMS
            if training:
                seams += vee.TRAINING_SEAMS
        self.seams.apply(seams)
        if args.rank != 0:
            return
        if choice.splits_backward and getattr(args, "transformer_impl", "") == "transformer_engine":
            logger.warning(
                "megatron_ext: Transformer Engine's layers compute weight gradients in B, so W "
                "passes are nearly empty and %s idles more than simulated; --transformer-impl "
                "local splits them",
                choice.name,
            )
        logger.warning(
            "megatron_ext: --pp-schedule %s on megatron-core %s\n%s",
            choice.name,
            self.seams.version,
            self.seams.report(),
        )

    def revert(self) -> None:
        """Give Megatron all its symbols back."""
        self.seams.revert()

    def _with_flags(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_megatron_arguments(parser: Any, *args: Any, **kwargs: Any) -> Any:
            return add_arguments(original(parser, *args, **kwargs))

        return add_megatron_arguments

    def _with_validation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
            from .checkpoint import choose_formats
            from .validate import Choice, after_megatron, before_megatron

            if getattr(args, "pp_schedule", None) is None:
                lost = options_without_schedule(args)
                if lost:
                    raise ConfigError(f"{lost[0]} needs --pp-schedule; add it or drop {lost[0]}")
                return original(args, *rest, **kwargs)
            first = self.pipeline is None
            choice = self._choice = self._choice or Choice(
                args.pp_schedule, args.pp_cost, args.pp_memory_cap, args.pp_group_size
            )
            notice = None
            if first:
                before_megatron(args, choice)
                notice = choose_formats(args, choice.name, choice.vee)
            result = original(args, *rest, **kwargs)
            chunks = after_megatron(args, choice)
            if first:
                self.hook_schedule(args, choice, chunks)
            if notice is not None and args.rank == 0:
                logger.warning(notice)
            return result

        return validate_args

    def _scheduled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        pipeline = self.pipeline

        @functools.wraps(original)
        def forward_backward(**kwargs: Any) -> Any:
            return pipeline(**kwargs)

        return forward_backward


def install(argv: Sequence[str] | None = None) -> Installation | None:
    """Hook our flags into Megatron if the command line uses any of them.

    Args:
        argv: the training script's arguments; default: this process's.

    Returns:
        The installation, or None if no flag of ours is there: then nothing has been touched, not
        even imported.

    Raises:
        ConfigError: no supported Megatron, or a seam is missing.
    """
    if not wanted(sys.argv[1:] if argv is None else argv):
        return None
    installation = Installation()
    installation.hook_arguments()
    return installation
