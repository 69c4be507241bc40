"""A model of a library as Megatron's arguments would describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .utils import unwrapped

# Argument -> attribute of a model's configuration, where they differ.
_RENAMED = {"num_experts": "num_moe_experts"}


class ModelArgs:
    """``MegatronArgs`` without a command line.

    Attributes are those of our options, then of the model's configuration, whose names are those
    of Megatron's arguments. An argument that a configuration does not have is missing here.

    Args:
        options: ours, by attribute name.
        models: the model's chunks on this rank.
        config: the model's ``TransformerConfig``.
        pp: ranks of its pipeline.
        minutes: that messages and collectives may take by the trainer's own limits.
        rank: of this process in the job.
        length, samples: of a microbatch, as the first call gives them.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        models: list[Any],
        config: Any,
        pp: int,
        minutes: float,
        rank: int,
        length: int,
        samples: int,
    ) -> None:
        wrappers = {name for model in models for name in _wrappers(model)}
        self._known: dict[str, Any] = {
            **options,
            "rank": rank,
            "pipeline_model_parallel_size": pp,
            "distributed_timeout_minutes": minutes,
            "use_megatron_fsdp": bool(wrappers & {"FullyShardedDataParallel", "MegatronFSDP"}),
            "use_torch_fsdp2": "TorchFullyShardedDataParallel" in wrappers,
            "seq_length": length,
            "micro_batch_size": samples,
            **_of_model(unwrapped(models[0]), config),
        }
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._known:
            return self._known[name]
        return getattr(self._config, _RENAMED.get(name, name))


def _of_model(model: Any, config: Any) -> dict[str, Any]:
    """Megatron's arguments that its models have under other names, as far as they have them."""
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    return {
        "padded_vocab_size": getattr(model, "vocab_size", None),
        "position_embedding_type": getattr(model, "position_embedding_type", None),
        "untie_embeddings_and_output_weights": not tied,
        "hybrid_layer_pattern": getattr(model, "hybrid_layer_pattern", None),
        "group_query_attention": getattr(config, "num_query_groups", None) is not None,
        "swiglu": getattr(config, "gated_linear_unit", False),
    }


def _wrappers(model: Any) -> list[str]:
    """Class names of what is around a model, outermost first."""
    names = []
    while hasattr(model, "module"):
        names.append(type(model).__name__)
        model = model.module
    return names
