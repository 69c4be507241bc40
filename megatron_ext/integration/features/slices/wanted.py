"""How ``--pp-slices`` cuts sequences."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ....plan.slices import FLAG, attention_share
from ....schedule.spec import Cut
from ...errors import ConfigError

WEIGHTS = "--pp-slice-weights"
TOKENS = "--pp-slice-tokens"


@dataclass(frozen=True)
class Wanted:
    """What the flags ask for.

    Attributes:
        count: slices of a sequence.
        packed: documents are packed in sequences, so that attention looks back by one only, which
            is taken as free.
        joined: one W for all slices of a microbatch.
        tokens: of a slice, on average, at most: ``count`` is that of the usual length; None: it is
            that of every length.
    """

    count: int
    packed: bool = False
    joined: bool = False
    tokens: int | None = None

    def count_of(self, length: int, config: Any) -> int:
        """Slices of a sequence of ``length`` tokens, where lengths are known: no more than it has
        multiples of what a slice must be.

        Args:
            config: as of ``cut``.
        """
        wanted = self.count if self.tokens is None else -(-length // self.tokens)
        return max(1, min(wanted, length // _multiple(config)))

    def cut(self, tokens: int, config: Any) -> Cut:
        """Of sequences of ``tokens``.

        Args:
            tokens: of a sequence.
            config: Megatron's arguments, or a model's configuration.

        Raises:
            ConfigError: there are fewer tokens than slices.
        """
        attention = attention_share(tokens, config.hidden_size) * (not self.packed)
        try:
            cut = Cut.of(tokens, self.count, attention, _multiple(config))
        except ValueError as error:
            raise ConfigError(f"{FLAG} {self.count}: {error}; give fewer slices") from None
        return cut._replace(joined=self.joined)

    def fits(self, tokens: int, config: Any) -> bool:
        """True if there are as many slices in so many tokens."""
        return tokens // _multiple(config) >= self.count

    def shortest(self, config: Any) -> Cut:
        """Equal slices of equal costs: what orders are made for where lengths differ.

        Args:
            config: as of ``cut``.
        """
        tokens = self.count * _multiple(config)
        cut = Cut.of(tokens, self.count, Fraction(0), _multiple(config))
        return cut._replace(joined=self.joined)


def _multiple(config: Any) -> int:
    """Of which every slice's tokens must be one, to be split over tensor-parallel ranks."""
    split = getattr(config, "sequence_parallel", False)
    return int(config.tensor_model_parallel_size) if split else 1
