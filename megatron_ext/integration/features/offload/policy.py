"""Offload policies: which saved tensors of an offloaded activation set stay on the device.

The schedule decides which *sets* are offloaded; a policy decides about single tensors inside them.
It is a function of ``SavedTensor`` that returns True to keep the tensor on the device. To add one,
write it here and list it in ``POLICIES``; ``--pp-offload-policy package.module:function`` names one
in another package. If it keeps one tensor of a storage, the whole storage stays.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves during the forward pass of a model chunk.

    Attributes:
        tensor: of any shape and dtype, on the device.
        module: dotted name, inside the chunk, of the innermost module that is running, e.g.
            ``decoder.layers.0.self_attention.linear_qkv``; empty outside of all.
    """

    tensor: torch.Tensor
    module: str


OffloadPolicy = Callable[[SavedTensor], bool]


def keep_nothing(saved: SavedTensor) -> bool:
    """Offload all that can be moved."""
    return False


def keep_attention_inputs(saved: SavedTensor) -> bool:
    """Keep what the query-key-value projections and the attention kernel save.

    That is the projections' input, query, key, value, and what else the kernel saves: the output
    with flash attention, the scores without. The norms' and the MLP's tensors, more than half of
    a dense layer's bytes with flash attention, are offloaded.
    """
    return saved.module.rpartition(".")[2] in _ATTENTION


# Megatron's names: plain and latent attention's projections, and the attention kernel.
_ATTENTION = frozenset(
    ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "core_attention")
)

POLICIES: dict[str, OffloadPolicy] = {
    "all": keep_nothing,
    "keep-attention-inputs": keep_attention_inputs,
}


def policy_of(text: str) -> OffloadPolicy:
    """The policy that ``--pp-offload-policy`` names.

    Raises:
        ConfigError: no such policy or function.
    """
    if text in POLICIES:
        return POLICIES[text]
    module, _, name = text.partition(":")
    if not name:
        raise ConfigError(
            f"--pp-offload-policy {text!r} is not known; give {', '.join(POLICIES)}, or "
            "package.module:function"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--pp-offload-policy {text} cannot be imported ({error})") from None
    policy: OffloadPolicy = found
    return policy


class PolicyFilter:
    """Asks a policy about tensors, with the module that is running.

    Args:
        models: model chunks, without wrappers; hooks record which of their modules is running.
    """

    def __init__(self, policy: OffloadPolicy, models: Sequence[torch.nn.Module]) -> None:
        self._policy = policy
        self._running: list[str] = []
        self._handles: list[Any] = []
        for model in models:
            for name, module in model.named_modules():
                self._handles += (
                    module.register_forward_pre_hook(functools.partial(self._enter, name)),
                    # After an exception too: recomputation ends with one.
                    module.register_forward_hook(
                        functools.partial(self._leave, name), always_call=True
                    ),
                )

    def __call__(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` stays on the device."""
        return bool(self._policy(SavedTensor(tensor, self._running[-1] if self._running else "")))

    def reset(self) -> None:
        """No module is running, whatever an exception left behind."""
        self._running.clear()

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, name: str, *unused: Any) -> None:
        self._running.append(name)

    def _leave(self, name: str, *unused: Any) -> None:
        # A pre-hook that failed before ours has not entered.
        if self._running and self._running[-1] == name:
            self._running.pop()
