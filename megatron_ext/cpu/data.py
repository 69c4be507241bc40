"""Data loading without page-locked memory and without effect on dropout's random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from .devices import device_keyword
from .rebinding import around


def install() -> None:
    """Adapt DataLoader. Call once, from ``megatron_ext.cpu``."""
    # Megatron always asks to pin. The pinning thread would look for an accelerator's current
    # device, which raises on a CUDA build of torch without a driver.
    around(DataLoader, "__init__", device_keyword)
    around(dataloader._BaseDataLoaderIter, "__init__", _keep_random_state)


def _keep_random_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """An iterator's seed comes from the CPU's generator, from which dropout draws here, too: a
    restart, which makes its iterators after it has loaded the random state, would continue with
    other masks than an uninterrupted run."""
    state = torch.get_rng_state()
    try:
        original(*args, **kwargs)
    finally:
        torch.set_rng_state(state)
