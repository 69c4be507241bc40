"""The MoE flags: what they ask for, and what of Megatron excludes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...._conflict import Conflict
from ...._input import attribute
from ....moe.plan import AUTO, LayerPlan, LayerShape, Strategy, candidates
from ...arguments import MegatronArgs
from ...feature import require_no_conflict

FLAGS = ("--moe-pipeline-chunks", "--moe-memory-reuse")
CONFLICTS = (
    Conflict(
        "--moe-shared-expert-overlap",
        "shared experts would be left out; drop it, chunks overlap them anyway",
    ),
    Conflict(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "nobody would compute the experts' weight gradients; drop it",
    ),
    Conflict(
        "--fp8-recipe",
        "its scales count calls, and a chunk is a call of its own; use blockwise, mxfp8 or "
        "tensorwise",
        values=("delayed", "custom"),
        beside="--fp8-format",
    ),
)


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


def require_supported(config: Any, what: str = "an MoE layer in chunks") -> None:
    """Refuse what would silently train wrong numbers.

    Args:
        config: of a layer, or Megatron's arguments: the attributes have the same names.
        what: that does not support it.

    Raises:
        ConfigError: the first conflict.
    """
    require_no_conflict(config, CONFLICTS, {"": what})


def layer_shape(config: Any) -> LayerShape:
    """Sizes of the experts of layers with Megatron's ``config``."""
    ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
    row = getattr(config, "moe_latent_size", None) or config.hidden_size
    tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    itemsize = config.params_dtype.itemsize
    return LayerShape(row, max(1, ffn // tp), bool(config.gated_linear_unit), itemsize)
