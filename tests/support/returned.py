"""What trainers' loss functions return, in every kind that is known, and its comparison."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass
class Output:
    """As transformers' and trainers' own output classes."""

    logits: torch.Tensor
    note: str | None = None


class Pair(NamedTuple):
    """Two values by name."""

    values: torch.Tensor
    count: int


class Batch:
    """Stands for tensordict's TensorDict: an object that holds tensors and pickles itself."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch, (self._tensors,)


class Marked(torch.Tensor):
    """A tensor class of a trainer's own."""


def _batch(tensors: dict[str, torch.Tensor]) -> Batch:
    return Batch(**tensors)


def returned() -> dict[str, Any]:
    """One microbatch's; the same values at every call."""
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randn(n, generator=draw) for n in (3, 5, 1)]
    shared = torch.randn(4, generator=draw)
    return {
        "loss": 0.25,
        "none": None,
        "text": "gsm8k",
        "flag": True,
        "log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "bf16": torch.randn(3, 4, generator=draw).bfloat16().t(),
        "fp8": torch.randn(6, generator=draw).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "output": Output(torch.randn(2, 2, generator=draw, requires_grad=True) * 2, "kept"),
        "pair": Pair(shared, 3),
        "list": [shared, (shared[1:], {"deep": shared.double()})],
        "batch": Batch(a=shared, b=torch.arange(3)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "marked": torch.ones(2).as_subclass(Marked),
    }


def same(one: Any, other: Any) -> bool:
    """True if two values are of the same classes and bit-equal."""
    if isinstance(one, torch.Tensor):
        # A parameter arrives as a tensor.
        kind = torch.Tensor if isinstance(other, torch.nn.Parameter) else type(other)
        if type(one) is not kind or one.dtype != other.dtype or one.device != other.device:
            return False
        if one.is_nested:
            return same(one.values(), other.values()) and same(one.offsets(), other.offsets())
        dense = [t.detach().to_dense() for t in (one, other)]
        return dense[0].shape == dense[1].shape and bool((dense[0] == dense[1]).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return same(vars(one), vars(other))
    return bool(one == other)
