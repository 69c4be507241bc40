"""Which weights have hooks on any rank that adds to the same gradients.

With sequence parallelism B scatters and W gathers, or B does both where a hook waits for the weight
gradient; where hooks of parameters start the reduction of gradients, its buckets start in the order
in which they are complete. All ranks must do it in the same order, and one of them alone may have
the hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....runtime.weight_hooks import foreign_hooks
from ...utils import watched

_ELSEWHERE = ("hook on another rank",)
_Groups = Mapping[Any, Sequence[torch.nn.Parameter]]


def hooks_of_all_ranks(
    models: Sequence[torch.nn.Module], tensor_ranks: bool, replicas: Sequence[Any] = ()
) -> dict[int, tuple[str, ...]]:
    """Identity of a parameter -> its hooks: those of this rank, or that another rank has some.

    One small reduction a group; the ranks of each have the same modules.

    Args:
        models: the chunks of this rank.
        tensor_ranks: those of its tensor-parallel groups count, with sequence parallelism.
        replicas: chunks in Megatron's data parallelism whose replicas count.
    """
    agreed: dict[int, tuple[str, ...]] = {}
    if tensor_ranks:
        _agree(_of_tensor_ranks(models), "tensor-parallel ranks", agreed)
    _agree(_of_replicas(replicas), "data replicas", agreed)  # each has agreed by itself
    return agreed


def _agree(groups: _Groups, who: str, agreed: dict[int, tuple[str, ...]]) -> None:
    for group, parameters in groups.items():
        if not parameters:
            continue
        mine = [agreed.get(id(one)) or foreign_hooks(one) for one in parameters]
        device = parameters[0].device
        found = torch.tensor([bool(hooks) for hooks in mine], dtype=torch.uint8, device=device)
        with watched(f"for {who} to compare hooks on weights"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            hooked = found.tolist()
        for parameter, own, any_rank in zip(parameters, mine, hooked):
            if any_rank:
                agreed[id(parameter)] = own or _ELSEWHERE


def _of_tensor_ranks(models: Iterable[torch.nn.Module]) -> _Groups:
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for model in models:
        for module in model.modules():
            has = vars(module)
            group = has.get("tp_group")
            if has.get("sequence_parallel") and group is not None and group.size() > 1:
                groups.setdefault(group, []).extend(module.parameters(recurse=False))
    return groups


def _of_replicas(models: Iterable[Any]) -> _Groups:
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for model in models:
        for parameter in model.parameters():
            dense = getattr(parameter, "allreduce", True)
            group = getattr(model, "dp_cp_group" if dense else "expt_dp_group", None)
            if parameter.requires_grad and group is not None and group.size() > 1:
                groups.setdefault(group, []).append(parameter)
    return groups
