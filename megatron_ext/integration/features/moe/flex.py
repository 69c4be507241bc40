"""Chunks outside of the fused kernels of Megatron's flex dispatcher: DeepEP's permute and send.

Megatron's own dispatcher carries each chunk; its kernels count, sort and send in one, so rows are
neither packed nor restored here, and autograd is Megatron's. A chunk's state lies in a copy of the
dispatcher. Dispatch and combine of chunks are issued on a stream of their own, in the order of
``LayerPlan.operations``, in backward in the reverse order: autograd runs what was issued last
first, each on the stream of its forward pass.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ....moe.exchange import chunk_rows
from ....moe.plan import LayerPlan, Step, Strategy


class FlexRegion:
    """What ``Region`` is for the other dispatchers.

    Args:
        layer: the ``MoELayer``, held weakly.
        streams: of the device that it runs on.
    """

    def __init__(self, layer: Any, experts: Callable[..., torch.Tensor], streams: Streams) -> None:
        self._layer: Callable[[], Any] = weakref.ref(layer)
        self._experts, self._streams = experts, streams

    def __call__(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        plan: LayerPlan,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Dispatch, compute and combine.

        Args:
            hidden: (tokens, width).
            probs: of each token for each expert, (tokens, experts).
            routing_map: which of them count, likewise, bool.
            plan: without a strategy that restores.
            meanwhile: issues more computation, beside the first messages.

        Raises:
            RuntimeError: fewer tokens than chunks, for which the kernels are not made, or a
                strategy that restores.
        """
        if plan.strategy is not Strategy.NONE:
            raise RuntimeError(
                f"chunks of the flex dispatcher keep everything, got {plan}; use "
                "--moe-memory-reuse none, or --moe-token-dispatcher-type alltoall"
            )
        sizes = chunk_rows(len(hidden), plan.chunks)
        if min(sizes) == 0:
            raise RuntimeError(
                f"{len(hidden)} tokens cannot be cut into {plan.chunks} chunks for the flex "
                "dispatcher; use fewer --moe-pipeline-chunks"
            )
        dispatcher = self._layer().token_dispatcher
        pieces = zip(hidden.split(sizes), probs.split(sizes), routing_map.split(sizes))
        chunks = [_Chunk(dispatcher, self._streams, *piece) for piece in pieces]
        ready = self._streams.now()
        outputs = []
        for step, i in plan.operations():
            if step is Step.DISPATCH:
                chunks[i].dispatch(ready)
            elif step is Step.COMPUTE:
                if i == 0 and meanwhile is not None:
                    meanwhile()
                chunks[i].compute(self._experts)
            elif step is Step.COLLECT:
                outputs.append(chunks[i].collect())
        return torch.cat(outputs)


class _Chunk:
    """The tokens of one chunk on their way, and the dispatcher's state for them."""

    def __init__(
        self,
        dispatcher: Any,
        streams: Streams,
        hidden: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
    ) -> None:
        # Shallow: groups, buffers and counters stay shared.
        self._dispatcher = copy.copy(dispatcher)
        self._dispatcher._comm_manager = copy.copy(dispatcher._comm_manager)
        self._streams, self._arrives = streams, None
        # Before any message leaves, so that none waits for the experts of an earlier chunk.
        self._rows, self._probs = self._dispatcher.dispatch_preprocess(hidden, routing_map, probs)

    def dispatch(self, ready: Any) -> None:
        """S: start sending; ``ready`` is when the tokens are."""
        with self._streams.communicating(ready):
            self._streams.keep(self._rows, self._probs, *self._state())
            self._rows, self._probs = self._dispatcher.token_dispatch(self._rows, self._probs)
            self._arrives = self._streams.now()

    def compute(self, experts: Callable[..., torch.Tensor]) -> None:
        """C, and R: start sending back."""
        self._streams.wait(self._arrives)
        self._streams.keep(self._rows, self._probs, *self._state())
        rows, counts, probs = self._dispatcher.dispatch_postprocess(self._rows, self._probs)
        rows = self._dispatcher.combine_preprocess(experts(rows, counts, probs))
        with self._streams.communicating(self._streams.now()):
            self._streams.keep(rows)
            self._rows = self._dispatcher.token_combine(rows)
            self._arrives = self._streams.now()

    def _state(self) -> Iterable[Any]:
        state: dict[str, Any] = vars(self._dispatcher._comm_manager)
        return state.values()

    def collect(self) -> torch.Tensor:
        """The chunk's tokens, with the sum of their experts."""
        self._streams.wait(self._arrives)
        self._streams.keep(self._rows)
        result: torch.Tensor = self._dispatcher.combine_postprocess(self._rows)
        return result


class Streams:
    """The stream that dispatch and combine are issued on; on a CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._communication: Any = torch.cuda.Stream(device, priority=-1) if cuda else None

    def now(self) -> Any:
        """When the current stream has done what it was given so far; None on a CPU."""
        if self._communication is None:
            return None
        return torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def communicating(self, after: Any) -> Iterator[None]:
        """Inside, work is given to that stream, which waits for ``after``."""
        if after is None:
            yield
            return
        self._communication.wait_event(after)
        with torch.cuda.stream(self._communication):
            yield

    def wait(self, event: Any) -> None:
        """Let the current stream wait for ``event``."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def keep(self, *used: Any) -> None:
        """Memory of what is ``used`` by the current stream stays until it has been."""
        for one in used:
            if isinstance(one, torch.Tensor) and one.is_cuda:
                one.record_stream(torch.cuda.current_stream())
