"""What a checkpoint's metadata says of its tensors, from a file that may be damaged."""

from __future__ import annotations

import re
from typing import Any

from ...._input import shown, whole

_OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")


def model_shapes(metadata: Any) -> dict[str, tuple[int, ...]]:
    """Global shapes of the model's tensors, from the metadata of a ``torch_dist`` checkpoint.

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
        size = kept.get("nd_reformulated_orig_global_shape", entry.size)
        if not isinstance(size, list | tuple):
            raise ValueError(f"it gives {shown(key)} the shape {shown(size)}; the file is damaged")
        shapes[str(key)] = tuple(whole(n, f"a size of {shown(key)}", 0, 1 << 60) for n in size)
    return shapes
