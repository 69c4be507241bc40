"""Float64 wherever Megatron asks for float32.

Megatron names float32 in many places beside ``--params-dtype``: losses, routers, rotary angles,
gradient buffers, softmax. ``install()`` changes what the name means in this process, before
Megatron is imported, so that sums in another order differ by 1e-15 and nothing hides behind that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install() -> None:
    """Let ``torch.float32`` and what stands for it mean float64 in this process."""
    # Tables from these names to types, made once when first used.
    torch.storage._dtype_to_storage_type_map()
    torch.storage._storage_type_to_dtype_map()
    torch._weights_only_unpickler._get_allowed_globals()
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[assignment, misc]
    torch.nn.Module.float = torch.nn.Module.double  # type: ignore[method-assign]
    kind = torch.Tensor.type

    @functools.wraps(kind)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers sort parameters by these names.
        result = kind(self, *args, **kwargs)
        return result.replace("DoubleTensor", "FloatTensor") if isinstance(result, str) else result

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
