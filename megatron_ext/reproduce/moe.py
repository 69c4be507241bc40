"""MPipeMoE's and MPMoE's formulas and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..moe.plan import LayerShape, Restore, Strategy, copied_bytes
from .rows import Cell, published

# Work of a strategy, forward and backward: GEMMs in units of b*H*M, all-to-alls and copies in b*M
# (MPipeMoE, table I, for H = 4M).
WORK: dict[str, tuple[tuple[int, ...], ...]] = {
    name: tuple(map(tuple, passes))
    for name, passes in published()["mpipemoe"]["tables"]["table1"]["rows"].items()
}
_TOKENS = (4096, 8192, 16384, 32768)  # on each device


def savings(hidden: int, ffn: int, experts: int, tokens: int, chunks: int) -> tuple[float, float]:
    """What reuse saves of the pipelined layer (phi), and of the one that is not pipelined.

    Equations 1 to 6 of MPipeMoE: one expert a device, top-1, Adam, ``tokens`` on each device.
    """
    states = 4 * (experts * hidden + 2 * hidden * ffn)
    activations = tokens * (4 * hidden + ffn)
    exchanged, middle = 2 * hidden * (chunks - 2) / chunks, ffn * (chunks - 1) / chunks
    reused = tokens * (exchanged + middle) if chunks > 1 else 0.0
    sequential = states + activations + tokens * (hidden + ffn)
    pipelined = states + 2 * activations
    return 2 * reused / pipelined, 1 - (pipelined - 2 * reused) / sequential


def closed_form_ms(chunks: int, dispatch: float, compute: float, combine: float) -> float:
    """One direction without copies and restores (MPMoE's paradigm 1).

    Args:
        chunks: all equal, at least 1.
        dispatch, compute, combine: milliseconds of one chunk's S, C and R.
    """
    if chunks == 1:
        return dispatch + compute + combine
    steady = (chunks - 2) * max(dispatch + combine, compute)
    return dispatch + max(dispatch, compute) + steady + max(combine, compute) + combine


def _work(data: dict[str, Any]) -> Iterator[Cell]:
    """From the layer plans that training runs."""
    hidden = 1024
    shape = LayerShape(hidden, 4 * hidden, gated=False, kept_bytes=2 * 4 * hidden)
    for name, passes in data["rows"].items():
        strategy = Strategy(name)
        copies = copied_bytes(shape, 1, strategy) / (2 * hidden)
        again = strategy.inside is Restore.RECOMPUTE, strategy.input is Restore.RESEND
        found = (2, 2, copies), (4 + again[0], 2 + again[1], copies)
        for which, *values in zip(("forward", "backward"), passes, found):
            value, ours = map(_words, values)
            yield Cell(f"{name}, {which}", value, ours)


def _words(amounts: Sequence[float]) -> str:
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
            savings(hidden, ffn, 64, tokens, int(chunks))[0]
            for hidden, ffn in map(data["models"].get, ("GPT3-S", "BERT-L", "GPT3-XL"))
            for tokens in _TOKENS
        ]
        yield Cell(f"n={chunks}, average", value, 100 * sum(shares) / len(shares))


def _layer_ms(data: dict[str, Any], name: str, tokens: int, chunks: int = 1) -> float:
    """F and B of one layer without reuse, in 32 bits, for ``tokens`` on each device."""
    (hidden, ffn), rates, rows = data["models"][name], data["rates"], tokens / chunks
    exchange = rates["latency_ms"] + 1e3 * rows * hidden * 4 / rates["network_bytes_s"]
    compute = 1e3 * 2 * 2 * rows * hidden * ffn / rates["flops_s"]
    return sum(closed_form_ms(chunks, exchange, times * compute, exchange) for times in (1, 2))


def _chunks(data: dict[str, Any]) -> Iterator[Cell]:
    for tokens, value in data["rows"].items():
        best = min((2, 4, 8), key=lambda n, t=int(tokens): _layer_ms(data, "GPT3-XL", t, n))  # type: ignore[misc]
        yield Cell(f"GPT3-XL, {tokens} tokens", f"n={value}", f"n={best}")


def _overlap(data: dict[str, Any]) -> Iterator[Cell]:
    for name, value in data["rows"].items():
        gains = [
            1
            - min(_layer_ms(data, name, tokens, n) for n in (2, 4, 8))
            / _layer_ms(data, name, tokens)
            for tokens in _TOKENS
        ]
        yield Cell(f"{name}, 4k to 32k tokens", value, 100 * sum(gains) / len(gains))


CELLS = (_work, _limits, _saving, _chunks, _overlap)
