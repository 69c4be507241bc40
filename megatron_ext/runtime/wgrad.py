"""The weight-gradient store: what makes B and W two passes instead of one.

While a B pass runs, every layer that can postpone its weight gradient puts that work here instead
of doing it; the W pass of the same (chunk, microbatch) runs it later (ZB, section 2).
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Task = Callable[[], None]


class _Work(NamedTuple):
    task: Task
    parameters: tuple[Any, ...]
    done: Callable[[Any], None] | None


class WeightGradStore:
    """Postponed weight-gradient work of one rank, keyed by (chunk, microbatch).

    Autograd runs CUDA backward nodes in its own threads, so "the pass that is running" is plain
    state of this object and not thread-local.
    """

    def __init__(self) -> None:
        self._work: dict[Hashable, list[_Work]] = {}
        self._parameters: dict[Hashable, set[int]] = {}
        self._collecting: list[_Work] | None = None
        self._held: set[int] = set()
        self._placeholders: set[int] = set()
        self._at_end: list[Task] = []
        self._parts = False
        self.fused_experts: Callable[[], bool] = bool
        """True where the experts of MoE layers compute their weight gradients in B (docs/11)."""

    def __len__(self) -> int:
        """Number of passes whose weight gradients are still owed."""
        return len(self._work)

    @property
    def collecting(self) -> bool:
        """True inside a B pass: layers should postpone their weight gradients."""
        return self._collecting is not None

    def holds(self, parameter: Any) -> bool:
        """True if the B pass that is running has postponed work for ``parameter``."""
        return self.collecting and id(parameter) in self._held

    def owes(self, parameter: Any) -> bool:
        """True if postponed work of an earlier B pass for ``parameter`` has not run yet."""
        return any(id(parameter) in owed for owed in self._parameters.values())

    def placeholder(self, parameter: Any) -> bool:
        """True if what the running B pass itself gives as gradient of ``parameter`` means nothing:
        the layer owes all of it, and returns a tensor only because autograd wants one."""
        return id(parameter) in self._placeholders

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Postpone weight gradients inside the block, to be run by ``run(key)``.

        Raises:
            RuntimeError: nested use, or ``key`` still has unfinished work.
        """
        if self._collecting is not None or key in self._work:
            raise RuntimeError(f"weight gradients of {key} are already being collected or owed")
        work: list[_Work] = []
        self._collecting = work
        try:
            yield
            self._work[key] = work
            self._parameters[key] = set(self._held)
        finally:
            at_end = self._at_end
            self._stop_collecting()
            for task in at_end:
                task()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block no B pass runs, as far as layers can see: they compute their weight
        gradients at once. For layers whose inputs do not stay where they are until W."""
        collecting, self._collecting = self._collecting, None
        try:
            yield
        finally:
            self._collecting = collecting

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Tasks put inside the block compute parts of gradients that stock computes in one piece:
        each part is summed into ``main_grad`` before the next is computed, not with it in the
        parameter's own precision."""
        before, self._parts = self._parts, True
        try:
            yield
        finally:
            self._parts = before

    def put(
        self,
        parameter: Any,
        task: Task,
        *,
        others: Sequence[Any] = (),
        done: Callable[[Any], None] | None = None,
        placeholders: Sequence[Any] = (),
    ) -> None:
        """Postpone ``task``, which computes and accumulates a gradient of ``parameter``.

        Args:
            parameter: whose gradient it is.
            task: the work.
            others: further parameters that the same task serves, or may serve.
            done: called with each of these parameters once, after the last task for it in the W
                pass: then the microbatch's gradient is complete.
            placeholders: those of them for which ``placeholder`` is true until the pass ends.

        Raises:
            RuntimeError: no B pass is running.
        """
        if self._collecting is None:
            raise RuntimeError("a weight gradient can be postponed only inside a B pass")
        if self._parts:
            task = functools.partial(_next_part, task, (parameter, *others))
        work = _Work(task, (parameter, *others), done)
        self._collecting.append(work)
        self._held.update(map(id, work.parameters))
        self._placeholders.update(map(id, placeholders))

    def at_end(self, task: Task) -> None:
        """Do ``task`` when the B pass that is running ends, however it ends."""
        self._at_end.append(task)

    def tensors(self, key: Hashable) -> list[torch.Tensor] | None:
        """What the postponed work of ``key`` keeps alive; None if a task does not say."""
        found: list[torch.Tensor] = []
        todo: list[Any] = [work.task for work in self._work.get(key, ())]
        while todo:
            one = todo.pop()
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif isinstance(one, functools.partial):
                todo += [*one.args, *one.keywords.values()]
            elif isinstance(one, list | tuple):
                todo += one
            elif isinstance(one, types.FunctionType) and one.__closure__:
                return None
        return found

    def run(self, key: Hashable) -> None:
        """Do the postponed work of ``key``, in the order in which B postponed it.

        Raises:
            RuntimeError: ``key`` has no postponed work: its B has not run, or its W ran already.
        """
        try:
            queue = self._work.pop(key)
        except KeyError:
            raise RuntimeError(f"no postponed weight gradients for {key}") from None
        del self._parameters[key]
        left = Counter(id(p) for work in queue for p in work.parameters)
        # Each task holds its layer's input and output gradient; drop it as soon as it has run.
        queue.reverse()
        while queue:
            task, parameters, done = queue.pop()
            task()
            del task
            for parameter in parameters:
                left[id(parameter)] -= 1
                if done is not None and not left[id(parameter)]:
                    done(parameter)

    def clear(self) -> None:
        """Forget everything: after an exception no stale work may reach the next iteration."""
        self._work.clear()
        self._parameters.clear()
        self._stop_collecting()

    def _stop_collecting(self) -> None:
        self._collecting = None
        self._held, self._placeholders, self._at_end = set(), set(), []


def _next_part(task: Task, parameters: Sequence[Any]) -> None:
    """Do ``task`` after what earlier parts left in ``grad`` has gone to a precise ``main_grad``."""
    for parameter in parameters:
        main, grad = getattr(parameter, "main_grad", None), parameter.grad
        if main is not None and grad is not None and main.dtype.itemsize >= 4:
            main.add_(grad)
            parameter.grad = None
    task()
