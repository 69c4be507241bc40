"""Sizes and rates of MoE layers that people train, for the MoE benchmarks."""

from __future__ import annotations

from typing import NamedTuple

TOKENS = 4096  # of a rank in a call
FLOPS = 600e12  # of the experts' products, FLOP/s; H100, bf16
NETWORK, PEER, HOST = 42e9, 330e9, 50e9  # bytes/s of a device: between nodes, in one, to the host
NODE = 8  # devices


class Shape(NamedTuple):
    """One layer on one rank, bf16, SwiGLU, tokens spread evenly over experts.

    Attributes:
        hidden, ffn, experts, top_k: of the model. ranks: that its experts are spread over.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    ranks: int

    @property
    def rows(self) -> int:
        """That a rank's experts get in a call."""
        return TOKENS * self.top_k

    @property
    def experts_ms(self) -> float:
        """Their forward pass; the backward pass is twice that."""
        return 1e3 * 2 * 3 * self.rows * self.hidden * self.ffn / FLOPS

    @property
    def message_ms(self) -> float:
        """One all-to-all of a call: to other nodes and in the node at once."""
        nbytes = self.rows * self.hidden * 2
        near = min(self.ranks, NODE)
        outside, inside = (self.ranks - near) / self.ranks, (near - 1) / self.ranks
        return 1e3 * nbytes * max(outside / NETWORK, inside / PEER)

    @property
    def input_ms(self) -> float:
        """A copy of the experts' input to the host."""
        return 1e3 * self.rows * self.hidden * 2 / HOST

    @property
    def inside(self) -> float:
        """Bytes inside the experts over those of their input: fused SwiGLU keeps 3F."""
        return 3 * self.ffn / self.hidden

    @property
    def ratio(self) -> float:
        """Communication over computation: four messages, three forward passes of the experts."""
        return 4 * self.message_ms / (3 * self.experts_ms)


SHAPES = (
    Shape("DeepSeek-V3, EP 64", 7168, 2048, 256, 8, 64),
    Shape("Qwen3-235B, EP 32", 4096, 1536, 128, 8, 32),
    Shape("Qwen3-30B, EP 16", 2048, 768, 128, 8, 16),
    Shape("Mixtral 8x7B, EP 8", 4096, 14336, 8, 2, 8),
    Shape("DeepSeek-V3, EP 8", 7168, 2048, 256, 8, 8),
)
