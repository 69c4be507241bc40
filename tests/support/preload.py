"""What all ranks of all tests would do alike, for a tenth of a second each, done before forking."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import queue
from importlib import metadata

_LATE = ("megatron.core.models.mimo", "megatron.core.tokenizers.text.models")


def preload() -> None:
    """Import all modules of megatron_ext and what training imports late; hash our sources; look
    for torch's backends among the installed packages."""
    import megatron_ext

    ours = pkgutil.walk_packages(megatron_ext.__path__, "megatron_ext.")
    for name in (*_LATE, *(module.name for module in ours)):
        if not name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # another version of Megatron may lack its own
                importlib.import_module(name)
    metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
    metadata.entry_points(group="torch.distributed.backends")


def keep_writing_here() -> None:
    """Spare each rank that saves a helper process, which would import all of Megatron again.

    Megatron hands the writer's results on through a queue that such a process serves, even where
    it writes in the same process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
