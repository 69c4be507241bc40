"""Offload policies: which saved tensors of an offloaded activation set stay on the device.

The schedule decides which *sets* are offloaded; a policy decides about single tensors inside them.
A policy is a function of ``Saved`` that returns True to keep the tensor on the device. To add one,
write it here and list it in ``POLICIES``; ``--pp-offload-policy package.module:function`` names
one that lies elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd saves during the forward pass of a model chunk.

    Attributes:
        tensor: of any shape and dtype, on the device.
        module: dotted name, inside the chunk, of the innermost module that is running, e.g.
            ``decoder.layers.0.self_attention.linear_qkv``; empty outside of all.
    """

    tensor: torch.Tensor
    module: str


Policy = Callable[[Saved], bool]


def keep_nothing(saved: Saved) -> bool:
    """Offload all that can be moved."""
    return False


def keep_attention_inputs(saved: Saved) -> bool:
    """Keep the input of the query-key-value projections, and query, key and value.

    They are needed at once when a layer's attention backward starts; the MLP's tensors, more than
    half of a dense layer's bytes, are still offloaded.
    """
    *_, last = saved.module.split(".")
    return last in _ATTENTION


# Megatron's names: plain and latent attention's projections, and the attention kernel.
_ATTENTION = frozenset(
    ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "core_attention")
)

POLICIES: dict[str, Policy] = {
    "all": keep_nothing,
    "keep-attention-inputs": keep_attention_inputs,
}


def policy_of(text: str) -> Policy:
    """The policy that ``--pp-offload-policy`` names.

    Raises:
        ConfigError: no such policy or function.
    """
    if text in POLICIES:
        return POLICIES[text]
    module, _, name = text.partition(":")
    if not name:
        raise ConfigError(
            f"--pp-offload-policy {text} is not known; use {', '.join(POLICIES)}, or "
            "package.module:function of a function that takes a saved tensor and returns True to "
            "keep it on the device"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--pp-offload-policy {text} cannot be imported ({error}); put its folder on "
            "PYTHONPATH on every node"
        ) from None
    if not callable(found):
        raise ConfigError(
            f"--pp-offload-policy {text} is a {type(found).__name__}, but a function is needed"
        )
    policy: Policy = found
    return policy


class PolicyFilter:
    """Asks a policy about tensors, with the module that is running.

    Args:
        policy: of the run.
        models: model chunks, without wrappers; hooks note which of their modules runs.
    """

    def __init__(self, policy: Policy, models: Sequence[torch.nn.Module]) -> None:
        self._policy = policy
        self._running: list[str] = []
        self._handles: list[Any] = []
        for model in models:
            for name, module in model.named_modules():
                self._handles += (
                    module.register_forward_pre_hook(self._enter(name)),
                    module.register_forward_hook(self._leave, always_call=True),
                )

    def __call__(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` stays on the device."""
        return bool(self._policy(Saved(tensor, self._running[-1] if self._running else "")))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*unused: Any) -> None:
            self._running.append(name)

        return enter

    def _leave(self, *unused: Any) -> None:
        self._running.pop()
