"""(e) The MoE region on the device, with all-to-alls that take as long as they are told to.

One process stands for all ranks of its group: the others are its mirror images, which send it what
it sends itself. An all-to-all is a copy on a stream of its own and a wait there, as long as the
emulated network would take; messages follow each other. Experts are real matrix products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.model import CUDA, DEVICE, release, start, synchronize
from megatron_ext.moe import exchange as exchange_module
from megatron_ext.moe.buffers import Memory
from megatron_ext.moe.exchange import Exchange, Groups
from megatron_ext.moe.plan import LayerPlan, Strategy
from megatron_ext.moe.region import Region

RANKS, EXPERTS, TOP_K = 8, 16, 2
RATIOS = (0.5, 1.0, 2.0)  # an all-to-all over the experts' forward pass
WAYS = [(n, Strategy.NONE) for n in (1, 2, 4)] + [
    (4, s) for s in Strategy if s is not Strategy.NONE
]
ROUNDS = 5


class Mirror:
    """In place of ``torch.distributed`` in ``megatron_ext.moe.exchange``.

    Attributes:
        seconds_per_byte: of what one rank sends.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._stream = torch.cuda.Stream() if CUDA else None
        self._free = 0.0
        self._cycles_per_second = _cycles() if CUDA else 0.0

    @staticmethod
    def get_world_size(group: Any) -> int:
        """So many mirror images."""
        return RANKS

    @staticmethod
    def get_rank(group: Any) -> int:
        """The first."""
        return 0

    @staticmethod
    def all_gather_into_tensor(out: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        """They all have the same."""
        out.copy_(own.repeat(RANKS))

    def all_to_all_single(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Fill ``out`` with as much; over when the network would be."""
        seconds = rows.numel() * rows.element_size() * self.seconds_per_byte
        if self._stream is None:
            _fill(out, rows)
            self._free = max(time.perf_counter(), self._free) + seconds
            return _Sleeping(self._free)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _fill(out, rows)
            if seconds:
                torch.cuda._sleep(int(seconds * self._cycles_per_second))
        done = torch.cuda.Event()
        done.record(self._stream)
        return _Recorded(done)


class _Sleeping:
    def __init__(self, end: float) -> None:
        self._end = end

    def wait(self) -> None:
        """The host waits."""
        time.sleep(max(0.0, self._end - time.perf_counter()))


class _Recorded:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """The stream waits."""
        torch.cuda.current_stream().wait_event(self._event)


def _fill(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Numbers that are no rubbish."""
    least = min(len(out), len(rows))
    out[:least].copy_(rows[:least])
    if least and len(out) > least:
        extra = torch.arange(len(out) - least, device=out.device) % least
        out[least:].copy_(rows.index_select(0, extra))


def _cycles() -> float:
    """How many of ``_sleep``'s cycles make a second."""
    torch.cuda._sleep(1_000_000)
    synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(200_000_000)
    synchronize()
    return 200_000_000 / (time.perf_counter() - started)


class LocalExperts(torch.nn.Module):
    """This rank's experts: two linear layers each, one expert after the other."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        count = EXPERTS // RANKS
        options: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32}
        generator = torch.Generator(DEVICE).manual_seed(5)
        up = torch.randn(count, hidden, ffn, generator=generator, **options) / hidden**0.5
        down = torch.randn(count, ffn, hidden, generator=generator, **options) / ffn**0.5
        self.up = torch.nn.Parameter(up.to(torch.bfloat16))
        self.down = torch.nn.Parameter(down.to(torch.bfloat16))

    def forward(self, x: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """As ``Region`` calls it."""
        sizes = counts.tolist()
        gelu = torch.nn.functional.gelu
        parts = zip(x.split(sizes), probs.split(sizes), self.up, self.down)
        return torch.cat([(gelu(a @ u) * p[:, None].to(a.dtype)) @ d for a, p, u, d in parts])


class Layer:
    """The region with its inputs."""

    def __init__(self, tokens: int, hidden: int, ffn: int, group: Any, rounds: int) -> None:
        self._rounds = rounds
        self.experts = LocalExperts(hidden, ffn)
        self._x = torch.randn(tokens, hidden, device=DEVICE).to(torch.bfloat16)
        generator = torch.Generator(DEVICE).manual_seed(7)
        scores = torch.rand(tokens, EXPERTS, device=DEVICE, generator=generator)
        self.chosen = torch.zeros_like(scores, dtype=torch.bool)
        self.chosen.scatter_(1, scores.topk(TOP_K, dim=1).indices, True)
        self._scores = scores * self.chosen
        self.exchange = Exchange(Groups(group, None, group), EXPERTS)

    def time(self, chunks: int, strategy: Strategy) -> tuple[float, int | None]:
        """Seconds of forward and backward, and bytes at most."""
        memory = Memory.on(DEVICE)
        region = Region(self.exchange, self.experts, list(self.experts.parameters()), memory)
        times = []
        peak = None
        try:
            for number in range(self._rounds + 2):
                x = self._x.clone().requires_grad_(True)
                probs = self._scores.clone().requires_grad_(True)
                synchronize()
                if CUDA and number == 2:
                    resting = torch.cuda.memory_allocated() - memory.ring.nbytes
                    torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                region(x, probs, self.chosen, LayerPlan(chunks, strategy)).sum().backward()
                synchronize()
                times.append(time.perf_counter() - started)
            if CUDA:
                peak = torch.cuda.max_memory_allocated() - resting
        finally:
            memory.close()
        return statistics.median(times[2:]), peak


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All ratios and ways, in turn."""
    group = start()
    tokens, hidden, ffn = (256, 64, 128) if args.tiny else (16384, 4096, 8192)
    mirror = Mirror()
    exchange_module.dist = mirror  # type: ignore[assignment]
    layer = Layer(tokens, hidden, ffn, group, 1 if args.tiny else ROUNDS)
    compute = experts_seconds(layer, tokens * TOP_K, hidden)
    sent = tokens * TOP_K * hidden * 2
    rows = []
    for ratio in RATIOS[:1] if args.tiny else RATIOS:
        mirror.seconds_per_byte = ratio * compute / sent
        base = 0.0
        for chunks, strategy in WAYS:
            seconds, peak = layer.time(chunks, strategy)
            base = base or seconds
            row = {"ratio": ratio, "chunks": chunks, "strategy": strategy.value,
                   "ms": 1e3 * seconds, "speed": base / seconds, "peak_bytes": peak}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
            release()
    return {"rows": rows, "experts_ms": 1e3 * compute, "tokens": tokens, "hidden": hidden,
            "ffn": ffn}  # fmt: skip


def experts_seconds(layer: Layer, rows: int, hidden: int) -> float:
    """Of the experts' forward pass on all rows, which is what one rank's even share comes to."""
    x = torch.randn(rows, hidden, device=DEVICE).to(torch.bfloat16)
    count = EXPERTS // RANKS
    counts = torch.full((count,), rows // count)
    probs = torch.ones(rows, device=DEVICE)
    times = []
    with torch.no_grad():
        for _ in range(4):
            synchronize()
            started = time.perf_counter()
            layer.experts(x, counts, probs)
            synchronize()
            times.append(time.perf_counter() - started)
    return min(times)
