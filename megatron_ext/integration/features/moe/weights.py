"""Weight gradients of experts in chunks: one product over the rows of all chunks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from ....runtime.wgrad import WeightGradStore
from ...gradients import accumulate, finish, take
from ...hooks import Hook
from ...split_local import linear_hook
from ...split_te import SplitStore, attach


class ExpertGradients:
    """What ``Region`` asks of a weight-gradient store.

    Where a B pass of the schedule runs, its W pass computes them. Otherwise they are computed at
    the end of the layer's backward pass, and go through autograd as any layer's.

    Args:
        store: of a schedule with W passes, whose hooks are in place; None: there is none.
        fused: True where each chunk computes them, and nothing is taken.
    """

    def __init__(self, store: WeightGradStore | None, fused: Callable[[], bool]) -> None:
        self._own = store is None
        self._store = WeightGradStore() if store is None else store
        self._store.fused_experts = fused
        self.suspended = self._store.suspended
        self._waits = False
        self._attached: list[SplitStore] = []

    def hooks(self) -> tuple[Hook, ...]:
        """What lets Megatron's own linear layers leave weight gradients to the store."""
        return (linear_hook(self._store),) if self._own else ()

    def attach(self, experts: torch.nn.Module) -> None:
        """The same for modules of Transformer Engine."""
        self._attached += attach(experts, self._store)

    def close(self) -> None:
        """Undo ``attach``."""
        while self._attached:
            self._attached.pop().detach()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """The backward pass of one call, until the last chunk's input gradient has been issued."""
        self._waits = self._store.collecting
        with contextlib.ExitStack() as stack:
            if not self._waits:
                stack.enter_context(self._store.collect(self, returned=True))
            stack.enter_context(self._store.in_parts())
            yield

    def takes(self, parameter: torch.nn.Parameter, grad: torch.Tensor | None) -> bool:
        """As of ``GradientStore``."""
        if grad is None or self._store.placeholder(parameter):
            return self._store.holds(parameter)
        if not self._waits or not self._store.holds(parameter):
            return False
        # B has part of it, such as a bias that is added outside the layer that postpones. It waits
        # for W, so that the order of summands does not depend on the schedule.
        with self._store.in_parts():
            # Autograd may give one tensor for several parameters.
            task = functools.partial(accumulate, parameter, grad.clone())
            self._store.put(parameter, task, done=finish)
        return True

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> Sequence[torch.Tensor | None]:
        """As of ``GradientStore``."""
        if self._waits:
            return [None] * len(parameters)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            self._store.run(self, finish=False)
            return [take(parameter) for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, before):
                parameter.grad = grad
