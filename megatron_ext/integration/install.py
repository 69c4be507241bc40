"""Switching us on: from the flags on a command line to all seams in force."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .arguments import MegatronArgs
from .errors import ConfigError
from .features import consistency as agreement
from .features import recompute
from .features.offload import saved_parameters
from .features.split_backward import local as wgrad
from .features.v_placement import vee
from .flags import (
    add_arguments,
    defaults,
    given_to_megatron,
    lost_in_yaml,
    options_without_schedule,
    wanted,
)
from .flags import given as flags_given
from .hooks import Seam, Seams
from .report import Report
from .utils import full_batch
from .versions import megatron_version, require_supported

if TYPE_CHECKING:
    from ..runtime.wgrad import WeightGradStore
    from .features.moe.flags import MoERequest
    from .features.moe.layer import PipelinedMoE
    from .features.schedule.choose import Choice
    from .pipeline import ScheduledPipeline

logger = logging.getLogger(__name__)

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


class Installation:
    """What is hooked into this process's Megatron, and how to undo it.

    Args:
        config: values of our flags where the command line gives none, by attribute name.
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        version = megatron_version()
        require_supported(version)
        self.seams = Seams(version)
        self._defaults = defaults(config or {})
        self.pipeline: ScheduledPipeline | None = None
        self.moe: PipelinedMoE | None = None
        self._store: WeightGradStore | None = None
        self._choice: Choice | None = None
        self._compared = self._moe_chunks = False
        self._parser: argparse.ArgumentParser | None = None
        self._megatrons_flags: dict[str, str] = {}

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

    def hook_schedule(self, args: MegatronArgs, choice: Choice, chunks: int) -> None:
        """Bring the chosen schedule into force for a run with the validated ``args``.

        Raises:
            ConfigError: this Megatron lacks a seam.
        """
        from ..checkpoints.layout import Layout
        from ..runtime.wgrad import WeightGradStore
        from .features.checkpoint.hooks import Checkpoints
        from .features.log_line import LogLine
        from .features.offload.runtime import Offloading
        from .features.post_validation.setup import PostValidation
        from .features.profile import profiler_of
        from .pipeline import ScheduledPipeline

        # Checkpoints carry the arguments, and a schedule file's name says nothing of its placement.
        args.pp_placement = "vee" if choice.vee else "loop"
        store = self._store = WeightGradStore()
        pp = args.pipeline_model_parallel_size
        offloading = None
        if choice.offloads:
            file_link = None if choice.file is None else choice.file.link
            offloading = Offloading(choice.offload, file_link, args.pp_trace is not None)
        training = "megatron.training" in sys.modules
        validation = None
        if args.pp_post_validation is not None:
            validation = PostValidation(args.pp_post_validation)
        log_line = LogLine() if training else None
        self.pipeline = ScheduledPipeline(
            functools.partial(choice.plan, pp, chunks),
            choice.placement(pp, chunks),
            store,
            args.pp_trace,
            60.0 * args.distributed_timeout_minutes,
            offloading,
            profiler_of(args),
            None if log_line is None else log_line.meter,
            validated=validation is not None,
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
        if offloading is not None:
            # Behind those of W, so around them.
            seams += saved_parameters.seams(offloading.parameter)
        if args.pp_cheap_recompute:
            seams += recompute.seams(experts=not self._moe_chunks)
        if log_line is not None:
            seams += log_line.seams()
            seams += self.pipeline.seams()
            seams += Checkpoints(choice.name, Layout.of(args)).seams()
        if validation is not None:
            # Around those of checkpoints: first of all, nothing is left begun.
            validation.attach(self.pipeline)
            seams += validation.seams()
        if choice.vee:
            seams += vee.SEAMS
            if training:
                seams += vee.TRAINING_SEAMS
        self.seams.apply(seams)
        if args.rank != 0:
            return
        logger.warning(
            "megatron_ext: --pp-schedule %s on megatron-core %s%s\n%s",
            choice.name,
            self.seams.version,
            choice.about,
            self.seams.report(),
        )

    def hook_moe(self, request: MoERequest, args: MegatronArgs) -> None:
        """Bring MoE layers in chunks into force, with or without a schedule of ours.

        Raises:
            ConfigError: this Megatron lacks a seam.
        """
        from ..moe.settings import Settings
        from ..schedule.effects import peak_sets
        from .features.moe.choice import ChosenMoE, check_budget, stock_sets
        from .features.moe.layer import PipelinedMoE, Policy

        pp, choice = args.pipeline_model_parallel_size, self._choice

        def sets(chunks: int, microbatches: int) -> list[int]:
            if choice is None:
                return stock_sets(pp, chunks, microbatches)
            return peak_sets(choice.plan(pp, chunks, microbatches).ranks)

        policy: Policy = Settings()
        if not request.stock:
            if request.budget_bytes is not None:
                check_budget(args, request.space(), request.budget_bytes, sets)
            policy = ChosenMoE(request.space(), request.budget_bytes, sets, request.costs)
        self.moe = PipelinedMoE(policy, self._store)
        self.seams.apply(self.moe.seams())
        if args.rank == 0:
            logger.warning(
                "megatron_ext: %s on megatron-core %s", request.text(args), self.seams.version
            )

    def hook_agreement(self, args: MegatronArgs, chunks: int = 1) -> None:
        """Compare what this rank runs with over all ranks, once they are in a process group.

        Args:
            args: validated.
            chunks: model chunks a rank, under a schedule.

        Raises:
            ConfigError: there is a process group, and a rank differs; or the seam is missing.
        """
        import torch.distributed as dist

        if self._compared:
            return
        self._compared = True
        facts = functools.partial(self._facts, args, chunks)
        if dist.is_initialized():
            agreement.require_agreement(facts())
        else:
            self.seams.apply([agreement.seam(facts)])

    def _facts(self, args: MegatronArgs, chunks: int) -> dict[str, str]:
        given, choice, plan = flags_given(args), self._choice, None
        if choice is not None:
            per_step = args.micro_batch_size * args.data_parallel_size
            pp, batch = args.pipeline_model_parallel_size, full_batch(args)
            microbatches = (batch or per_step) // per_step
            link = None if choice.offload is None else choice.offload.link(pp)
            digest = choice.plan(pp, chunks, microbatches, link).fingerprint()
            plan = f"{digest} (pp={pp}, {chunks} chunks, {microbatches} microbatches)"
            if choice.file is not None:
                given["--pp-schedule"] = agreement.contents(given["--pp-schedule"])
        if "--moe-pipeline-costs" in given:
            given["--moe-pipeline-costs"] = agreement.contents(given["--moe-pipeline-costs"])
        if "--pp-profile" in given and "--pp-profile-steps" not in given:
            given["--pp-profile"] = agreement.contents(given["--pp-profile"])
        if "--pp-trace" in given:
            given["--pp-trace"] = "a directory"  # of each node's own, as it may be
        return agreement.facts(given, plan, self.seams.version, self._megatrons_flags)

    def revert(self) -> None:
        """Give Megatron all its symbols back."""
        # In reverse, and all of it, whatever one of them raises.
        with contextlib.ExitStack() as undo:
            undo.callback(self.seams.revert)
            if self.moe is not None:
                undo.callback(self.moe.release)
            if self.pipeline is not None:
                undo.callback(self.pipeline.release)

    def _with_flags(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_megatron_arguments(parser: Any, *args: Any, **kwargs: Any) -> Any:
            lost = lost_in_yaml(sys.argv[1:], self._defaults)
            if lost is not None:
                raise ConfigError(
                    f"{lost} would be lost, because --yaml-cfg takes the place of the whole "
                    f"command line; give Megatron's options as flags, or drop {lost}"
                )
            self._parser = parser = add_arguments(original(parser, *args, **kwargs))
            parser.set_defaults(**self._defaults)
            return parser

        return add_megatron_arguments

    def _with_validation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate_args(args: MegatronArgs, *rest: Any, **kwargs: Any) -> Any:
            from .features.checkpoint.hooks import choose_formats
            from .features.moe.flags import MoERequest
            from .features.offload.request import OffloadRequest
            from .features.schedule.choose import Choice
            from .validate import after_megatron, before_megatron

            if not hasattr(args, "pp_schedule"):
                raise ConfigError(
                    "Megatron's arguments do not come from a command line that megatron_ext has "
                    "added its flags to (parsed before megatron_ext.apply(), or from --yaml-cfg); "
                    "call it before Megatron parses, and give flags on the command line"
                )
            if not self._compared and self._parser is not None:
                self._megatrons_flags = given_to_megatron(args, self._parser)
            moe = MoERequest.of(args) if self.moe is None else None
            if moe is not None:
                moe.check(args)
                self._moe_chunks = not moe.stock
            if args.pp_schedule is None:
                lost = options_without_schedule(args)
                if lost:
                    raise ConfigError(f"{lost[0]} needs --pp-schedule; add it or drop {lost[0]}")
                result = original(args, *rest, **kwargs)
                if moe is not None:
                    self.hook_moe(moe, args)
                    self.hook_agreement(args)
                return result
            first = self.pipeline is None
            choice = self._choice = self._choice or Choice(
                args.pp_schedule,
                args.pp_cost,
                args.pp_memory_cap,
                args.pp_group_size,
                OffloadRequest.of(args),
                "makespan" if args.pp_post_validation is None else "span",
            )
            notice = None
            if first:
                before_megatron(args, choice)
                if args.pp_cheap_recompute:
                    recompute.ask_megatron(args)
                    if moe is not None:
                        moe.check(args)  # of what that has set
                notice = choose_formats(args, choice.name, choice.vee)
            result = original(args, *rest, **kwargs)
            chunks = after_megatron(args, choice)
            if first:
                self.hook_schedule(args, choice, chunks)
            if moe is not None:
                self.hook_moe(moe, args)
            self.hook_agreement(args, chunks)
            if notice is not None and args.rank == 0:
                logger.warning(notice)
            return result

        return validate_args

    def _scheduled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        pipeline = self.pipeline
        assert pipeline is not None  # hook_schedule has made it

        @functools.wraps(original)
        def forward_backward(**kwargs: Any) -> Any:
            return pipeline(**kwargs)

        return forward_backward


# What this process has in force, by whichever door.
_current: Installation | None = None


def install(argv: Sequence[str] | None = None) -> Installation | None:
    """The launcher's door: hook our flags into Megatron if the command line uses any of them.

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
    return _start(None)


def apply(config: Mapping[str, object] | None = None, *, exist_ok: bool = False) -> Report:
    """The door of scripts and of the patch series; see ``megatron_ext.apply``."""
    if _current is not None:
        if exist_ok and not config:
            return Report(_current.seams)
        raise ConfigError(
            f"megatron_ext is applied already, with {len(_current.seams.bindings)} seams; call "
            "megatron_ext.revert() first, or apply(exist_ok=True) without a configuration"
        )
    _require_unparsed()
    return Report(_start(config).seams)


def revert() -> None:
    """Give Megatron all its symbols back; nothing happens where none was taken."""
    global _current
    if _current is not None:
        _current.revert()
        _current = None


def _start(config: Mapping[str, object] | None) -> Installation:
    global _current
    installation = Installation(config)
    installation.hook_arguments()
    _current = installation
    return installation


def _require_unparsed() -> None:
    """Raise where Megatron has its arguments already: our flags would never be seen."""
    module = sys.modules.get("megatron.training.global_vars")
    if getattr(module, "_GLOBAL_ARGS", None) is not None:
        raise ConfigError(
            "megatron_ext.apply() came after Megatron had parsed its arguments, so its flags would "
            "never be read; call it before initialize_megatron() and parse_args()"
        )
