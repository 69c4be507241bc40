"""(f) What slices of a sequence cost: F, B and W of one layer in 1, 2, 4, 8 and 16 slices.

Every slice sees the keys and values of those before it, and adds to their gradients, as
``--pp-slices`` has it. Weight gradients are added to a float32 buffer after every W, as
Megatron's data parallelism does without a fused kernel. Slices are even, or cut so that each has
the same floating-point operations under a causal mask. The device waits before every pass until
the host has launched it, so that short slices show the device's time. The whole microbatch is
timed with torch's choice of an attention kernel, too: that knows no mask of slices.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu import model
from benchmarks.gpu.model import CUDA, DEVICE, Sdpa, Size, config, release, start, synchronize
from megatron_ext.integration import split_local as wgrad
from megatron_ext.integration.features.slices.carry import Carry, Held
from megatron_ext.integration.hooks import Hooks
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule.spec import Cut

# Tokens and numbers of slices.
TOTALS = {8192: (1, 2, 4, 8, 16), 32768: (1, 2, 4, 8, 16), 131072: (1, 4, 16)}
TINY = {64: (1, 2, 4)}
HIDDEN = 4096
ROUNDS = 3
# Lengths are multiples of it: a tile of a matrix product.
TILE = 128


class Sliced(Sdpa):
    """Causal attention of a slice to all before it.

    Attributes:
        tokens: of a microbatch.
        span: first token of the slice, and the first one behind it.
        held: keys and values so far; None before a microbatch.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.span = tokens, (0, tokens)
        self.held: Held | None = None

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """(slice, batch, heads, width) each -> (slice, batch, heads * width)."""
        if self.held is None:
            self.held = Held(key, value, self.tokens)
        key, value = Carry.apply(key, value, self.held, *self.span)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        mask = causal_lower_right(len(query), len(key))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.permute(2, 0, 1, 3).flatten(2)


def cut(tokens: int, count: int, hidden: int, tile: int) -> list[int]:
    """Lengths of ``count`` slices with as many operations each: forward, a token costs 24 h^2 in
    matrix products and 4 h for each token it attends to."""
    attention = Fraction(tokens, 12 * hidden + tokens)
    return Cut.of(tokens, count, attention, tile, even=False).lengths


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rows by tokens, slices and cut; a number of tokens begins with the whole microbatch."""
    start()
    hidden, totals, tile = (64, TINY, 8) if args.tiny else (HIDDEN, TOTALS, TILE)
    rounds = 1 if args.tiny else ROUNDS
    rows: list[dict[str, Any]] = []
    for tokens, counts in totals.items():
        size = Size(hidden, tokens, 1, 1, 1)
        layer = model.layer_of(config(size), 0)
        whole: list[torch.Tensor] = []
        for name, lengths in cuts(tokens, counts, hidden, tile):
            core = Sdpa() if name == "torch's kernel" else Sliced(tokens)
            layer.self_attention.core_attention = core
            row, grads = measured(layer, size, lengths, rounds)
            whole = whole or grads
            row |= {"tokens": tokens, "hidden": hidden, "slices": len(lengths), "cut": name,
                    "lengths": lengths, "difference": difference(grads, whole)}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
            args.keep({"rows": rows, "unfinished": "more slices"})
        del layer, core, whole, grads
        release()
    return {"rows": rows}


def cuts(
    tokens: int, counts: tuple[int, ...], hidden: int, tile: int
) -> Iterator[tuple[str, list[int]]]:
    """Names and lengths of what is measured."""
    yield "torch's kernel", [tokens]
    for count in counts:
        yield "even", [tokens // count] * count
        if count > 1:
            yield "balanced", cut(tokens, count, hidden, tile)


def measured(
    layer: Any, size: Size, lengths: list[int], rounds: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Milliseconds of F, B and W of every slice, and the weight gradients of one microbatch."""
    store = WeightGradStore()
    hooks = Hooks(model.package_info.__version__)
    hooks.apply(list(wgrad.hooks(store)))
    main = [torch.zeros_like(each, dtype=torch.float32) for each in layer.parameters()]
    try:
        once(layer, size, lengths, store, main)
        for each in main:
            each.zero_()
        found = [once(layer, size, lengths, store, main)]
        grads = [each.clone() for each in main]
        found += [once(layer, size, lengths, store, main) for _ in range(rounds - 1)]
    finally:
        hooks.revert()
    times = {}
    for op in "FBW":
        each = zip(*(one[op] for one in found), strict=True)
        times[op] = [round(statistics.median(one), 4) for one in each]
    return {"ms": times}, grads


def once(
    layer: Any, size: Size, lengths: list[int], store: WeightGradStore, main: list[torch.Tensor]
) -> dict[str, list[float]]:
    """One microbatch: F of all slices, then B and W of each, the last slice first."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(size.shape, generator=generator, device=DEVICE).to(torch.bfloat16)
    core = layer.self_attention.core_attention
    core.held = None
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    spans = list(zip([0, *ends], ends, strict=False))
    marks: dict[str, list[Any]] = {op: [None] * len(spans) for op in "FBW"}
    held, outs = [], []
    for number, (begin, end) in enumerate(spans):
        given = x[begin:end].detach().requires_grad_(True)
        core.span = begin, end
        with _Timed(marks["F"], number):
            outs.append(layer(given, attention_mask=None)[0])
        held.append(given)
    for number, (begin, end) in reversed(list(enumerate(spans))):
        grad = x[begin:end]
        with _Timed(marks["B"], number), store.collect((0, number)):
            torch.autograd.backward(outs[number], grad)
        outs[number] = held[number] = None
        with _Timed(marks["W"], number), torch.no_grad():
            store.run((0, number))
            for parameter, sums in zip(layer.parameters(), main, strict=True):
                sums.add_(parameter.grad)
                parameter.grad = None
    synchronize()
    return {op: [one.ms() for one in marks[op]] for op in "FBW"}


# Of the device's clock: more milliseconds than the host needs to launch a pass of a layer.
LAUNCHED = 12_000_000


class _Timed:
    """A region, by events of the device, which begins when all is launched; nothing on the CPU."""

    def __init__(self, marks: list[Any], number: int) -> None:
        marks[number] = self
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if CUDA else []

    def __enter__(self) -> None:
        if CUDA:
            torch.cuda._sleep(LAUNCHED)
            self._events[0].record()

    def __exit__(self, *_: Any) -> None:
        if CUDA:
            self._events[1].record()

    def ms(self) -> float:
        """After the device is done."""
        first, last = self._events or (None, None)
        return first.elapsed_time(last) if first is not None else 0.0


def difference(grads: list[torch.Tensor], whole: list[torch.Tensor]) -> float:
    """The largest relative difference of a weight's gradient to that of the whole microbatch."""
    found = 0.0
    for ours, theirs in zip(grads, whole, strict=True):
        norm = float(theirs.norm())
        if norm:
            found = max(found, float((ours - theirs).norm()) / norm)
    return found
