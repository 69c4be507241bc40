"""Device arguments: every CUDA device named in a call means the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

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


def _device_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its ``device`` keyword is rewritten and nothing is pinned."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            # Pinning asks the CUDA driver for page-locked memory.
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


def _first_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method whose device may also be its first positional argument (``.to``)."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(self, *args, **kwargs)

    return wrapper


def _patch_factories() -> None:
    """Rewrite ``device='cuda'`` in tensor factories."""
    # ``with torch.device('meta')`` recognizes factories by identity and remembers the set at its
    # first use: let it remember torch's own functions, which our wrappers still call.
    from torch.utils import _device

    _device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _device_keyword(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _device_keyword(getattr(torch.Tensor, name)))

    # ``with torch.device('cuda')`` and torch.set_default_device('cuda').
    context: Any = _device.DeviceContext
    context_init = context.__init__

    @functools.wraps(context_init)
    def init(self: Any, device: Any) -> None:
        context_init(self, on_cpu(device))

    context.__init__ = init


def _patch_moves() -> None:
    """Make moves to a GPU of tensors, modules and loaded files stay on the CPU."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.to = _first_argument(tensor.to)
    module.to = _first_argument(module.to)
    module.to_empty = _device_keyword(module.to_empty)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    # ``.cuda()`` of a tensor that is on "the GPU" already returns that tensor.
    tensor.cuda = stay
    module.cuda = stay
    tensor.pin_memory = stay
    tensor.record_stream = lambda self, stream: None

    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Tensors saved on a GPU machine name cuda as their home.
        location = "cpu" if map_location is None else on_cpu(map_location)
        return load(f, location, *args, **kwargs)

    torch.load = load_on_cpu


def _patch_types() -> None:
    """Make type strings and typed constructors read as on a GPU.

    Megatron's optimizers sort parameters by ``param.type()`` and refuse everything that is not
    one of the three CUDA types.
    """
    tensor: Any = torch.Tensor
    tensor_type = tensor.type

    @functools.wraps(tensor_type)
    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = tensor_type(self)
            if name.startswith("torch.") and not name.startswith(_CUDA_TYPE):
                name = _CUDA_TYPE + name.removeprefix("torch.")
            return name
        if isinstance(dtype, str) and dtype.startswith(_CUDA_TYPE):
            dtype = "torch." + dtype.removeprefix(_CUDA_TYPE)
        return tensor_type(self, dtype, *args, **kwargs)

    tensor.type = cuda_type
    for name in _TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _patch_autocast() -> None:
    """Let ``torch.autocast('cuda')`` be CPU autocast instead of a context that does nothing."""
    autocast: Any = torch.autocast
    autocast_init = autocast.__init__

    @functools.wraps(autocast_init)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    autocast.__init__ = init


def install() -> None:
    """Rebind torch's factories, moves and type names. Call once, from ``megatron_ext.cpu``."""
    _patch_factories()
    _patch_moves()
    _patch_types()
    _patch_autocast()
