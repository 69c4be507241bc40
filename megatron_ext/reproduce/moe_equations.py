"""What MPipeMoE and MPMoE publish as formulas: work, savings, one layer's time."""

from __future__ import annotations

from .rows import published

# Work of a strategy, forward and backward: GEMMs in units of b*H*M, all-to-alls and copies in b*M
# (MPipeMoE, table I, for H = 4M).
WORK: dict[str, tuple[tuple[int, ...], ...]] = {
    name: tuple(map(tuple, passes))
    for name, passes in published()["mpipemoe"]["tables"]["table1"]["rows"].items()
}


def choose_strategy(gemm: float, exchange: float, copy: float) -> str:
    """The strategy whose slowest streams take least, the first of equals (MPipeMoE, equation 10).

    Args:
        gemm, exchange, copy: one chunk's time for each unit of ``WORK``.
    """
    units = gemm, exchange, copy
    return min(
        ("s1", "s2", "s3", "s4"),
        key=lambda name: sum(
            max(amount * unit for amount, unit in zip(work, units)) for work in WORK[name]
        ),
    )


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
