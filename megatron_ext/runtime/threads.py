"""What threads that use torch do first."""

from __future__ import annotations

import threading

import torch

_BEGIN = threading.Lock()


def begin_thread() -> None:
    """To call first in every thread of ours that uses torch.

    In a process that was forked, the first call of a new thread makes a new pool of torch,
    unguarded: of two at once, one finds none and fails.
    """
    with _BEGIN:
        torch.get_num_threads()
