"""Chunks of the flex dispatcher on two streams: a missing wait, or memory given back too early, is
seen in the numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.features.moe.flex import FlexRegion, Streams
from megatron_ext.moe.plan import LayerPlan
from tests.support.streams import COMPUTE, StreamDevice

COMMUNICATION = "communication"
TOKENS, WIDTH, EXPERTS = 24, 128, 4


class Emulated(Streams):
    """The same on the emulated device, without what is in ``skip``."""

    def __init__(self, device: StreamDevice, skip: str) -> None:
        self._device, self._skip = device, skip

    def now(self) -> Any:
        return self._device.record()

    @contextlib.contextmanager
    def communicating(self, after: Any) -> Iterator[None]:
        with self._device.on(COMMUNICATION):
            if self._skip != "after":
                self._device.wait(after)
            yield

    def wait(self, event: Any) -> None:
        if self._skip != "wait":
            self._device.wait(event)

    def keep(self, *used: Any) -> None:
        for one in used if self._skip != "keep" else ():
            if isinstance(one, torch.Tensor):
                self._device.record_use(one)


class Dispatcher:
    """Doubles what is sent and trebles what comes back; its state is of one chunk."""

    def __init__(self) -> None:
        self._comm_manager = SimpleNamespace(seen=None)

    def dispatch_preprocess(self, hidden: Any, routing_map: Any, probs: Any) -> Any:
        self._comm_manager.seen = hidden * routing_map.sum(1, keepdim=True)
        return hidden + 1, probs * 1

    def token_dispatch(self, hidden: Any, probs: Any) -> Any:
        self._comm_manager.seen = self._comm_manager.seen * 5
        return hidden * 2, probs * 1

    def dispatch_postprocess(self, hidden: Any, probs: Any) -> Any:
        return hidden + self._comm_manager.seen, None, probs * 1

    def combine_preprocess(self, hidden: Any) -> Any:
        return hidden * 1

    def token_combine(self, hidden: Any) -> Any:
        return hidden * 3

    def combine_postprocess(self, hidden: Any) -> Any:
        return hidden * 1


def _run(chunks: int, eager: tuple[str, ...], skip: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out of three calls, and what should."""
    generator = torch.Generator().manual_seed(1)
    hidden, probs, more = (
        torch.randn(TOKENS, width, generator=generator) for width in (WIDTH, EXPERTS, WIDTH)
    )
    routing_map = probs > 0
    device = StreamDevice(eager=eager)
    layer: Any = Dispatcher()
    layer.token_dispatcher = Dispatcher()

    def experts(rows: torch.Tensor, counts: Any, p: torch.Tensor) -> torch.Tensor:
        return rows * p.sum(1, keepdim=True)

    filled: list[torch.Tensor] = []
    with torch.no_grad():
        wanted = hidden
        for _ in range(3):
            seen = wanted * routing_map.sum(1, keepdim=True) * 5
            wanted = ((wanted + 1) * 2 + seen) * probs.sum(1, keepdim=True) * 3
        region = FlexRegion(layer, experts, Emulated(device, skip))
        with device:
            out = hidden
            for _ in range(3):
                plan = LayerPlan.of(chunks)
                out = region(out, probs, routing_map, plan, lambda: filled.append(more * 2))
            device.synchronize()
            out = out.clone()
            device.synchronize()
    assert len(filled) == 3
    return out, wanted


EAGER = [(), (COMPUTE,), (COMMUNICATION,)]


@pytest.mark.parametrize("eager", EAGER, ids=str)
@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_every_order_of_streams_gives_the_same(chunks: int, eager: tuple[str, ...]) -> None:
    out, wanted = _run(chunks, eager)
    assert torch.allclose(out, wanted)


@pytest.mark.parametrize("skip", ["after", "wait", "keep"])
def test_what_is_missing_shows(skip: str) -> None:
    right = [torch.allclose(*_run(8, eager, skip)) for eager in EAGER]
    assert not all(right)


def test_what_the_kernels_are_not_made_for() -> None:
    layer: Any = Dispatcher()
    region = FlexRegion(layer, lambda *given: given[0], Streams(torch.device("cpu")))
    few = torch.zeros(3, WIDTH), torch.zeros(3, EXPERTS), torch.zeros(3, EXPERTS).bool()
    with pytest.raises(RuntimeError, match="3 tokens cannot be cut into 4 chunks"):
        region(*few, LayerPlan.of(4))
    with pytest.raises(RuntimeError, match="keep everything, got 2 chunks, s4"):
        region(*few, LayerPlan.of(2, "s4"))
