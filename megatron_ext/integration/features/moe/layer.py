"""MPipeMoE inside Megatron: the routed part of every MoE layer, in chunks (docs/11).

``MoELayer.forward`` is replaced in its class. Routing, shared experts, latent projections and the
layer's parameters are Megatron's own; what lies between dispatch and combine is ours. Wherever
Megatron's own forward pass does the same, or is needed, it runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ....moe.exchange import Exchange, Groups
from ....moe.region import Region
from ....moe.saved import Memory
from ....moe.settings import Decides
from ....runtime.wgrad import WeightGradStore
from ... import saved_parameters
from ...errors import ConfigError
from ...gradients import accumulate, finish
from ...hooks import Hook

_STAGES = ["route", "expert_compute", "postprocess"]


class Policy(Protocol):
    """How the calls of a rank's MoE layers run."""

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does all that is asked for."""

    @property
    def restores(self) -> bool:
        """True where something is not kept for backward, now or later."""

    def built(self, layer: Any) -> None:
        """The model has ``layer``."""

    def of(self, layer: Any, region: Region, rows: torch.Tensor, probs: torch.Tensor) -> Decides:
        """For the next call of ``layer``, with ``rows`` that travel and their probabilities."""

    def close(self) -> None:
        """No call will come."""


class PipelinedMoE:
    """Runs the MoE layers of one rank.

    Args:
        policy: how calls run; asked at every call of a layer.
        store: of the weight gradients that W passes compute, where the schedule has such.
        options: of ``Memory``.

    Attributes:
        memory: what the layers share; None before the first call.
    """

    def __init__(
        self, policy: Policy, store: WeightGradStore | None = None, **options: Any
    ) -> None:
        self._policy, self._options = policy, options
        self.memory: Memory | None = None
        self._store = None if store is None else _Postponing(store)
        if store is not None:
            store.fused_experts = lambda: policy.restores
        self._regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()

    def hooks(self) -> tuple[Hook, ...]:
        """What has to be hooked."""
        return (
            Hook(
                ("megatron.core.transformer.moe.moe_layer:MoELayer.forward",),
                self._chunked,
                ("self", "hidden_states", "intermediate_tensors", "padding_mask"),
                "MoE layers would run unchunked",
            ),
            Hook(
                ("megatron.core.transformer.moe.moe_layer:MoELayer.__init__",),
                self._noted,
                ("self", "config"),
                "what MoE layers keep together would be unknown",
            ),
            *saved_parameters.hooks(self._parameter),
        )

    def _parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.memory is None else self.memory.parameter(tensor)

    def release(self) -> None:
        """Give threads and memory back."""
        self._policy.close()
        self._regions.clear()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        policy = self._policy

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            policy.built(self)

        return __init__

    def _chunked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(
            self: Any,
            hidden_states: torch.Tensor,
            intermediate_tensors: Any = None,
            padding_mask: torch.Tensor | None = None,
        ) -> Any:
            if ours._policy.stock or intermediate_tensors is not None or _needs_stock(self):
                return original(self, hidden_states, intermediate_tensors, padding_mask)
            return ours.forward(self, hidden_states, padding_mask)

        ours = self
        return forward

    def forward(
        self, layer: Any, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> Any:
        """``MoELayer.forward`` with the routed part in chunks.

        Args:
            layer: the ``MoELayer``.
            hidden_states: (sequence, batch, hidden).
            padding_mask: (batch, sequence), true for tokens that are none; or None.

        Returns:
            (output of the shape of ``hidden_states``, None).
        """
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()

        def compute(hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            shared = layer.shared_experts_compute(hidden)
            probs, routing_map = layer.route(hidden, mask)
            latent = getattr(layer.config, "moe_latent_size", None)
            if latent:
                hidden, _ = layer.fc1_latent_proj(hidden)
            rows = hidden.reshape(-1, hidden.shape[-1])
            region = self._region(layer, rows)
            decides = self._policy.of(layer, region, rows, probs)
            output = region(rows, probs, routing_map, decides)
            output = output.view(hidden.shape)
            if latent:
                output, _ = layer.fc2_latent_proj(output)
            return output if shared is None else output + shared

        if layer.moe_layer_recompute:
            from megatron.core import tensor_parallel

            if self._policy.restores:
                raise ConfigError(
                    "--moe-memory-reuse other than none restores the experts itself, so "
                    "--recompute-modules moe would compute them three times; drop one of both"
                )
            arguments = (hidden_states,) if padding_mask is None else (hidden_states, padding_mask)
            return tensor_parallel.checkpoint(compute, False, *arguments), None
        return compute(hidden_states, padding_mask), None

    def _region(self, layer: Any, rows: torch.Tensor) -> Region:
        region = self._regions.get(layer)
        if region is None:
            require_supported_layer(layer)
            if self.memory is None:
                self.memory = Memory.on(rows.device, **self._options)
            dispatcher = layer.token_dispatcher
            tensor = dispatcher.tp_group if dispatcher.tp_size > 1 else None
            groups = Groups(dispatcher.ep_group, tensor, dispatcher.tp_ep_group)
            region = self._regions[layer] = Region(
                Exchange(groups, layer.config.num_moe_experts),
                _experts(weakref.ref(layer)),
                list(layer.experts.parameters()),
                self.memory,
                self._store,
            )
        return region


class _Postponing:
    """What ``Region`` asks of the weight-gradient store."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store
        self.suspended, self.in_parts = store.suspended, store.in_parts

    @property
    def collecting(self) -> bool:
        return self._store.collecting

    def takes(self, parameter: torch.nn.Parameter, grad: torch.Tensor | None) -> bool:
        if grad is None or self._store.placeholder(parameter):
            return self._store.holds(parameter)
        if not self._store.holds(parameter):
            return False
        # B has part of it, such as a bias that is added outside the layer that postpones. It waits
        # for W, so that the order of summands does not depend on the schedule.
        with self._store.in_parts():
            task = functools.partial(accumulate, parameter, grad)
            self._store.put(parameter, task, done=finish)
        return True


def _experts(layer: weakref.ref[Any]) -> Callable[..., torch.Tensor]:
    # Weakly: the region is kept by the layer, as a key.
    def compute(rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        module: Any = layer()
        output, bias = module.experts(rows, counts, probs)
        if bias is not None:
            raise ConfigError(
                f"{type(module.experts).__name__} returns a bias to be added after combine, which "
                "MoE layers in chunks do not support; add --disable-bias-linear"
            )
        result: torch.Tensor = output
        return result

    return compute


def _needs_stock(layer: Any) -> bool:
    """True where Megatron's own forward has to run: evaluation and inference, graph capture."""
    if not layer.training or layer.fwd_execution_map != _STAGES:
        return True
    # Its own check, and its message.
    return layer.attn_tp_group.size() > 1 and not layer.config.sequence_parallel


def require_supported_layer(layer: Any) -> None:
    """Refuse a layer that cannot run in chunks, whoever built it.

    Raises:
        ConfigError: its dispatcher or one of its features.
    """
    config, name = layer.config, type(layer.token_dispatcher).__name__
    if config.moe_token_dispatcher_type != "alltoall":
        raise ConfigError(
            f"MoE layers in chunks need the all-to-all dispatcher, and this layer has {name}; set "
            "--moe-token-dispatcher-type alltoall"
        )
    if config.moe_pad_expert_input_to_capacity:
        raise ConfigError(
            "MoE layers in chunks do not pad experts to their capacity "
            "(--moe-pad-expert-input-to-capacity); drop it, capacity itself is supported"
        )
    if config.moe_shared_expert_overlap:
        raise ConfigError(
            "--moe-shared-expert-overlap runs parts of the shared experts inside the dispatcher, "
            "once a layer, which chunks would repeat; drop it"
        )
