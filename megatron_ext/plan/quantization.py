"""Bytes of FP8 and FP4 numbers, by Megatron's recipe names."""

from __future__ import annotations

from typing import NamedTuple


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


RECIPES = {
    "delayed": Quantization(8, saves_originals=False),
    "tensorwise": Quantization(8),
    "blockwise": Quantization(8, 128, 32),
    "mxfp8": Quantization(8, 32, 8),
    "nvfp4": Quantization(4, 16, 8),
}
