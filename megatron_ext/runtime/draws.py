"""Whether code draws random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


class Draws:
    """Sees whether random numbers are drawn from the default generators, from now on.

    Args:
        device: whose generator counts beside the host's.
        python: those of Python and numpy count, too.
    """

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
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        found: list[Any] = [state.numpy().tobytes() for state in states]
        if self._python:
            found.append(random.getstate())
            if "numpy" in sys.modules:
                _, numbers, *rest = sys.modules["numpy"].random.get_state()
                found += [numbers.tobytes(), *rest]
        return found
