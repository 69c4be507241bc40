"""Undoing the side effects of a begun iteration.

Under post-validation the first forward passes of an iteration run before it is certain that their
parameters are right, and before Megatron has dealt with the iteration before. If they are dropped,
they are run again later, on the same data and with the same random numbers; if they stay, what they
have put into Megatron's metrics belongs to the next log line and not to this one.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...targets import ROUTER_METRICS, SEQLEN_COUNT
from ...utils import unwrapped


class Replay:
    """A data iterator that can give again what it gave since ``record``.

    Args:
        source: Megatron's iterator of one model chunk.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._again: deque[Any] = deque()
        self._given: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._again.popleft() if self._again else next(self.source)
        if self._given is not None:
            # A shallow copy: keys that a script takes out of a batch must stay in ours.
            self._given.append(copy.copy(batch))
        return batch

    def record(self) -> None:
        """Keep what is given from now on."""
        self._given = []

    def keep(self) -> None:
        """What was given has been used; it will not be asked for again."""
        self._given = None

    def rewind(self) -> None:
        """Give again what was given since ``record``."""
        self._again.extendleft(reversed(self._given or ()))
        self._given = None


class Rewind:
    """Everything outside the optimizer and the pipeline that forward passes change.

    That is: the random number generators, the models' buffers (router statistics), the data
    iterators, and what Megatron sums up for its log line: metrics and tokens of packed documents.

    Args:
        models: of this rank; ``Rewind`` is made before their passes.
        iterators: the ``Replay`` (or None) of each.
    """

    def __init__(self, models: Sequence[torch.nn.Module], iterators: Sequence[Any]) -> None:
        self._random = _random_states()
        self._buffers = [
            (buffer, buffer.detach().clone())
            for model in models
            for buffer in unwrapped(model).buffers()
        ]
        self._replays = [it for it in iterators if isinstance(it, Replay)]
        for replay in self._replays:
            replay.record()
        self._metrics = _metrics()
        self._before = [dict(metrics) for metrics in self._metrics]
        self._head: list[dict[str, Any]] = []
        for metrics in self._metrics:
            metrics.clear()
        self._tokens_before = _take_tokens()
        self._tokens: torch.Tensor | None = None

    def suspend(self) -> None:
        """The passes have run; Megatron deals with the iteration before them."""
        self._head = [dict(metrics) for metrics in self._metrics]
        for metrics, before in zip(self._metrics, self._before):
            metrics.clear()
            metrics.update(before)
        self._tokens = _take_tokens()
        _add_tokens(self._tokens_before)

    def resume(self) -> None:
        """Resume the iteration after its passes."""
        for replay in self._replays:
            replay.keep()
        for metrics, head in zip(self._metrics, self._head):
            for name, entry in head.items():
                if name not in metrics:
                    metrics[name] = entry
                elif isinstance(entry, dict):
                    metrics[name]["values"] += entry["values"]
                else:
                    metrics[name].values += entry.values
        _add_tokens(self._tokens)

    def undo(self) -> None:
        """As if the passes had never run."""
        _set_random_states(self._random)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for replay in self._replays:
            replay.rewind()


def _metrics() -> list[dict[str, Any]]:
    """The dictionaries in which Megatron sums up losses of MoE layers until it logs them."""
    tracker = ROUTER_METRICS.found()
    return [getattr(tracker, "_metrics", tracker)]


def _take_tokens() -> torch.Tensor | None:
    """What Megatron has counted of packed documents since it last reduced that over all ranks, in
    which a rank takes part if it has counted any; it has counted none then."""
    training = _counting()
    if not getattr(training, "_seqlen_stats_active", False):
        return None
    counted: torch.Tensor = training._seqlen_stats_in_iteration
    found = counted.clone()
    counted.zero_()
    training._seqlen_stats_active = False
    return found


def _add_tokens(counted: torch.Tensor | None) -> None:
    if counted is not None:
        training = _counting()
        training._seqlen_stats_in_iteration += counted
        training._seqlen_stats_active = True


def _counting() -> Any:
    """Megatron's module that counts them; None before core_v0.18."""
    found = SEQLEN_COUNT.resolve()
    return None if found is None else found[1]


def _random_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numpy = sys.modules.get("numpy")
    states = {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
    }
    tracked = get_cuda_rng_tracker().get_states()
    states["tracker"] = {
        name: state.clone() if isinstance(state, torch.Tensor) else state.clone_state()
        for name, state in tracked.items()
    }
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
