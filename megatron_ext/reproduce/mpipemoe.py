"""MPipeMoE's and MPMoE's tables: work of the strategies, savings, chunks, speed-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..moe.plan import LayerPlan, LayerShape, Restore, Strategy, copied_bytes
from .moe_equations import closed_form_ms, savings
from .moe_search import search_regrets, smooth_ms, strategy_regrets, wave_ms
from .rows import Cell, Kind, Paper, Table, gpu_table, published

_EXPERTS = 64


def _models() -> dict[str, tuple[int, int]]:
    models = published()["mpipemoe"]["models"]
    return {name: tuple(sizes) for name, sizes in models.items() if name != "note"}


def _work(data: dict[str, Any]) -> Iterator[Cell]:
    hidden = 1024
    shape = LayerShape(hidden, 4 * hidden, gated=False, kept_bytes=2 * 4 * hidden)
    for name, passes in data["rows"].items():
        strategy = Strategy(name)
        copies = copied_bytes(shape, 1, strategy) / (2 * hidden)
        again = strategy.inside is Restore.RECOMPUTE, strategy.input is Restore.RESEND
        found = (2, 2, copies), (4 + again[0], 2 + again[1], copies)
        for which, value, ours in zip(("forward", "backward"), passes, found):
            yield Cell(f"{name}, {which}", _words(value), _words(ours))


def _words(amounts: Any) -> str:
    return "{:g} GEMMs, {:g} all-to-alls, {:g} copies".format(*amounts)


def _limits(data: dict[str, Any]) -> Iterator[Cell]:
    for chunks, values in data["limits"].items():
        shares = savings(1024, 4096, 1, 10**9, int(chunks))
        for of, value, ours in zip(("pipelined", "sequential"), values, shares):
            digits = 1 if value != int(value) else 0
            yield Cell(f"n={chunks}, of the {of} layer", value, 100 * ours, digits)


def _saving(data: dict[str, Any]) -> Iterator[Cell]:
    for chunks, value in data["rows"].items():
        shares = [
            savings(*sizes, _EXPERTS, tokens, int(chunks))[0]
            for sizes in _models().values()
            for tokens in (4096, 8192, 16384, 32768)
        ]
        yield Cell(f"n={chunks}, average", value, 100 * sum(shares) / len(shares))


class Rates(NamedTuple):
    """What a layer's streams do on the paper's 64 A100.

    Attributes:
        flops: of the experts, FLOP/s (TF32 at 60 % of its peak).
        network: bytes/s a device.
        latency_ms: of an all-to-all.
    """

    flops: float = 0.6 * 156e12
    network: float = 25e9
    latency_ms: float = 0.15


_A100 = Rates()


def layer_ms(hidden: int, ffn: int, tokens: int, plan: LayerPlan, rates: Rates) -> float:
    """F and B of one layer without reuse, in 32 bits, for ``tokens`` on each device."""
    rows = tokens / plan.chunks
    exchange = rates.latency_ms + 1e3 * rows * hidden * 4 / rates.network
    compute = 1e3 * 2 * 2 * rows * hidden * ffn / rates.flops
    return sum(closed_form_ms(plan.chunks, exchange, times * compute, exchange) for times in (1, 2))


def _chunks(data: dict[str, Any]) -> Iterator[Cell]:
    sizes = _models()["GPT3-XL"]
    for tokens, value in data["rows"].items():
        times = {n: layer_ms(*sizes, int(tokens), LayerPlan(n), _A100) for n in (2, 4, 8)}
        yield Cell(
            f"GPT3-XL, {tokens} tokens", f"n={value}", f"n={min(times, key=times.__getitem__)}"
        )


def _overlap(data: dict[str, Any]) -> Iterator[Cell]:
    for name, value in data["rows"].items():
        gains = []
        for tokens in (4096, 8192, 16384, 32768):
            alone = layer_ms(*_models()[name], tokens, LayerPlan(), _A100)
            best = min(layer_ms(*_models()[name], tokens, LayerPlan(n), _A100) for n in (2, 4, 8))
            gains.append(1 - best / alone)
        yield Cell(f"{name}, 4k to 32k tokens", value, 100 * sum(gains) / len(gains))


def _choices(data: dict[str, Any]) -> Iterator[Cell]:
    found = {
        "smooth": search_regrets(smooth_ms),
        "waves": search_regrets(wave_ms),
        "equation 10": strategy_regrets(),
    }
    for key, what in data["rows"].items():
        papers, ours = zip(*found[key])
        yield Cell(f"{what}, average", sum(papers) / len(papers), sum(ours) / len(ours))
        yield Cell(f"{what}, at worst", max(papers), max(ours))


_STREAMS = (
    "three streams without slowdown beside each other; 32-bit data, TF32 at 60 % of 156 TFLOP/s, "
    "25 GB/s a device, 0.15 ms an all-to-all: assumed, not the paper's",
)

PAPER = Paper(
    "mpipemoe",
    (
        Table("table1", "Work of a chunk by strategy", "table1", Kind.EXACT, "", _work,
              ("from the layer plans that training runs; H = 4M, ReLU",)),
        Table("phi", "Memory saved by reuse, for many tokens", "phi", Kind.EXACT, "%", _limits,
              ("equations 1 to 6",)),
        Table("saving", "Memory saved by reuse", "saving", Kind.GAIN, "%", _saving,
              ("equations 1 to 6 for table III's models with 4k, 8k, 16k, 32k tokens: theory, of "
               "which the papers reach 95 %",)),
        Table("granularity", "Best number of chunks", "granularity", Kind.EXACT, "", _chunks,
              _STREAMS,
              above="the best n depends on the latency of an all-to-all, which is assumed: with "
              "a longer one fewer chunks are best"),
        Table("speedup", "Time saved by overlap", "speedup", Kind.GAIN, "%", _overlap, _STREAMS,
              above="chunks cost nothing but latency in ours; the paper lost 4 to 12 % to smaller "
              "products",
              below="the assumed balance of network and compute hides less"),
        Table("choice", "Time of what is chosen, over the best", "choice", Kind.ORDER, "", _choices,
              ("trials as in training; the published column is the paper's method, run here on the "
               "same random times: latencies and rates, products in waves, random rates",),
              above="a plan must be 2 % faster than a simpler one"),
        gpu_table("mpipemoe-gpu"),
    ),
)  # fmt: skip
