"""Threads that use torch."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

_BEGIN = threading.Lock()
_Tasks = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class Worker:
    """A thread that does tasks in order: a stream without a GPU. It ends with this object.

    A daemon: the end of the process does not wait for ranks that have failed.
    """

    def __init__(self, name: str) -> None:
        tasks: _Tasks = queue.SimpleQueue()
        self._tasks = tasks
        self._thread = threading.Thread(target=_work, args=(tasks,), name=name, daemon=True)
        self._thread.start()
        self.end = weakref.finalize(self, tasks.put, None)

    def put(self, task: Callable[[], Any], result: Future[Any]) -> None:
        """Do ``task`` after all others; ``result`` gets what it returns, or its exception."""
        self._tasks.put((task, result))

    def close(self, timeout: float) -> None:
        """End the thread, and wait until it has done all tasks, so many seconds at most."""
        self.end()
        self._thread.join(timeout)


def _work(tasks: _Tasks) -> None:
    # In a process that was forked, the first call of a new thread makes a new pool of torch,
    # unguarded: of two at once, one finds none and fails.
    with _BEGIN:
        torch.get_num_threads()
    while (item := tasks.get()) is not None:
        task, result = item
        value = error = None
        try:
            value = task()
        except BaseException as caught:  # Reported where somebody waits.
            error = caught
        # Nothing may keep tensors alive while the thread waits for its next task.
        del item, task
        result.set_result(value) if error is None else result.set_exception(error)
        del result, value, error
