"""Bytes of FP8 numbers, by Megatron's recipe names."""

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

    block: int = 0
    scale_bits: int = 0
    saves_originals: bool = True

    def bytes(self, elements: int) -> int:
        """Of so many numbers, with their scales."""
        scales = -(-elements // self.block) * self.scale_bits if self.block else 0
        return -(-(elements * 8 + scales) // 8)


def recipe_of(value: Callable[[str], Any]) -> str | None:
    """The FP8 recipe that a run has; None: 16 or 32 bits.

    Args:
        value: of one of Megatron's arguments, as flags or its parser name them, or of a model's
            configuration; None: it is not given.
    """
    if not value("fp8_format") and not value("fp8"):
        return None
    recipe = value("fp8_recipe") or "delayed"
    return str(getattr(recipe, "value", recipe))  # of an enumeration


RECIPES = {
    "delayed": Quantization(saves_originals=False),
    "tensorwise": Quantization(),
    "blockwise": Quantization(128, 32),
    "mxfp8": Quantization(32, 8),
}
