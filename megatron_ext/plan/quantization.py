"""Bytes of FP8 and FP4 numbers, by Megatron's recipe names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Quantization(NamedTuple):
    """One recipe.

    Sources: Transformer Engine's quantized tensors (block sizes and scales) and its ``Linear``
    (what is saved for W); Megatron's ``set_save_original_input`` for ``saves_originals``.

    Attributes:
        block: numbers that share a scale, within a row.
        saves_originals: the output projection of attention keeps its 16-bit input, which attention
            keeps anyway, and not a quantized copy beside it.
    """

    bits: int
    block: int = 0
    scale_bits: int = 0
    saves_originals: bool = True

    def bytes(self, elements: int) -> int:
        """Of so many numbers, with their scales."""
        scales = -(-elements // self.block) * self.scale_bits if self.block else 0
        return -(-(elements * self.bits + scales) // 8)


def recipe_of(value: Callable[[str], Any]) -> str | None:
    """The recipe that a run has; None: 16 or 32 bits.

    Args:
        value: of one of Megatron's arguments, as flags or its parser name them, or of a model's
            configuration; None: it is not given.
    """
    for kind, default in (("fp8", "delayed"), ("fp4", "nvfp4")):
        if value(f"{kind}_format") or value(kind):
            recipe = value(f"{kind}_recipe") or default
            return str(getattr(recipe, "value", recipe))  # of an enumeration
    return None


RECIPES = {
    "delayed": Quantization(8, saves_originals=False),
    "tensorwise": Quantization(8),
    "blockwise": Quantization(8, 128, 32),
    "mxfp8": Quantization(8, 32, 8),
    "nvfp4": Quantization(4, 16, 8),
}
