"""Lower bounds of the times of an MoE layer's plans, from trials of others.

By them ``moe/autotune.py`` leaves out trials of plans that cannot be the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..moe.plan import STOCK, LayerPlan, Strategy
from .moe_layer import GivenCosts, run_layer

_SHARES = 9  # of the time of Megatron's layer that messages may take, from none to most
_CONSISTENT = 0.02  # a trial may be so much faster than a possible device


class Bounds:
    """Lower bounds of the times of a layer's plans.

    Megatron's own layer runs four messages, the experts' forward pass and two gradients, one after
    the other. How its time is shared between messages and computation is not known; so a bound is
    the least over shares, of those that contradict no trial. It supposes that a chunk takes at
    least its share of the whole, that streams do not slow each other down, and that all
    computation can run beside messages, routing too.

    Args:
        times: of trials; without one of Megatron's layer, messages are supposed to take nothing.
        experts: their forward pass. copies: the experts' input to the host, and what lies inside.
    """

    def __init__(
        self,
        times: Mapping[LayerPlan, float],
        experts: float,
        copies: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        stock = times.get(STOCK, 0.0)
        # Two: weight gradients may wait for W passes, outside these times.
        most = max(0.0, stock - 2 * experts) / 4
        shares = (most * k / (_SHARES - 1) for k in range(_SHARES))
        devices = (
            GivenCosts(x, max(2 * experts, stock - 4 * x) / 3, *copies, again=experts / 2)
            for x in shares
        )
        tried = [plan for plan in times if plan.strategy is Strategy.NONE and not plan.stock]
        self._devices = [
            device
            for device in (devices if most else [next(devices)])
            if all(run_layer(one, device).time <= (1 + _CONSISTENT) * times[one] for one in tried)
        ]

    def least(self, plan: LayerPlan) -> float:
        """Of ``plan``, in the unit of the times; 0: trials contradict each other."""
        return min((run_layer(plan, one).time for one in self._devices), default=0.0)
