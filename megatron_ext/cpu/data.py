"""Data loading: no page-locked memory."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import DataLoader


def install() -> None:
    """Make DataLoader ignore ``pin_memory``. Call once, from ``megatron_ext.cpu``.

    Megatron always asks for it. The pinning thread would look for an accelerator's current
    device, which raises on a CUDA build of torch without a driver.
    """
    loader_init = DataLoader.__init__

    @functools.wraps(loader_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        loader_init(self, *args, **kwargs)

    DataLoader.__init__ = init
