"""Parameters of a model and of a checkpoint, for a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...._input import shown
from ...arguments import MegatronArgs
from ...layout import LayerPattern
from . import integrity

# Flags that change which parameters a model has: shown where a checkpoint's differ.
_MODEL_FLAGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "mtp_num_layers",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "padded_vocab_size",
    "transformer_impl",
)
_SHOWN = 4


def shapes(part: Any) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Global shape of each tensor in a sharded state, by global name, and if it may differ."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    found = {}
    for value in nested_values(part):
        # A factory stands for tensors that are saved in another form, e.g. two halves.
        built = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for tensor in built:
            if isinstance(tensor, ShardedTensor):
                shape = tuple(int(n) for n in tensor.global_shape)
                found[str(tensor.key)] = (shape, bool(tensor.allow_shape_mismatch))
    return found


def shapes_on_disk(folder: str, known: Any) -> dict[str, tuple[int, ...]]:
    """Global shapes of the model's tensors in a checkpoint; read by one rank for all.

    Args:
        folder: the iteration's.
        known: the metadata of that folder, where this rank has it already.

    Raises:
        ConfigError: it cannot be read.
    """

    def read() -> dict[str, tuple[int, ...]]:
        try:
            found = integrity.read(folder) if known is None else known
            return integrity.model_shapes(found)
        except ValueError as error:
            raise ValueError(
                f"cannot read the metadata of the checkpoint {folder}: {error}"
            ) from None

    return integrity.from_rank_0(read)


def shapes_of(
    keys: list[str],
    held: Mapping[str, tuple[int, ...]],
    model: Mapping[str, tuple[tuple[int, ...], bool]],
) -> str:
    return _some(f"{key} is {model[key][0]}, not {held[key]}" for key in keys)


def differing_flags(args: MegatronArgs, saved: Any) -> str:
    """The model's flags that a checkpoint was saved with and this run has not."""
    values = [
        f"--{name.replace('_', '-')} {shown(getattr(saved, name))} "
        f"(here {shown(getattr(args, name, None))})"
        for name in _MODEL_FLAGS
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name, None)
    ]
    here, there = LayerPattern.of(args), LayerPattern.of(saved)
    texts = [None if p is None else p.text.replace("|", "") for p in (here, there)]
    if texts[0] != texts[1] and there is not None:
        values.append(f"{there.flag} {texts[1]} (here {texts[0]})")
    return f"it was saved with {', '.join(values)}" if values else ""


def named(names: Sequence[str]) -> dict[str, Any]:
    """Facts for a rule."""
    return {"count": len(names), "names": _some(names)}


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
