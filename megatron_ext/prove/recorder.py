"""What every rank writes down: gradients and weights of every parameter, by global names.

``record`` hooks Megatron's training loop. A rank then writes ``rankR-stepN.pt`` after every step:
a list of (``gradient`` or ``weight``, global name, offset in the global tensor, its shape, tensor);
gradients as the optimizer gets them, weights after the step. Names and offsets are those of
Megatron's checkpoints (``sharded_state_dict``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def record(rank: int, folder: Path) -> None:
    """Record this rank's training into ``folder``."""
    from megatron.training import training

    # All tensors of so small a model would stay on the device.
    os.environ.setdefault("MEGATRON_EXT_OFFLOAD_MIN_BYTES", "1")
    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        _hook(result[0], result[1], f"{folder}/rank{rank}-step")
        return result

    training.setup_model_and_optimizer = recorded


def _hook(chunks: list[Any], optimizer: Any, path: str) -> None:
    """Write a file after each of the optimizer's steps."""
    from megatron.core.utils import unwrap_model

    models = [unwrap_model(chunk) for chunk in chunks]
    step, number = optimizer.step, 0

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        values = list(_values(models, _gradients(models, optimizer)))
        result = step(*args, **kwargs)
        values += _values(models, _weights(models, optimizer))
        torch.save(values, f"{path}{number}.pt")
        return result

    optimizer.step = stepped


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _alike(optimizer: Any) -> list[Any]:
    """The parameters of which this optimizer's ranks each have a part, in an order that all of
    them share; none for an optimizer that has whole ones."""
    if not hasattr(optimizer, "model_param_group_index_map"):
        return []
    return [p for buffer in optimizer.buffers for p in buffer.params]


def _whole(optimizer: Any, parameter: Any, part: Any) -> torch.Tensor:
    """The parameter's tensor; of each rank's part, which ``part`` gives for a range of it."""
    whole = torch.zeros(parameter.shape, dtype=parameter.main_grad.dtype)
    if parameter in optimizer.model_param_group_index_map:
        own = optimizer._get_model_param_range_map(parameter)["param"]
        span = slice(own.start, own.end)
        whole.view(-1)[span] = part(span).detach().to(whole.dtype)
    torch.distributed.all_reduce(whole, group=optimizer.data_parallel_group)
    return whole


Found = Iterator[tuple[Any, str, torch.Tensor]]


def _gradients(models: list[Any], optimizer: Any) -> Found:
    """(parameter, ``gradient``, tensor) of all parameters."""
    parts = {id(p) for one in _optimizers(optimizer) for p in _alike(one)}
    for model in models:
        for parameter in model.parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None and id(parameter) not in parts:
                yield parameter, "gradient", gradient.detach().clone()
    for one in _optimizers(optimizer):
        for p in _alike(one):
            yield p, "gradient", _whole(one, p, lambda span, p=p: p.main_grad.view(-1)[span])


def _weights(models: list[Any], optimizer: Any) -> Found:
    """(parameter, ``weight``, tensor) of all weights, frozen ones too."""
    late: dict[int, Any] = {}
    for one in _optimizers(optimizer):
        # Its ranks get each other's parts in the next forward pass only.
        if getattr(getattr(one, "ddp_config", None), "overlap_param_gather", False):
            late |= {id(p): one for p in _alike(one)}
    for model in models:
        for parameter in model.parameters():
            if id(parameter) not in late:
                yield parameter, "weight", parameter.detach().clone()
    for one in dict.fromkeys(late.values()):
        for p in _alike(one):
            yield p, "weight", _whole(one, p, lambda _, p=p, one=one: _main(one, p))


def _main(optimizer: Any, parameter: Any) -> torch.Tensor:
    """This rank's part of the weight that the optimizer updates."""
    found: torch.Tensor = optimizer._get_main_param_and_optimizer_states(parameter)["param"]
    return found


def _values(models: list[Any], given: Found) -> Iterator[tuple[Any, ...]]:
    """``given`` in global names, in the pieces that Megatron's checkpoints have."""
    entries = {entry.data.data_ptr(): entry for model in models for entry in _entries(model)}
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    for parameter, what, tensor in given:
        entry = entries.get(parameter.data_ptr())
        if entry is None:
            yield what, names[id(parameter)], None, None, tensor
            continue
        for piece in _pieces(entry, tensor.view(parameter.shape)):
            data = piece.data.detach().reshape((1,) * piece.prepend_axis_num + piece.data.shape)
            offset, shape = tuple(piece.global_offset), tuple(piece.global_shape)
            yield what, piece.key, offset, shape, data.clone()


def _entries(model: Any) -> Iterator[Any]:
    """The sharded tensors, and factories of such, of a model chunk's checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.training import get_args
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    metadata = _build_sharded_state_dict_metadata(get_args())
    state = model.sharded_state_dict(metadata=metadata)
    for entry in _found(state, (ShardedTensor, ShardedTensorFactory)):
        if torch.is_tensor(entry.data) and entry.data.numel():
            yield entry


def _pieces(entry: Any, tensor: torch.Tensor) -> Iterator[Any]:
    """The sharded tensors that ``entry`` makes of another tensor of its parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if isinstance(entry, ShardedTensor):
        yield dataclasses.replace(entry, data=tensor, dtype=tensor.dtype)
    else:
        yield from _found(dataclasses.replace(entry, data=tensor).build(), (ShardedTensor,))


def _found(state: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """Everything of these ``kinds`` in nested dictionaries and lists."""
    if isinstance(state, kinds):
        yield state
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            yield from _found(one, kinds)
