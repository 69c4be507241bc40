"""The weight-gradient store: what makes B and W two passes instead of one.

While a B pass runs, every layer that can postpone its weight gradient puts that work here instead
of doing it; the W pass of the same (chunk, microbatch) runs it later (ZB, section 2).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from .sharded import Sharded
from .weight_hooks import foreign_hooks

Task = Callable[..., None]
Rows = Sequence[Any]  # tensors, lists of them, Sharded


class _Part(NamedTuple):
    """Rows, and how often their tensors had been written to when B postponed the work on them."""

    rows: Rows
    versions: Sequence[int]


class _Work(NamedTuple):
    task: Task
    rows: list[_Part]  # what it is called with, joined
    parameters: tuple[Any, ...]
    done: Callable[[Any], None] | None
    sharded: Sequence[Sharded]


class WeightGradStore:
    """Postponed weight-gradient work of one rank, keyed by (chunk, microbatch).

    Autograd runs CUDA backward nodes in its own threads, so "the pass that is running" is plain
    state of this object and not thread-local.

    Attributes:
        running: that of this process's B pass in progress; hooks that outlive a store ask it.
        hooked: id of a parameter -> the hooks for whose sake no B pass postpones it.
    """

    running: ClassVar[WeightGradStore | None] = None

    def __init__(self) -> None:
        self.hooked: dict[int, tuple[str, ...]] = {}
        self._work: dict[Hashable, list[_Work]] = {}
        self._parameters: dict[Hashable, set[int]] = {}
        self._collecting: list[_Work] | None = None
        self._returned = False
        self._held, self._placeholders = set[int](), set[int]()
        self._at_end: list[Task] = []
        self._parts: dict[tuple[int, ...], _Work] | None = None
        self.fused_experts: Callable[[], bool] = bool
        """True where experts compute their weight gradients in B."""

    def __len__(self) -> int:
        """Number of passes whose weight gradients are still owed."""
        return len(self._work)

    @property
    def collecting(self) -> bool:
        """True inside a B pass: layers should postpone their weight gradients."""
        return self._collecting is not None

    def postpones(self, *parameters: Any) -> bool:
        """True if a layer should postpone the gradients of ``parameters``: inside a B pass, unless
        a hook of the user waits there for one of them."""
        if not self.collecting or self._returned:
            return self.collecting
        return not any(id(one) in self.hooked for one in parameters)

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
    def collect(self, key: Hashable, returned: bool = False) -> Iterator[None]:
        """Postpone weight gradients inside the block, to be run by ``run(key)``.

        Args:
            key: of the pass.
            returned: what ``run`` computes goes through autograd, and so to hooks.

        Raises:
            RuntimeError: nested use, or ``key`` still has unfinished work.
        """
        if self._collecting is not None or key in self._work:
            raise RuntimeError(f"weight gradients of {key} are already being collected or owed")
        work: list[_Work] = []
        self._collecting, self._returned, WeightGradStore.running = work, returned, self
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
        """Tasks put inside the block compute parts of gradients that stock computes in one piece.

        Parts of the same parameters become one task where their rows can be joined; later parts
        have earlier rows, as a backward pass goes from the last chunk to the first. Of others each
        is summed into ``main_grad`` before the next is computed, not with it in the parameter's
        own precision.
        """
        before, self._parts = self._parts, {}
        try:
            yield
        finally:
            self._parts = before

    def put(
        self,
        parameter: Any,
        task: Task,
        *,
        rows: Rows = (),
        others: Sequence[Any] = (),
        done: Callable[[Any], None] | None = None,
        sharded: Sequence[Sharded] = (),
        placeholders: Sequence[Any] = (),
    ) -> None:
        """Postpone ``task``, which computes and accumulates a gradient of ``parameter``.

        Args:
            parameter: whose gradient it is.
            task: the work, called with ``rows``.
            rows: that the gradient is a sum over: tensors or lists of them, one for each weight,
                with as many first dimensions.
            others: further parameters that the same task serves, or may serve.
            done: called with each of these parameters once, after the last task for it in the W
                pass: then the microbatch's gradient is complete.
            sharded: the task's tensors that are gathered first, one task ahead.
            placeholders: those of them for which ``placeholder`` is true until the pass ends.

        Raises:
            RuntimeError: no B pass is running.
        """
        if self._collecting is None:
            raise RuntimeError("a weight gradient can be postponed only inside a B pass")
        parameters, part = (parameter, *others), _Part(rows, _versions(rows))
        if self._parts is not None:
            key, joins = tuple(map(id, parameters)), _can_join(rows)
            if joins and key in self._parts:
                self._parts[key].rows.insert(0, part)
                return
            task = functools.partial(_next_part, task, parameters)
        work = _Work(task, [part], parameters, done, sharded)
        if self._parts is not None and joins:
            self._parts[key] = work
        self._collecting.append(work)
        self._held.update(map(id, work.parameters))
        self._placeholders.update(map(id, placeholders))

    def at_end(self, task: Task) -> None:
        """Do ``task`` when the B pass that is running ends, however it ends."""
        self._at_end.append(task)

    def run(self, key: Hashable, finish: bool = True) -> None:
        """Do the postponed work of ``key``, in the order in which B postponed it.

        Args:
            key: of a B pass.
            finish: call each parameter's ``done``.

        Raises:
            RuntimeError: ``key`` has no postponed work: its B has not run, or its W ran already; or
                a tensor that W needs was written in place behind its layer's B.
        """
        try:
            queue = self._work.pop(key)
        except KeyError:
            raise RuntimeError(f"no postponed weight gradients for {key}") from None
        del self._parameters[key]
        _do(queue, finish)

    def join(self, keys: Sequence[Hashable]) -> None:
        """Let ``run`` of the first of ``keys``, of B passes, do the work of all: ``_of_all``."""
        first, *others = keys
        self._work[first] = _of_all(self._work.pop(key) for key in reversed(keys))
        self._parameters[first].update(*map(self._parameters.pop, others))

    def clear(self) -> None:
        """Forget everything: after an exception no stale work may reach the next iteration."""
        self._work.clear()
        self._parameters.clear()
        self._stop_collecting()

    def _stop_collecting(self) -> None:
        self._collecting = None
        self._returned = False
        if WeightGradStore.running is self:
            WeightGradStore.running = None
        self._held, self._placeholders, self._at_end = set(), set(), []


def _do(queue: list[_Work], finish: bool) -> None:
    """Do the work of one W pass, see ``WeightGradStore.run``."""
    left = Counter(id(p) for work in queue for p in work.parameters)
    # Of several uses a pass the gradients are summed before that is added to what there was.
    before: dict[int, tuple[Any, Any]] = {}  # with the parameter
    # Each task holds its layer's input and output gradient; drop it as soon as it has run.
    queue.reverse()
    _gather_for(queue)
    try:
        while queue:
            task, rows, parameters, done, _ = queue.pop()
            _gather_for(queue)
            for parameter in parameters:
                if left[id(parameter)] > 1 and id(parameter) not in before:
                    before[id(parameter)] = parameter, parameter.grad
                    parameter.grad = None
            task(*_joined(rows))
            del task, rows
            for parameter in parameters:
                left[id(parameter)] -= 1
                if not left[id(parameter)] and id(parameter) in before:
                    _add_to(before.pop(id(parameter))[1], parameter)
                if finish and done is not None and not left[id(parameter)]:
                    done(parameter)
    finally:
        # After an exception: what there was may be a trainer's own, who tries again.
        for parameter, grad in before.values():
            parameter.grad = grad


def _gather_for(queue: Sequence[_Work]) -> None:
    """Start to gather what the last of ``queue`` needs."""
    if queue:
        for tensor in queue[-1].sharded:
            tensor.start()


def _add_to(before: Any, parameter: Any) -> None:
    """As autograd does: in place, since ``before`` may lie in a buffer of the trainer's."""
    if before is not None:
        new, parameter.grad = parameter.grad, before
        if new is not None:
            before.add_(new)


def _of_all(passes: Iterable[Sequence[_Work]]) -> list[_Work]:
    """What B passes have postponed, as the work of one.

    Work for the same parameters becomes one task where its rows can be joined; later passes have
    earlier rows. Of the rest each is added to ``main_grad`` by itself, in the order of the passes.
    """
    groups: dict[tuple[Any, ...], list[_Work]] = {}
    for queue in passes:
        uses = Counter[tuple[int, ...]]()
        for work in queue:
            of = tuple(map(id, work.parameters))
            uses[of] += 1
            groups.setdefault((of, uses[of]), []).append(work)
    return [work for group in groups.values() for work in _merged(group)]


def _merged(group: Sequence[_Work]) -> Sequence[_Work]:
    """Work for the same parameters, the last rows first: one task if rows can be joined."""
    *_, first = group
    if all(_can_join(part.rows) for work in group for part in work.rows):
        return [first._replace(rows=[part for work in reversed(group) for part in work.rows])]
    return [
        work._replace(task=functools.partial(_next_part, work.task, work.parameters))
        for work in group
    ]


def _can_join(rows: Rows) -> bool:
    every = _flat(rows)
    return bool(every) and all(type(one) is torch.Tensor for one in every)


def _flat(rows: Rows) -> list[Any]:
    return [x for one in rows for x in (one if isinstance(one, list | tuple) else [one])]


def _versions(rows: Rows) -> list[int]:
    shards = (one.shard if isinstance(one, Sharded) else one for one in _flat(rows))
    return [t._version if type(t) is torch.Tensor and not t.is_inference() else 0 for t in shards]


def _joined(parts: list[_Part]) -> Rows:
    """The rows of several parts behind each other, and of each weight's apart.

    Raises:
        RuntimeError: one was written in place after its layer's B, which stock allows: a function
            may reuse what it saved, or its gradient, when it is the last that needs it.
    """
    for rows, versions in parts:
        if versions != _versions(rows):
            raise RuntimeError(
                "the input or output gradient of a linear layer was written in place between its B "
                "and its W, so its weight gradient would be wrong: tensors of shapes "
                f"{[tuple(getattr(x, 'shape', ())) for x in _flat(rows)]}; the backward pass "
                "of a function beside it must not write into what it saved or was given, or the "
                "schedule must have no W passes"
            )
    if len(parts) == 1:
        return parts.pop().rows
    joined: list[Any] = []
    for column in zip(*(part.rows for part in parts)):
        if isinstance(column[0], list | tuple):
            joined.append([torch.cat(one) for one in zip(*column)])
        else:
            joined.append(torch.cat(column))
    parts.clear()
    return joined


def _next_part(task: Task, parameters: Sequence[Any], *rows: Any) -> None:
    """Do ``task`` after what earlier parts left in ``grad`` has gone to a precise ``main_grad``."""
    for parameter in parameters:
        main, grad = getattr(parameter, "main_grad", None), parameter.grad
        if main is None or grad is None or foreign_hooks(parameter):  # which see all of it
            continue
        if main.dtype.itemsize >= 4:
            main.add_(grad)
            parameter.grad = None
    task(*rows)
