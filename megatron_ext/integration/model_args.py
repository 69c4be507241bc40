"""A model of a library as Megatron's arguments would describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Argument -> attribute of a model's configuration, where they differ.
_RENAMED = {"num_experts": "num_moe_experts"}
_MINUTES = 10  # Megatron's default of --distributed-timeout-minutes


class ModelArgs:
    """``MegatronArgs`` without a command line.

    Attributes are those of our options, then of the model's configuration, whose names are those
    of Megatron's arguments. An argument that a configuration does not have is missing here.

    Args:
        options: ours, by attribute name.
        models: the model's chunks on this rank.
        config: the model's ``TransformerConfig``.
        pp: ranks of its pipeline.
        rank: of this process in the job.
    """

    def __init__(
        self, options: Mapping[str, Any], models: list[Any], config: Any, pp: int, rank: int
    ) -> None:
        wrappers = {name for model in models for name in _wrappers(model)}
        self._known: dict[str, Any] = {
            **options,
            "rank": rank,
            "pipeline_model_parallel_size": pp,
            "distributed_timeout_minutes": _MINUTES,
            "use_megatron_fsdp": bool(wrappers & {"FullyShardedDataParallel", "MegatronFSDP"}),
            "use_torch_fsdp2": "TorchFullyShardedDataParallel" in wrappers,
        }
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._known:
            return self._known[name]
        return getattr(self._config, _RENAMED.get(name, name))


def _wrappers(model: Any) -> list[str]:
    """Class names of what is around a model, outermost first."""
    names = []
    while hasattr(model, "module"):
        names.append(type(model).__name__)
        model = model.module
    return names
