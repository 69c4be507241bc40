"""MPipeMoE's own formulas (IPDPS 2023), as published: for comparison, not to decide with.

Elements, not bytes: one layer with one expert a device, top-1, fixed capacity, ReLU in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .costs import DIRECTIONS, amounts


class PaperLayer(NamedTuple):
    """Sizes as in section III-A: M, H, E, and B tokens on each device."""

    hidden: int
    ffn: int
    experts: int
    tokens: int


def model_state_elements(layer: PaperLayer) -> int:
    """Equation 1: gate and expert; parameters, gradients and two moments of Adam."""
    return 4 * (layer.experts * layer.hidden + 2 * layer.hidden * layer.ffn)


def activation_elements(layer: PaperLayer) -> int:
    """Equation 2: T_I, T_DI, T_DO, T_O and T_M."""
    return layer.tokens * (4 * layer.hidden + layer.ffn)


def buffer_elements(layer: PaperLayer, *, pipelined: bool = False) -> int:
    """Equation 3: two neighbouring gradients in backward; equation 4: all of them if pipelined."""
    return activation_elements(layer) if pipelined else layer.tokens * (layer.hidden + layer.ffn)


def reused_elements(layer: PaperLayer, chunks: int) -> float:
    """Equation 5: what reuse takes off the activations, and again off backward's buffers.

    T_DI and T_DO keep two of n parts, T_M one; for n = 1 there is nothing to take off.
    """
    if chunks < 2:
        return 0.0
    exchanged = 2 * layer.hidden * (chunks - 2) / chunks
    return layer.tokens * (exchanged + layer.ffn * (chunks - 1) / chunks)


def saving_ratio(layer: PaperLayer, chunks: int) -> float:
    """Equation 6, phi: the share that reuse saves of the pipelined layer without reuse.

    That baseline itself needs more than the layer without pipeline; see ``saving_of_sequential``.
    """
    return 2 * reused_elements(layer, chunks) / _total(layer, pipelined=True)


def saving_of_sequential(layer: PaperLayer, chunks: int) -> float:
    """The same against the layer that is not pipelined (equations 2 and 3); may be negative."""
    before = _total(layer, pipelined=False)
    after = _total(layer, pipelined=True) - 2 * reused_elements(layer, chunks)
    return (before - after) / before


def _total(layer: PaperLayer, *, pipelined: bool) -> int:
    buffers = buffer_elements(layer, pipelined=pipelined)
    return model_state_elements(layer) + activation_elements(layer) + buffers


class UnitTimes(NamedTuple):
    """One chunk's time for each unit of ``amounts``, nothing else running."""

    gemm: float
    exchange: float
    copy: float


class Speeds(NamedTuple):
    """Shares of speed that are left (section II-C): sigma, mu and eta."""

    comp: float = 1.0
    comm: float = 1.0
    copy: float = 1.0


def slowest_stream(strategy: str, units: UnitTimes, speeds: Speeds, middle: float = 4.0) -> float:
    """Equation 10: forward's and backward's slowest stream; neither fill nor dependencies count.

    The third term has eta, which the print has as mu; and volumes are in ``units``, as the print's
    normalisation drops them.
    """
    total = 0.0
    for direction in DIRECTIONS:
        work = amounts(strategy, direction, middle=middle)
        total += max(q * unit / speed for q, unit, speed in zip(work, units, speeds))
    return total


def choose_strategy(
    units: UnitTimes, speeds: Mapping[str, Speeds] | None = None, middle: float = 4.0
) -> str:
    """The strategy that equation 10 takes; the first of equals.

    Args:
        speeds: per strategy, as its streams disturb each other; default: they do not.
    """
    left = speeds or {}
    return min(
        ("s1", "s2", "s3", "s4"),
        key=lambda name: slowest_stream(name, units, left.get(name, Speeds()), middle),
    )
