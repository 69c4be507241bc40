"""Which weights have hooks on any tensor-parallel rank.

With sequence parallelism B scatters and W gathers, or B does both where a hook waits for the weight
gradient. All ranks must do it in the same order, and one of them alone may have the hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....runtime.weight_hooks import foreign_hooks
from ...utils import watched

_ELSEWHERE = ("hook on another tensor-parallel rank",)


def hooks_of_all_ranks(models: Sequence[torch.nn.Module]) -> dict[int, tuple[str, ...]]:
    """Identity of a parameter -> its hooks: those of this rank, or that another rank has some.

    One small reduction of a tensor-parallel group; nothing without sequence parallelism.

    Args:
        models: the chunks of this rank; other ranks of its groups have the same modules.
    """
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for model in models:
        for module in model.modules():
            has = vars(module)
            group = has.get("tp_group")
            if has.get("sequence_parallel") and group is not None and group.size() > 1:
                groups.setdefault(group, []).extend(module.parameters(recurse=False))
    agreed: dict[int, tuple[str, ...]] = {}
    for group, parameters in groups.items():
        if not parameters:
            continue
        mine = [foreign_hooks(one) for one in parameters]
        device = parameters[0].device
        found = torch.tensor([bool(hooks) for hooks in mine], dtype=torch.uint8, device=device)
        with watched("for tensor-parallel ranks to compare hooks on weights"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            hooked = found.tolist()
        for parameter, own, any_rank in zip(parameters, mine, hooked):
            if any_rank:
                agreed[id(parameter)] = own or _ELSEWHERE
    return agreed
