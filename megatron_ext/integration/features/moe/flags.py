"""The MoE flags: what they ask for, and what of Megatron does not go together with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...._input import attribute, parse_bytes
from ....moe import cost_file
from ....moe.autotune import AUTO, SearchSpace
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...feature import require_no_conflict
from . import CHUNKS, CONFLICTS, FLAGS, RESTORED, STRATEGIES


@dataclass(frozen=True)
class MoERequest:
    """The MoE flags of a run that uses them.

    Attributes:
        chunks: n, for every layer and step, or ``auto``.
        strategy: a strategy's name, or ``auto``.
        budget_bytes: for what is chosen; None: no limit.
        costs: what an earlier run found.
    """

    chunks: str
    strategy: str
    budget_bytes: int | None = None
    costs: cost_file.Costs | None = None

    @classmethod
    def of(cls, args: MegatronArgs) -> MoERequest | None:
        """What ``args`` ask for; None if MoE layers stay Megatron's.

        Raises:
            ConfigError: flags that contradict each other or are unknown.
        """
        chunks, strategy, budget, costs = (getattr(args, attribute(flag), None) for flag in FLAGS)
        if chunks is not None and chunks not in CHUNKS:
            raise ConfigError(f"{FLAGS[0]} must be one of {', '.join(CHUNKS)}, got {chunks!r}")
        if strategy is not None and strategy not in STRATEGIES:
            raise ConfigError(
                f"{FLAGS[1]} must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
            )
        if chunks in (None, "off"):
            for flag, value in zip(FLAGS[1:], (strategy, budget, costs)):
                if value not in (None, "none"):
                    raise ConfigError(
                        f"{flag} {value} is for MoE layers in chunks, which are off; add "
                        f"{FLAGS[0]} 2 (1 is the whole batch at once), or drop {flag}"
                    )
            return None
        for flag, value in ((FLAGS[2], budget), (FLAGS[3], costs)):
            if value is not None and AUTO not in (chunks, strategy):
                raise ConfigError(
                    f"{flag} {value} is what auto chooses by, and nothing is to be chosen; add "
                    f"{FLAGS[1]} auto, or drop {flag}"
                )
        nbytes = _read(FLAGS[2], budget, parse_bytes)
        given = _read(FLAGS[3], costs, cost_file.load)
        return cls(chunks, strategy or "none", nbytes, given)

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does all of it."""
        return (self.chunks, self.strategy) == ("1", "none")

    @property
    def chooses(self) -> bool:
        """True where something is left to be chosen."""
        return AUTO in (self.chunks, self.strategy)

    def space(self) -> SearchSpace:
        """What may be chosen."""
        return SearchSpace.of(self.chunks, self.strategy)

    def text(self, args: MegatronArgs) -> str:
        """For the log: what runs, and what of Megatron's has no effect there."""
        what = f"MoE layers in {self.chunks} chunk(s), --moe-memory-reuse {self.strategy}"
        if self.budget_bytes is not None:
            what += f", at most {self.budget_bytes} bytes"
        if not self.stock and args.moe_permute_fusion:
            what += " (they permute rows by index; --moe-permute-fusion has no effect on them)"
        return what

    def check(self, args: MegatronArgs) -> None:
        """Refuse what of Megatron cannot work with it; before Megatron's own validation.

        Raises:
            ConfigError: the first rule that applies.
        """
        if not args.num_experts:
            raise ConfigError(
                f"{FLAGS[0]} {self.chunks} is for MoE layers, and the model has none "
                f"(--num-experts is not set); drop {FLAGS[0]}"
            )
        parts = {"": f"{FLAGS[0]} {self.chunks}"}
        if self.strategy != "none":
            parts[RESTORED] = f"{FLAGS[1]} {self.strategy}"
        require_no_conflict(args, CONFLICTS, parts)


def _read(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
