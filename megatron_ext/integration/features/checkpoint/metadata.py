"""Metadata of a ``torch_dist`` checkpoint as Megatron loads it, from a file that may be damaged."""

from __future__ import annotations

import re
from typing import Any

from ...._input import shown
from ....checkpoints.folder import shape

_OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")


def read(folder: str) -> Any:
    """The metadata of an iteration's folder, which may be on remote storage.

    Raises:
        ValueError: it cannot be read.
    """
    # As Megatron itself does next; not for a folder that is only to be looked at. Its reader of
    # shapes makes tensors of them, which new releases of torch refuse.
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    try:
        return _get_filesystem_reader(folder).read_metadata()
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from None


def files(metadata: Any) -> dict[str, int]:
    """File -> bytes that it must have."""
    found: dict[str, int] = {}
    for place in (getattr(metadata, "storage_data", None) or {}).values():
        name = str(place.relative_path)
        found[name] = max(found.get(name, 0), int(place.offset) + int(place.length))
    return found


def model_shapes(metadata: Any) -> dict[str, tuple[int, ...]]:
    """Global shapes of the model's tensors.

    Raises:
        ValueError: it is not what Megatron writes.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = getattr(metadata, "state_dict_metadata", None)
    # Where Megatron stored a tensor in another shape, it kept the one it has in the model.
    original = getattr(metadata, "mcore_data", {})
    if not isinstance(entries, dict) or not isinstance(original, dict):
        raise ValueError("it does not list tensors by name; the file is damaged")
    shapes = {}
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata) or _OPTIMIZER_KEY.match(str(key)):
            continue
        kept = original.get(key, {})
        if not isinstance(kept, dict):
            raise ValueError(f"its note on {shown(key)} is {shown(kept)}; the file is damaged")
        shapes[str(key)] = shape(str(key), entry.size, kept)
    return shapes
