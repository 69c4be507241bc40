"""Facts from a command line: our flags on Megatron's parser, and the run that they ask for."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._log import VERBOSE, verbose
from . import entry_point
from .entry_point import EntryPoint, revert
from .errors import ConfigError
from .feature import Run
from .flags import (
    add_arguments,
    defaults,
    lost_in_yaml,
    short_errors,
    wanted,
)
from .hooks import Report, declared, hooked
from .support import in_use, require_allowed
from .targets import ARGUMENTS, PIPELINES, VALIDATE
from .tested import untested

__all__ = ["Installation", "apply", "install", "revert"]

logger = logging.getLogger(__name__)


class Installation(EntryPoint):
    """What is hooked into a Megatron that parses a command line.

    Args:
        config: values of our flags where the command line gives none, by attribute name.

    Attributes:
        run: the run that they belong to; None before Megatron has validated its arguments.
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.run: Run | None = None
        self._defaults = defaults(config or {})
        self._lost = False  # our flags, in a --yaml-cfg
        self._closing: list[Callable[[], None]] = []

    def open(self) -> None:
        self.hooks.apply(declared(self))

    def forward_backward(self, **kwargs: Any) -> Any:
        assert self.run is not None and self.run.pipeline is not None
        return self.run.pipeline(**kwargs)

    def start(self, run: Run) -> None:
        """Start every feature that ``run``, whose arguments are validated, uses.

        Raises:
            ConfigError: a hook's target is missing, or this machine or its ranks cannot run it.
        """
        entry = [] if run.schedule is None else self.pipeline_hooks()
        parts = self.begin(run, self.features, entry)
        callbacks = [part for found in parts.values() for part in found]
        self._closing = [part.close for part in callbacks]
        if run.pipeline is not None:
            run.pipeline.callbacks = callbacks
        self.run = run
        if run.args.rank == 0 and run.schedule is not None:
            logger.info(
                "--pp-schedule %s on megatron-core %s, %d functions replaced%s%s",
                run.schedule.name,
                self.hooks.version,
                len(self.hooks.bindings),
                "" if verbose() else f" ({VERBOSE}=1 lists them)",
                run.schedule.about,
            )
            logger.debug("%s", self.hooks.report())
        for notice in run.notices if run.args.rank == 0 else ():
            logger.info(notice)

    def closing(self) -> Iterable[Callable[[], None]]:
        return self._closing

    @hooked(ARGUMENTS, "our flags would be unknown")
    def _with_flags(
        self, original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lost = lost_in_yaml(sys.argv[1:], self._defaults)
        if lost is not None:
            self._lost = True
            logger.warning("--yaml-cfg replaces the command line: %s has no effect", lost)
        parser = add_arguments(original(parser, *args, **kwargs))
        parser.set_defaults(**self._defaults)
        short_errors(parser)
        return parser

    @hooked(VALIDATE, "our flags would not be checked")
    def _with_validation(
        self, original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        if self._lost:
            return original(args, *rest, **kwargs)
        again, run = self.run is not None, self.run or self._run_of(args)
        run.args = args
        for feature in () if again else self.features:
            feature.check(run)
        require_allowed(run.args, in_use(run))
        run.notices += [] if again else untested(run)
        result = original(args, *rest, **kwargs)
        for feature in self.features:
            feature.check_derived(run)
        if not again:
            self.start(run)
        return result

    @hooked(
        (*PIPELINES.values(),),
        "a schedule that is asked for would have no effect",
        when=lambda self: bool(self._defaults),
    )
    def _requiring_arguments(self, original: Callable[..., Any], **kwargs: Any) -> Any:
        """Megatron's pipeline function, which must not run before its arguments are parsed."""
        if self.run is None:
            raise ConfigError(
                "megatron_ext.apply() needs a trainer that uses Megatron's argument parser; call "
                "megatron_ext.enable() instead, with the same names without pp_"
            )
        return original(**kwargs)

    def _run_of(self, args: Any) -> Run:
        """What ``args``, not yet validated by Megatron, ask for."""
        return self.checked(Run(args, self.hooks.version, "megatron.training" in sys.modules))


def install(argv: Sequence[str] | None = None) -> Installation | None:
    """The launcher's entry point: hook our flags into Megatron if the command line has any.

    Args:
        argv: the training script's arguments; default: this process's.

    Returns:
        The installation, or None if no flag of ours is there: then nothing has been touched, not
        even imported.

    Raises:
        ConfigError: no supported Megatron, or a hook's target is missing.
    """
    if not wanted(sys.argv[1:] if argv is None else argv):
        return None
    installation: Installation = entry_point.opened(Installation)
    return installation


def apply(config: Mapping[str, object] | None = None, *, exist_ok: bool = False) -> Report:
    """The entry point of scripts and of the patch series; see ``megatron_ext.apply``."""
    now = entry_point.current()
    if now is not None and exist_ok and not config:
        return Report(now.hooks)
    return Report(entry_point.opened(functools.partial(Installation, config)).hooks)
