"""The lengths of a microbatch's sequences, as what a data iterator gives has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ...errors import ConfigError

# Names of a microbatch's tokens, and of where its packed sequences begin.
TOKENS = ("tokens", "input_ids", "text")
BOUNDS = ("cu_seqlens", "cu_seqlens_q")
_PARAMETERS = "packed_seq_params"


class Sequences(NamedTuple):
    """Of one microbatch.

    Attributes:
        lengths: in tokens.
        packed: they lie one behind the other, and each attends to itself alone.
    """

    lengths: list[int]
    packed: bool


def sequences_of(batch: Any) -> Sequences:
    """What Megatron's datasets and trainers on Megatron give.

    A mapping, or an object with attributes. Where packed sequences begin (``cu_seqlens``, or
    ``packed_seq_params``) counts first, then its tokens: rows of a matrix with their padding, which
    is computed, too; a nested tensor's or a list's parts; one sequence.

    Args:
        batch: of one microbatch.

    Raises:
        ConfigError: it has none of them.
    """
    bounds = _first(batch, BOUNDS)
    if bounds is None:
        bounds = _first(_first(batch, (_PARAMETERS,)), BOUNDS)
    if bounds is not None:
        return Sequences(_between(bounds), True)
    tokens = batch if isinstance(batch, torch.Tensor) else _first(batch, TOKENS)
    found = None if tokens is None else _of_tokens(tokens)
    if found is None:
        raise ConfigError(
            f"orders by lengths need tokens of the data iterator, but it gives {_about(batch)}; "
            "give a function, enable(microbatch_costs=function), that returns the lengths of a "
            "microbatch's sequences"
        )
    return found


def asked(function: Callable[[Any], Any], batch: Any) -> Sequences:
    """What a user's function says of a microbatch: a number of tokens, or a list of lengths.

    Raises:
        ConfigError: it returns something else.
    """
    found = function(batch)
    if isinstance(found, torch.Tensor):
        found = found.tolist()
    lengths = [found] if isinstance(found, Integral) else found
    if (
        not isinstance(lengths, Sequence)
        or not lengths
        or not all(isinstance(one, Integral) and int(one) > 0 for one in lengths)
    ):
        raise ConfigError(
            "microbatch_costs must return a number of tokens, or the lengths of sequences, each 1 "
            f"or more, but it returned {found!r:.80}"
        )
    return Sequences([int(one) for one in lengths], len(lengths) > 1)


def _first(batch: Any, names: Sequence[str]) -> Any:
    """The first value that a mapping, or an object, has under one of these names."""
    mapping = isinstance(batch, Mapping) or hasattr(batch, "keys")
    for name in names:
        found = (
            (batch[name] if name in batch.keys() else None)  # noqa: SIM118 - not all are iterable
            if mapping
            else getattr(batch, name, None)
        )
        if found is not None:
            return found
    return None


def _between(bounds: torch.Tensor) -> list[int]:
    """Lengths between bounds, of one row or of several; those of padding are 0."""
    lengths = bounds.diff()
    found: list[int] = lengths[lengths > 0].tolist()
    return found


def _of_tokens(tokens: Any) -> Sequences | None:
    if isinstance(tokens, (list, tuple)) and tokens:
        lengths = [len(one) for one in tokens if hasattr(one, "__len__")]
        return Sequences(lengths, True) if len(lengths) == len(tokens) and all(lengths) else None
    if not isinstance(tokens, torch.Tensor) or not tokens.numel():
        return None
    if tokens.is_nested:
        return Sequences([len(one) for one in tokens.unbind()], True)
    if tokens.dim() == 1:
        return Sequences([tokens.shape[0]], False)
    if tokens.dim() == 2:
        return Sequences([tokens.shape[1]] * tokens.shape[0], False)
    return None


def _about(batch: Any) -> str:
    kind = type(batch).__name__
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        names = ", ".join(sorted(map(str, batch.keys()))) or "nothing"
        return f"a {kind} with {names}, in which no {' or '.join(TOKENS)} has a known form"
    return f"a {kind}, whose tokens are not known"
