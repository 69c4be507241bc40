"""What a process has that a run of ours may change. Import it before anything of ours runs."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_ext.runtime import communicators, watchdog
from tests.megatron.cases.hook_cases import megatron_symbols

_at_exit: list[str] = []  # functions of ours that are called at exit
_register, _unregister = atexit.register, atexit.unregister


def _noted_register(function: Any, *args: Any, **kwargs: Any) -> Any:
    if str(getattr(function, "__module__", "")).startswith("megatron_ext"):
        _at_exit.append(function.__qualname__)
    return _register(function, *args, **kwargs)


def _noted_unregister(function: Any) -> None:
    _at_exit[:] = [name for name in _at_exit if name != getattr(function, "__qualname__", "")]
    _unregister(function)


atexit.register, atexit.unregister = _noted_register, _noted_unregister


def is_code(value: Any) -> bool:
    """Not the data of Megatron's modules, which change by themselves."""
    return callable(value) or isinstance(value, (classmethod, property))


def process() -> dict[str, Any]:
    """All that a run of ours may change in a process, but memory."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    log = logging.getLogger("megatron_ext")
    torchs = {
        f"{name}:{key}": id(value)
        for name in ("torch.distributed", "torch.distributed.distributed_c10d", "signal", "os")
        for key, value in vars(sys.modules[name]).items()
        if is_code(value)
    }
    return {
        "symbols": megatron_symbols(is_code) | torchs,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": {one: repr(signal.getsignal(one)) for one in signal.valid_signals()},
        "wakeup": wakeup,
        "environment": dict(os.environ),
        "log": (list(log.handlers), log.level, log.propagate),
        "exit": sorted(_at_exit),
        "communicators": [len(kept) for kept in communicators.PerGroup.every],
    }


_METHODS = (staticmethod, classmethod)


def holders() -> list[str]:
    """Globals and class attributes of other modules that are ours."""
    found = []
    for name, module in list(sys.modules.items()):
        if (
            name.split(".")[0] in ("megatron_ext", "tests", "__main__", "__mp_main__")
            or module is None
        ):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            inner = vars(value).items() if issubclass(type(value), type) else ()
            for label, one in ((key, value), *((f"{key}.{k}", v) for k, v in inner)):
                one = one.__func__ if type(one) in _METHODS else one
                of = one.__code__.co_filename if type(one) is types.FunctionType else ""
                module_of = str(one.__module__) if issubclass(type(one), type) else ""
                if "/megatron_ext/integration/" in of or module_of.startswith("megatron_ext.integ"):
                    found.append(f"{name}:{label}")
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not as before; modules may have been loaded meanwhile."""
    found = [
        f"symbol {key}"
        for key, value in before["symbols"].items()
        if after["symbols"].get(key) != value
    ]
    for name in before.keys() - {"symbols"}:
        if before[name] != after[name]:
            found.append(f"{name}: {before[name]} -> {after[name]}")
    return found


_WAITS = (
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast_object_list",
    "new_group",
    "scatter",
)


@contextlib.contextmanager
def noted_waits(seen: list[tuple[str, int, bool]]) -> Iterator[None]:
    """Note every wait for other ranks that our integration asks for: how many ranks, watched."""
    with contextlib.ExitStack() as stack:
        for name in _WAITS:
            original = getattr(dist, name)

            def noting(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                frame = sys._getframe(1)
                if "/megatron_ext/integration/" in frame.f_code.co_filename:
                    bound = [
                        a for a in (*args, *kwargs.values()) if isinstance(a, dist.ProcessGroup)
                    ]
                    size = bound[0].size() if bound else dist.get_world_size()
                    seen.append((original.__name__, size, watchdog.process_watchdog()._armed))
                return original(*args, **kwargs)

            setattr(dist, name, noting)
            stack.callback(setattr, dist, name, original)
        yield
