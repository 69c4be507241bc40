"""The functions of ``megatron_ext`` for trainers that do not parse Megatron's arguments."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from .._log import set_up, tear_down
from .errors import ConfigError
from .flags import in_options
from .install import claim
from .library import Library
from .report import Report
from .takeover import require_not_held


def enable(options: Mapping[str, object]) -> Report:
    """See ``megatron_ext.enable``."""
    set_up()
    with in_options():
        library = Library(options)
        claim(library, "enable")
        try:
            require_not_held()
            library.start(entry=True)
        except BaseException:
            library.revert()
            claim(None)
            tear_down()
            raise
    atexit.register(library.warn_if_unused)
    return Report(library.hooks)


class DropIn:
    """A forward-backward function for a loop of your own; nothing global stays replaced."""

    def __init__(self, options: Mapping[str, object]) -> None:
        set_up()
        with in_options():
            self._library = Library(options)
            if self._library.vee:
                raise ConfigError(
                    f"--pp-schedule {options['schedule']} places stages as a V, which changes how "
                    "Megatron builds the model; use megatron_ext.enable()"
                )
            self._library.start(entry=False)
        self._library.hooks.pause()

    def __call__(self, **kwargs: Any) -> Any:
        hooks = self._library.hooks
        hooks.resume()
        try:
            return self._library.forward_backward(**kwargs)
        finally:
            hooks.pause()
