"""Data loading without page-locked memory and without effect on dropout's random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from .rebinding import around


def install() -> None:
    """Adapt DataLoader. Call once, from ``megatron_ext.cpu``."""
    around(DataLoader, "__init__", _ignore_pin_memory)
    around(dataloader._BaseDataLoaderIter, "__init__", _keep_random_state)


def _ignore_pin_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Megatron always asks for it. The pinning thread would look for an accelerator's current
    device, which raises on a CUDA build of torch without a driver."""
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    original(*args, **kwargs)


def _keep_random_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """An iterator's seed comes from the CPU's generator, from which dropout draws here, too: a
    restart, which makes its iterators after it has loaded the random state, would continue with
    other masks than an uninterrupted run."""
    state = torch.get_rng_state()
    try:
        original(*args, **kwargs)
    finally:
        torch.set_rng_state(state)
