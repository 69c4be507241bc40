"""The functions of ``megatron_ext`` for trainers that do not parse Megatron's arguments."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from typing import Any

from .._log import set_up, tear_down
from ..runtime.watchdog import close_process_watchdog
from .errors import ConfigError
from .flags import in_options
from .install import claim, drop, in_force, require_unclaimed, set_aside
from .library import Library
from .report import Report
from .takeover import require_not_held
from .undo import give_back


def enable(options: Mapping[str, object]) -> Report:
    """See ``megatron_ext.enable``."""
    set_up()
    with in_options():
        require_unclaimed("enable")
        try:
            library = Library(options)
            claim(library)
            require_not_held()
            library.start(entry=True)
        except BaseException:
            drop()
            raise
    atexit.register(library.warn_if_unused)
    return Report(library.hooks)


_functions: weakref.WeakSet[DropIn] = weakref.WeakSet()


class DropIn:
    """A forward-backward function for a loop of your own; nothing global stays replaced."""

    def __init__(self, options: Mapping[str, object]) -> None:
        set_up()
        with in_options(), set_aside():
            self._library = Library(options)
            if self._library.vee:
                raise ConfigError(
                    f"--pp-schedule {options['schedule']} places stages as a V, which changes how "
                    "Megatron builds the model; use megatron_ext.enable()"
                )
            self._library.start(entry=False)
            self._library.hooks.pause()
        _functions.add(self)
        weakref.finalize(self, _end, self._library).atexit = False

    def __call__(self, **kwargs: Any) -> Any:
        hooks = self._library.hooks
        with set_aside():  # of ``enable``, whose hooks are for other models
            hooks.resume()
            try:
                return self._library.forward_backward(**kwargs)
            finally:
                hooks.pause()
                close_process_watchdog()


def _end(library: Library) -> None:
    """A function is gone: end what runs for its models. Its messages end with their group."""
    with set_aside():
        library.revert()
    if not list(_functions) and not in_force():  # a set's length counts what is just going
        tear_down()
        give_back(groups=False)
