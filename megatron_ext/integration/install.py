"""Installation: from the flags on a command line to all hooks in force."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .._log import VERBOSE, set_up, tear_down, verbose
from .callbacks import Callback
from .errors import ConfigError
from .feature import Run
from .features import FEATURES
from .flags import (
    add_arguments,
    defaults,
    given_to_megatron,
    lost_in_yaml,
    require_rules,
    short_errors,
    wanted,
)
from .hooks import Hook, Hooks, around
from .report import Report
from .targets import ARGUMENTS, PIPELINES, VALIDATE
from .versions import megatron_version, require_supported

logger = logging.getLogger(__name__)


class Installation:
    """What is hooked into this process's Megatron, and how to undo it.

    Args:
        config: values of our flags where the command line gives none, by attribute name.

    Attributes:
        run: the run that they belong to; None before Megatron has validated its arguments.
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        version = megatron_version()
        require_supported(version)
        self.hooks = Hooks(version)
        self.run: Run | None = None
        self._defaults = defaults(config or {})
        self._parser: argparse.ArgumentParser | None = None
        self._callbacks: list[Callback] = []

    def hook_arguments(self) -> None:
        """Add our flags to Megatron's parser and our checks to its validation.

        Raises:
            ConfigError: this Megatron lacks a hook's target.
        """
        self.hooks.apply(
            [
                Hook(ARGUMENTS, around(self._with_flags), "our flags would be unknown"),
                Hook(VALIDATE, around(self._with_validation), "our flags would not be checked"),
                *(
                    Hook(
                        target,
                        around(self._requiring_arguments),
                        "a schedule that is asked for would have no effect",
                    )
                    for target in PIPELINES.values()
                    if self._defaults
                ),
            ]
        )

    def start(self, run: Run) -> None:
        """Start every feature that ``run``, whose arguments are validated, uses.

        Raises:
            ConfigError: a hook's target is missing, or this machine or its ranks cannot run it.
        """
        if run.schedule is not None:
            from .features.schedule.pipeline import pipeline_of

            pipeline_of(run)
        try:
            for feature in FEATURES:
                self._callbacks += feature.start(run)
            self.hooks.apply([hook for part in self._callbacks for hook in part.hooks()])
        except BaseException:
            self._close()
            raise
        if run.pipeline is not None:
            run.pipeline.callbacks = tuple(self._callbacks)
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

    def revert(self) -> None:
        """Restore all symbols of Megatron."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.hooks.revert)
            undo.callback(self._close)

    def _close(self) -> None:
        """Close all callbacks, last first, whatever one of them raises."""
        with contextlib.ExitStack() as stack:
            for part in self._callbacks:
                stack.callback(part.close)
        self._callbacks = []

    def _with_flags(
        self, original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lost = lost_in_yaml(sys.argv[1:], self._defaults)
        if lost is not None:
            raise ConfigError(
                f"{lost} would be lost, because --yaml-cfg takes the place of the whole "
                f"command line; give Megatron's options as flags, or drop {lost}"
            )
        self._parser = parser = add_arguments(original(parser, *args, **kwargs))
        parser.set_defaults(**self._defaults)
        short_errors(parser)
        return parser

    def _with_validation(
        self, original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        again, run = self.run is not None, self.run or self._run_of(args)
        run.args = args
        for feature in () if again else FEATURES:
            feature.check(run)
        with _validating(run):
            result = original(args, *rest, **kwargs)
        for feature in FEATURES:
            feature.check_derived(run)
        if not again:
            self.start(run)
        return result

    def _requiring_arguments(self, original: Callable[..., Any], **kwargs: Any) -> Any:
        """Megatron's pipeline function, which must not run before its arguments are parsed."""
        if self.run is None:
            raise ConfigError(
                f"megatron_ext.apply({self._defaults}) has had no effect: it adds flags to "
                "Megatron's argument parser, and this trainer has not used that; call "
                "megatron_ext.enable() instead, with the same names without pp_"
            )
        return original(**kwargs)

    def _run_of(self, args: Any) -> Run:
        """What ``args``, not yet validated by Megatron, ask for."""
        from .features.schedule.pipeline import prepare

        if not hasattr(args, "pp_schedule"):
            raise ConfigError(
                "Megatron's arguments do not come from a command line that megatron_ext has "
                "added its flags to (parsed before megatron_ext.apply(), or from --yaml-cfg); "
                "call it before Megatron parses, and give flags on the command line"
            )
        run = Run(args, self.hooks.version, "megatron.training" in sys.modules)
        if self._parser is not None:
            run.stock_flags = given_to_megatron(args, self._parser)
        require_rules(args)
        if args.pp_schedule is not None:
            prepare(run)
        return run


def _validating(run: Run) -> contextlib.ExitStack:
    """What the features put in force while Megatron validates its arguments."""
    with contextlib.ExitStack() as stack:
        for feature in FEATURES:
            stack.enter_context(feature.validating(run))
        return stack.pop_all()


class Applied(Protocol):
    """What a process has in force, however it was loaded."""

    hooks: Hooks

    def revert(self) -> None:
        """Restore all symbols of Megatron."""


_current: Applied | None = None


def require_unclaimed(entry: str = "apply") -> None:
    """Refuse to take what this process has in force already.

    Args:
        entry: the function of ``megatron_ext`` that was called.

    Raises:
        ConfigError: something is.
    """
    if _current is not None:
        raise ConfigError(
            f"megatron_ext is applied already, with {len(_current.hooks.bindings)} hooks; "
            "call megatron_ext.revert() first"
            + (", or apply(exist_ok=True) without a configuration" * (entry == "apply"))
        )


def claim(mine: Applied) -> None:
    """Let ``mine`` be what this process has in force."""
    global _current
    _current = mine


def in_force() -> bool:
    """This process has something of ours in force."""
    return _current is not None


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside, what this process has in force is not: Megatron has its symbols."""
    hooks = None if _current is None else _current.hooks
    if hooks is None:
        yield
        return
    hooks.pause()
    try:
        yield
    finally:
        hooks.resume()


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
    return _start(None)


def apply(config: Mapping[str, object] | None = None, *, exist_ok: bool = False) -> Report:
    """The entry point of scripts and of the patch series; see ``megatron_ext.apply``."""
    if _current is not None and exist_ok and not config:
        return Report(_current.hooks)
    _require_unparsed()
    return Report(_start(config).hooks)


def revert() -> None:
    """Restore all symbols of Megatron; nothing happens where none was taken."""
    if _current is not None:
        drop()


def drop() -> None:
    """``revert``, also where taking them has failed halfway."""
    global _current
    from .undo import give_back

    with contextlib.ExitStack() as stack:
        stack.callback(tear_down)
        stack.callback(give_back)
        applied, _current = _current, None
        if applied is not None:
            applied.revert()


def _start(config: Mapping[str, object] | None) -> Installation:
    require_unclaimed()
    set_up()
    try:
        installation = Installation(config)
        claim(installation)
        installation.hook_arguments()
    except BaseException:
        drop()
        raise
    return installation


def _require_unparsed() -> None:
    """Raise where Megatron has its arguments already: our flags would never be seen."""
    module = sys.modules.get("megatron.training.global_vars")
    if getattr(module, "_GLOBAL_ARGS", None) is not None:
        raise ConfigError(
            "megatron_ext.apply() came after Megatron had parsed its arguments, so its flags would "
            "never be read; call it before initialize_megatron() and parse_args()"
        )
