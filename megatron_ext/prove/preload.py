"""What all ranks of all tests would do alike, for a tenth of a second each, done before forking."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import queue


def preload() -> None:
    """Import all modules of megatron_ext and hash its sources."""
    import megatron_ext
    from megatron_ext.integration.features import consistency

    for module in pkgutil.walk_packages(megatron_ext.__path__, "megatron_ext."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # another version of Megatron may lack its own
                importlib.import_module(module.name)
    consistency._sources()


def keep_writing_here() -> None:
    """Spare each rank that saves a helper process, which would import all of Megatron again.

    Megatron hands the writer's results on through a queue that such a process serves, even where
    it writes in the same process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
