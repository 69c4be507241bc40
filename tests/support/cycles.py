"""Prelude of a training script: which objects of a step only garbage collection would free, as
where a run collects rarely (``--manual-gc``)."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any


def prepare(value: None, rank: int, folder: Path) -> None:
    """Write the types of those that hold what a device has into ``folder``, a line a step.

    See ``ScriptServer.run``.
    """
    import torch
    from megatron.training import training

    from megatron_ext.runtime.executor import Executor

    original = training.training_log

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [type(x).__name__ for x in gc.garbage if isinstance(x, torch.Tensor | Executor)]
        gc.set_debug(0)
        gc.garbage.clear()
        with (folder / f"cycles{rank}").open("a") as file:
            file.write(" ".join(["found", *found]) + "\n")
        return original(*args, **kwargs)

    training.training_log = counting
