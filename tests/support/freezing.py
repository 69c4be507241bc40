"""Prelude of a training script: it freezes parameters, or hooks them, as it builds its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def prepare(value: dict[str, Any], rank: int, folder: Path) -> None:
    """Freeze ``value["frozen"]`` and hook ``value["hooked"]``, names of parameters, where they are;
    double what the modules ``value["doubled"]`` return ("": that of the model).

    See ``ScriptServer.run``.
    """
    import megatron.training

    original = megatron.training.pretrain

    def change(models: list[Any]) -> list[Any]:
        for name, parameter in (pair for model in models for pair in model.named_parameters()):
            if name in value.get("frozen", ()):
                parameter.requires_grad_(False)
            if name in value.get("hooked", ()):
                parameter.register_hook(lambda grad: grad * 0)
        for name, module in (pair for model in models for pair in model.named_modules()):
            if name in value.get("doubled", ()):
                module.register_forward_hook(_double)
        return models

    def pretrain(config: Any, *args: Any, **kwargs: Any) -> Any:
        config.model.pre_wrap_hooks.append(change)
        return original(config, *args, **kwargs)

    megatron.training.pretrain = pretrain


def _double(module: Any, given: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2
