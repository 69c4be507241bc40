"""Device arguments: every CUDA device named in a call means the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .rebinding import around

# Functions that create a tensor from a ``device=`` keyword.
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full"),
    *("full_like", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros", "zeros_like"),
)
_TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_TYPES = ("BFloat16", "Bool", "Byte", "Double", "Float", "Half", "Int", "Long", "Short")

_CUDA_TYPE = "torch.cuda."


def on_cpu(device: Any) -> Any:
    """Return the device to use instead of ``device``: CPU for any CUDA device, else unchanged.

    Args:
        device: what torch accepts as a device (string, ``torch.device``, index) or None. A bare
            index means a CUDA device to torch.
    """
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str):
        return torch.device("cpu") if device.split(":")[0] == "cuda" else device
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def device_keyword(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """With its ``device`` keyword rewritten, and without pinning."""
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    if kwargs.get("pin_memory"):
        # Pinning asks the CUDA driver for page-locked memory.
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def _to(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The device may also be the first positional argument."""
    if args:
        args = (on_cpu(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    return original(self, *args, **kwargs)


def _patch_factories() -> None:
    """Rewrite ``device='cuda'`` in tensor factories."""
    # ``with torch.device('meta')`` recognizes factories by identity and remembers the set at its
    # first use: let it remember torch's own functions, which our wrappers still call.
    from torch.utils import _device

    _device._device_constructors()
    for name in _FACTORIES:
        around(torch, name, device_keyword)
    for name in _TENSOR_FACTORIES:
        around(torch.Tensor, name, device_keyword)

    # ``with torch.device('cuda')`` and torch.set_default_device('cuda').
    around(
        _device.DeviceContext,
        "__init__",
        lambda init, self, device: init(self, on_cpu(device)),
    )


def _patch_moves() -> None:
    """Make moves to a GPU of tensors, modules and loaded files stay on the CPU."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    around(tensor, "to", _to)
    around(module, "to", _to)
    around(module, "to_empty", device_keyword)
    around(torch, "load", _load)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    # ``.cuda()`` of a tensor that is on "the GPU" already returns that tensor.
    tensor.cuda = stay
    module.cuda = stay
    tensor.pin_memory = stay
    tensor.record_stream = lambda self, stream: None


def _load(
    original: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    # Tensors saved on a GPU machine name cuda as their home.
    location = "cpu" if map_location is None else on_cpu(map_location)
    return original(f, location, *args, **kwargs)


def _patch_types() -> None:
    """Make type strings and typed constructors read as on a GPU.

    Megatron's optimizers sort parameters by ``param.type()`` and refuse everything that is not
    one of the three CUDA types.
    """
    around(torch.Tensor, "type", _type)
    for name in _TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _type(
    original: Callable[..., Any], self: Any, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if dtype is None:
        name: str = original(self)
        if name.startswith("torch.") and not name.startswith(_CUDA_TYPE):
            name = _CUDA_TYPE + name.removeprefix("torch.")
        return name
    if isinstance(dtype, str) and dtype.startswith(_CUDA_TYPE):
        dtype = "torch." + dtype.removeprefix(_CUDA_TYPE)
    return original(self, dtype, *args, **kwargs)


def _autocast(
    original: Callable[..., Any], self: Any, device_type: str, *args: Any, **kwargs: Any
) -> None:
    """CPU autocast; of ``cuda`` it would do nothing."""
    original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def install() -> None:
    """Rebind torch's factories, moves and type names. Call once, from ``megatron_ext.cpu``."""
    _patch_factories()
    _patch_moves()
    _patch_types()
    around(torch.autocast, "__init__", _autocast)
