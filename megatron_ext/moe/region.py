"""dispatch -> experts -> combine of an MoE layer, in chunks that overlap, as one autograd function.

Forward, chunk by chunk: S (dispatch) of the next chunk is on its way while this one's experts
compute, and R (combine) of the one before comes back; ``LayerPlan.operations`` is the order, the
same on every rank (MPipeMoE, section III-B). Backward is the mirror image, last chunk first.

The parameters of the experts are inputs of the function. So however many chunks there are, autograd
sees one gradient a parameter and call, and Megatron's data parallel reduction counts it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..offload.saved import Selection
from .buffers import Memory
from .exchange import Exchange
from .graph import Linears
from .passes import Backward, Call, Forward
from .plan import LayerPlan, Strategy

# (x (rows, width), rows of each local expert on the host, probabilities (rows,)) -> (rows, width)
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class GradientStore(Protocol):
    """Takes over weight gradients of the experts while their backward pass runs."""

    def suspended(self) -> AbstractContextManager[None]:
        """Inside, it takes none."""

    def call(self) -> AbstractContextManager[None]:
        """The backward pass of one call, until the last chunk's input gradient has been issued."""

    def takes(self, parameter: Any, grad: torch.Tensor | None) -> bool:
        """True if it owes the gradient of ``parameter``: it will compute what is missing from
        ``grad``, which is what a chunk gave or None, and add ``grad`` if that is real."""

    def gradients(self, parameters: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """After ``call``: what it owes of ``parameters``, computed now over the rows of all
        chunks; None for what a W pass of the schedule will compute."""


class Region:
    """The region of one layer.

    Args:
        exchange: the layer's collectives.
        experts: computes with this rank's experts.
        parameters: theirs, all that may require gradients.
        memory: shared with the rank's other layers.
        store: computes the experts' weight gradients once for all chunks, where their inputs are
            kept; otherwise these lie in buffers that the next chunk takes, and each chunk adds its
            part. Without a store, each chunk does so under every strategy.
        linears: (fc1, fc2) modules inside the experts, called in this order; what lies between and
            behind them costs little. Without them whatever is computed again is all that the
            experts compute, and ``s0`` keeps as much as ``none``.
        recomputes_activation: ``none`` is ``s0``.
    """

    def __init__(
        self,
        exchange: Exchange,
        experts: Experts,
        parameters: Sequence[torch.nn.Parameter],
        memory: Memory,
        store: GradientStore | None = None,
        linears: Linears = (),
        recomputes_activation: bool = False,
    ) -> None:
        self.exchange, self.experts, self.memory = exchange, experts, memory
        self.parameters, self.store, self.linears = list(parameters), store, linears
        self._recomputes_activation = recomputes_activation
        kind = memory.device.torch_device.type
        self._selection = Selection(kind, self.parameters.copy, memory.min_bytes)
        self._ends: list[int] = []

    def selection(self) -> Selection:
        """Of tensors that may leave the device: not the parameters."""
        ends = [p.data_ptr() for p in (*self.parameters[:1], *self.parameters[-1:])]
        if self._ends != ends:  # also where Megatron has moved them to one buffer
            self._ends = ends
            self._selection.end_step()
        return self._selection

    def __call__(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        plan: LayerPlan,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Dispatch, compute and combine.

        Args:
            hidden: (tokens, width).
            probs: of each token for each expert, (tokens, experts).
            routing_map: which of them count, likewise, bool.
            plan: the same on every rank of the layer's groups; there may be more chunks than
                tokens.
            meanwhile: issues other work of the layer, which runs while the counts are on their way
                to the host.

        Returns:
            (tokens, width): for each token the sum over its experts.

        Raises:
            ValueError: shapes that do not match.
        """
        wanted = (hidden.shape[0], self.exchange.experts)
        if hidden.dim() != 2 or probs.shape != wanted or routing_map.shape != wanted:
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, probs {tuple(probs.shape)} and routing map "
                f"{tuple(routing_map.shape)} do not match: the latter two must be {wanted}"
            )
        trained = [p for p in self.parameters if p.requires_grad]
        inputs = (hidden, probs, *trained)
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if self._recomputes_activation and plan.strategy is Strategy.NONE:
            plan = plan._replace(strategy=Strategy.S0)
        with torch.no_grad():
            counted = self.exchange.count(routing_map, plan.chunks)
        if meanwhile is not None:
            meanwhile()
        with torch.no_grad():
            table, sent = self.exchange.split(counted)
        call = Call(self, plan, table, sent, trained if saves else None, hidden, probs)
        result: torch.Tensor = _Function.apply(call, *inputs)
        return result


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor) -> torch.Tensor:
        out = Forward(call, inputs[0].detach(), inputs[1].detach()).run()
        if call.saves:
            ctx.call = call
            ctx.save_for_backward(*call.take_saved(inputs[0]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (None, *Backward(ctx.call, ctx.saved_tensors, grad).run())
