"""Whether code draws random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch


class Draws:
    """Sees whether random numbers are drawn from the default generators, from now on.

    Args:
        device: whose generator counts beside the host's.
        python: those of Python and numpy count, too.

    Attributes:
        others: gives the states of generators that take the default one's place for a while, which
            shows nothing of it afterwards: tensors or generators.
    """

    others: ClassVar[Callable[[], Iterable[Any]]] = tuple

    def __init__(self, device: torch.device, python: bool = False) -> None:
        self._device, self._python, self._any = device, python, False
        self._states = self._now()

    def found(self) -> bool:
        """Whether any were, but for ``allowed`` ones."""
        self._any |= self._states != self._now()
        return self._any

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """What is drawn here does not count."""
        self.found()
        yield
        self._states = self._now()

    def _now(self) -> list[Any]:
        # Bytes: comparing tensors would be an operation in the middle of what is watched.
        states = [torch.get_rng_state()]
        for other in Draws.others():
            states.append(other if isinstance(other, torch.Tensor) else other.get_state())
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        found: list[Any] = [state.numpy().tobytes() for state in states]
        if self._python:
            found.append(random.getstate())
            if "numpy" in sys.modules:
                _, numbers, *rest = sys.modules["numpy"].random.get_state()
                found += [numbers.tobytes(), *rest]
        return found
