"""What a process has in force of ours, and the one life cycle of a run.

The launcher, a patched script, ``apply``, ``enable`` and a drop-in function differ in where a run's
facts come from, and when: a command line (``install.py``), or a model (``library.py``). Features
check them as soon as they are there, then they start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._log import set_up, tear_down
from .callbacks import Callback
from .errors import ConfigError
from .feature import Feature, Run
from .features import FEATURES
from .features.schedule.pipeline import pipeline_of, prepare
from .flags import require_rules
from .hooks import Hook, Hooks
from .takeover import entry_hooks
from .undo import give_back
from .versions import megatron_version, require_supported


class EntryPoint:
    """What is hooked into this process's Megatron, and how to undo it.

    Raises:
        ConfigError: no supported Megatron.
    """

    def __init__(self) -> None:
        version = megatron_version()
        require_supported(version)
        self.hooks = Hooks(version)
        self.features: list[Feature] = [feature() for feature in FEATURES]
        self._bound: set[type[Feature]] = set()  # whose hooks are

    def open(self) -> None:
        """Put in force what needs no more facts than there are.

        Raises:
            ConfigError: a hook does not fit this Megatron, or would have no effect.
        """
        raise NotImplementedError

    def forward_backward(self, **kwargs: Any) -> Any:
        """One call of the forward-backward function."""
        raise NotImplementedError

    def checked(self, run: Run) -> Run:
        """``run``, of which our flags are known, with what they ask for.

        Raises:
            ConfigError: they cannot work together.
        """
        require_rules(run.args, run.library)
        if run.args.pp_schedule is not None:
            prepare(run)
        for feature in self.features:
            feature.check_flags(run)
        return run

    def pipeline_hooks(self) -> list[Hook]:
        """Those that let Megatron's own functions lead to ``forward_backward``."""
        return entry_hooks(self.forward_backward, lambda: bool(self.hooks.bindings))

    def begin(
        self, run: Run, features: Iterable[Feature], hooks: Sequence[Hook] = ()
    ) -> dict[Feature, Sequence[Callback]]:
        """Start ``features`` for ``run``; bind ``hooks`` and theirs, once for all runs.

        A run whose pipeline is known has its forward-backward function then.

        Raises:
            ConfigError: a hook's target is missing, or this machine or its ranks cannot run it.
        """
        if run.schedule is not None or run.models:
            pipeline_of(run)
        started: dict[Feature, Sequence[Callback]] = {}
        new, bound = [*hooks], set(self._bound)
        with contextlib.ExitStack() as failed:
            for feature in features:
                parts = started[feature] = feature.start(run)
                for part in parts:
                    failed.callback(part.close)
                if parts and type(feature) not in bound:
                    bound.add(type(feature))
                    new += (hook for part in parts for hook in part.hooks())
            self.hooks.apply(new)
            failed.pop_all()
        self._bound = bound
        return started

    def revert(self) -> None:
        """Restore all symbols of Megatron; what was started ends, last first."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.hooks.revert)
            for close in self.closing():
                undo.callback(close)

    def closing(self) -> Iterable[Callable[[], None]]:
        """What ends that which was started, in the order in which it was."""
        raise NotImplementedError


_current: EntryPoint | None = None


def current() -> EntryPoint | None:
    """What this process has in force."""
    return _current


def opened(make: Callable[[], EntryPoint], entry: str = "apply") -> Any:
    """Let what ``make`` gives be what this process has in force.

    Args:
        make: gives it before anything of Megatron's is replaced; its ``open`` does that.
        entry: the function of ``megatron_ext`` that was called.

    Raises:
        ConfigError: something is already; or it cannot be put in force, and nothing is.
    """
    global _current
    if _current is not None:
        raise ConfigError(
            f"megatron_ext is applied already, with {len(_current.hooks.bindings)} hooks; "
            "call megatron_ext.revert() first"
            + (", or apply(exist_ok=True) without a configuration" * (entry == "apply"))
        )
    set_up()
    try:
        _current = make()
        _current.open()
    except BaseException:
        drop()
        raise
    return _current


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


def revert() -> None:
    """Restore all symbols of Megatron; nothing happens where none was taken."""
    if _current is not None:
        drop()


def drop() -> None:
    """``revert``, also where taking them has failed halfway."""
    global _current
    with contextlib.ExitStack() as stack:
        stack.callback(tear_down)
        stack.callback(give_back)
        applied, _current = _current, None
        if applied is not None:
            applied.revert()
