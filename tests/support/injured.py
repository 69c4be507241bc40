"""Run in each rank before the training script: gives the rank that has ``INJURY`` an accident.

``INJURY`` is JSON: ``{"do": "kill", "at": "B", "iteration": 4}``. ``at`` is a kind of action, the
reduction of gradients (``finalize``), or a moment of saving: ``data`` (files are being written),
``metadata`` (all data is, ``.metadata`` is not), ``config`` (``metadata.json`` is not).

All ranks' watchdogs count from the accident on, so that a busy machine does not look like a hang.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.held_time import HeldTime


def _memory() -> None:
    import torch

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
    torch.empty(256 << 20, dtype=torch.uint8)


def _raise() -> None:
    raise ValueError("the model is on fire")


ACCIDENTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _raise,
    "memory": _memory,
    "hang": lambda: time.sleep(3600),
}


def _before(owner: Any, name: str, accident: Callable[[], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def injured(*args: Any, **kwargs: Any) -> Any:
        accident()
        return original(*args, **kwargs)

    setattr(owner, name, injured)


def _injure(injury: dict[str, Any]) -> None:
    from megatron_ext.integration import pipeline
    from megatron_ext.runtime.executor import Executor
    from megatron_ext.runtime.watchdog import Watchdog

    state = {"iteration": 0, "done": False}
    at = injury["at"]

    def count() -> None:
        state["iteration"] += 1

    def happen() -> None:
        if state["iteration"] >= injury["iteration"] and not state["done"]:
            state["done"] = True
            Path(os.environ["ACCIDENT"]).touch()
            ACCIDENTS[injury["do"]]()

    _before(Executor, "run", count)
    if at == "finalize":
        _before(pipeline, "_finalize", happen)
    else:
        original = Watchdog.at

        def injured(self: Any, action: Any, *args: Any) -> None:
            original(self, action, *args)
            if action.op.value == at:
                happen()

        Watchdog.at = injured  # type: ignore[method-assign]


HeldTime(Path(os.environ["ACCIDENT"])).install()
if "INJURY" in os.environ:
    _injure(json.loads(os.environ["INJURY"]))
