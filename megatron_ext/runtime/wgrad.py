"""The weight-gradient store: what makes B and W two passes instead of one.

While a B pass runs, every layer that can postpone its weight gradient puts that work here instead
of doing it; the W pass of the same (chunk, microbatch) runs it later (ZB, section 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

Task = Callable[[], None]


class WeightGradStore:
    """Postponed weight-gradient work of one rank, keyed by (chunk, microbatch).

    Autograd runs CUDA backward nodes in its own threads, so "the pass that is running" is plain
    state of this object and not thread-local.
    """

    def __init__(self) -> None:
        self._tasks: dict[Hashable, list[Task]] = {}
        self._collecting: list[Task] | None = None
        self._held: Counter[int] = Counter()

    def __len__(self) -> int:
        """Number of passes whose weight gradients are still owed."""
        return len(self._tasks)

    @property
    def collecting(self) -> bool:
        """True inside a B pass: layers should postpone their weight gradients."""
        return self._collecting is not None

    def holds(self, parameter: Any) -> bool:
        """True if the B pass that is running has postponed work for ``parameter``."""
        return self.collecting and self._held[id(parameter)] > 0

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Postpone weight gradients inside the block, to be run by ``run(key)``.

        Raises:
            RuntimeError: nested use, or ``key`` still has unfinished work.
        """
        if self._collecting is not None or key in self._tasks:
            raise RuntimeError(f"weight gradients of {key} are already being collected or owed")
        tasks: list[Task] = []
        self._collecting = tasks
        try:
            yield
            self._tasks[key] = tasks
        finally:
            self._collecting = None
            self._held.clear()

    def put(self, parameter: Any, task: Task) -> None:
        """Postpone ``task``, which computes and accumulates a gradient of ``parameter``.

        Raises:
            RuntimeError: no B pass is running.
        """
        if self._collecting is None:
            raise RuntimeError("a weight gradient can be postponed only inside a B pass")
        self._collecting.append(task)
        self._held[id(parameter)] += 1

    def run(self, key: Hashable) -> None:
        """Do the postponed work of ``key``, in the order in which B postponed it.

        Raises:
            RuntimeError: ``key`` has no postponed work: its B has not run, or its W ran already.
        """
        try:
            tasks = self._tasks.pop(key)
        except KeyError:
            raise RuntimeError(f"no postponed weight gradients for {key}") from None
        # Each task holds its layer's input and output gradient; drop it as soon as it has run.
        tasks.reverse()
        while tasks:
            tasks.pop()()

    def clear(self) -> None:
        """Forget everything: after an exception no stale work may reach the next iteration."""
        self._tasks.clear()
        self._collecting = None
        self._held.clear()
