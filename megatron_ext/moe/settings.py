"""How a rank's MoE layers run now: number of chunks and strategy, for one step or many."""

from __future__ import annotations

from .strategies import Strategy


class Settings:
    """What the next calls of all MoE layers do. It must be the same on all ranks of a layer's
    groups, and between a forward pass and its recomputation.

    Args:
        chunks: n >= 1.
        strategy: or its name.

    Raises:
        ValueError: no such strategy, or fewer than one chunk.
    """

    def __init__(self, chunks: int = 1, strategy: Strategy | str = Strategy.NONE) -> None:
        self.chunks, self.strategy = 1, Strategy.NONE
        self.set(chunks, strategy)

    def set(self, chunks: int, strategy: Strategy | str) -> None:
        """Change both, between two steps.

        Raises:
            ValueError: no such strategy, or fewer than one chunk.
        """
        if chunks < 1:
            raise ValueError(f"an MoE layer has at least 1 chunk, got {chunks}")
        self.chunks, self.strategy = chunks, Strategy(strategy)

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does the same: one chunk, nothing restored."""
        return self.chunks == 1 and self.strategy is Strategy.NONE
