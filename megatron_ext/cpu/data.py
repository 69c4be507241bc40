"""Data loading without page-locked memory and without effect on dropout's random numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader


def install() -> None:
    """Adapt DataLoader. Call once, from ``megatron_ext.cpu``."""
    _ignore_pin_memory()
    _keep_random_state()


def _ignore_pin_memory() -> None:
    """Megatron always asks for it. The pinning thread would look for an accelerator's current
    device, which raises on a CUDA build of torch without a driver."""
    loader: Any = DataLoader
    loader_init = loader.__init__

    @functools.wraps(loader_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        loader_init(self, *args, **kwargs)

    loader.__init__ = init


def _keep_random_state() -> None:
    """An iterator's seed comes from the CPU's generator, from which dropout draws here, too: a
    restart, which makes its iterators after it has loaded the random state, would continue with
    other masks than an uninterrupted run."""
    base: Any = dataloader._BaseDataLoaderIter
    iterator_init = base.__init__

    @functools.wraps(iterator_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        try:
            iterator_init(self, *args, **kwargs)
        finally:
            torch.set_rng_state(state)

    base.__init__ = init
