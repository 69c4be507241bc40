"""The MoE flags: what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...._input import attribute
from ....moe.plan import AUTO, LayerPlan, LayerShape, Strategy, candidates
from ...arguments import MegatronArgs

FLAGS = ("--moe-pipeline-chunks", "--moe-memory-reuse")


@dataclass(frozen=True)
class MoERequest:
    """The MoE flags of a run that uses them.

    Attributes:
        chunks: n, for every layer and step, or ``auto``.
        strategy: a strategy's name, or ``auto``.
        flex: the dispatcher is Megatron's flex one, of which nothing is restored.
    """

    chunks: str
    strategy: str
    flex: bool = False

    @classmethod
    def of(cls, args: MegatronArgs) -> MoERequest | None:
        """What ``args`` ask for; None if MoE layers stay Megatron's."""
        chunks, strategy = (getattr(args, attribute(flag), None) for flag in FLAGS)
        if chunks in (None, "off"):
            return None
        flex = getattr(args, "moe_token_dispatcher_type", None) == "flex"
        return cls(chunks, strategy or "none", flex)

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does all of it."""
        return (self.chunks, self.strategy) == ("1", "none")

    def plans(self) -> Sequence[LayerPlan]:
        """The plans to be tried; one where nothing is left to be chosen."""
        if AUTO not in (self.chunks, self.strategy):
            return [LayerPlan.of(int(self.chunks), self.strategy)]
        plans = candidates(self.chunks, self.strategy)
        return [p for p in plans if p.strategy is Strategy.NONE] if self.flex else plans

    def text(self, args: MegatronArgs) -> str:
        """A line for the log: what runs, and what of Megatron's has no effect there."""
        what = f"MoE layers in {self.chunks} chunk(s), --moe-memory-reuse {self.strategy}"
        if not self.stock and getattr(args, "moe_permute_fusion", False):
            what += " (they permute rows by index; --moe-permute-fusion has no effect on them)"
        return what


def layer_shape(config: Any) -> LayerShape:
    """Sizes of the experts of layers with Megatron's ``config``."""
    ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
    row = getattr(config, "moe_latent_size", None) or config.hidden_size
    tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    itemsize = config.params_dtype.itemsize
    return LayerShape(row, max(1, ffn // tp), bool(config.gated_linear_unit), itemsize)
