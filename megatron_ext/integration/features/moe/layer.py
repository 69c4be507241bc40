"""MPipeMoE inside Megatron: the routed part of every MoE layer, in chunks.

``MoELayer.forward`` is replaced in its class. Routing, shared experts, latent projections and the
layer's parameters are Megatron's own; what lies between dispatch and combine is ours. Wherever
Megatron's own forward pass does the same, or is needed, it runs.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ....moe.autotune import StepReport, Tuner
from ....moe.buffers import Memory
from ....moe.plan import LayerPlan, Strategy, saved_bytes
from ....runtime.wgrad import WeightGradStore
from ... import saved_parameters
from ...callbacks import Callback, Step
from ...hooks import Hook, hooked
from ...pipeline import groups_of_call, pipeline_group
from ...targets import MOE_FORWARD, STEPS
from ...utils import chunks_of, device_of, gather_over, untraced
from .experts import ExpertGradients, FlexRegion, Region, checkpoint, region_of
from .flags import layer_shape

logger = logging.getLogger(__name__)

_STAGES = ["route", "expert_compute", "postprocess"]
_USABLE = 0.95  # of a device's memory: the allocator's pieces do not fit together exactly


class LayerStep(NamedTuple):
    """One step of a model, of which a process may have several, each with its own pipeline.

    Attributes:
        models: chunks on this rank.
        groups: all in which ranks run it together (see ``groups_of_call``).
        tokens: of all microbatches.
    """

    models: Sequence[Any]
    groups: Sequence[Any]
    tokens: int
    training: bool

    @classmethod
    def of_call(cls, call: Mapping[str, Any]) -> LayerStep:
        """Of a call of one of Megatron's forward-backward functions."""
        collection = call.get("pg_collection")
        pipeline = pipeline_group(call.get("p2p_communicator"), collection)
        return cls(
            chunks_of(call["model"]),
            groups_of_call(pipeline, collection),
            call["num_microbatches"] * call["seq_length"] * call["micro_batch_size"],
            not call.get("forward_only"),
        )

    @classmethod
    def planned(cls, step: Step) -> LayerStep:
        """Of one that a schedule of ours runs."""
        call, iteration = step.call, step.call.iteration
        tokens = iteration.num_microbatches * math.prod(call.batch)
        return cls(iteration.models, call.groups, tokens, step.training)

    def row_bytes(self, strategy: Strategy) -> float:
        """Bytes that a strategy keeps for a row of the first of this rank's MoE layers."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        modules = (module for model in self.models for module in model.modules())
        config = next((one.config for one in modules if isinstance(one, MoELayer)), None)
        return 0.0 if config is None else saved_bytes(layer_shape(config), 1, strategy)


class PipelinedMoE(Callback):
    """Runs the MoE layers of one rank.

    Args:
        plans: of every call, where it is one; otherwise the tuner tries them.
        store: of the weight gradients that W passes compute, where the schedule has such; then
            its hooks are in place.
        scheduled: a schedule of ours runs every pipeline.
        options: of ``Memory``.

    Attributes:
        plan: of the calls of a step.
        memory: what the layers share; None before the first call.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        store: WeightGradStore | None = None,
        scheduled: bool = False,
        **options: Any,
    ) -> None:
        self.plan, self._plans = plans[-1], plans
        self._scheduled, self._options = scheduled, options
        self.memory: Memory | None = None
        self._tuner: Tuner | None = None
        self._started = 0.0
        self._weights = ExpertGradients(store, lambda: not self.plan.strategy.keeps_products)
        self._regions: weakref.WeakKeyDictionary[Any, Region | FlexRegion] = (
            weakref.WeakKeyDictionary()
        )

    def hooks(self) -> Sequence[Hook]:
        return (*super().hooks(), *self._weights.hooks(), *saved_parameters.hooks())

    def close(self) -> None:
        self._regions.clear()
        self._weights.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def memory_on(self, device: torch.device) -> Memory:
        """What the layers share, made at the first call."""
        if self.memory is None:
            self.memory = Memory.on(device, **self._options)
        return self.memory

    # --- steps ---

    @hooked(
        STEPS,
        "MoE layers would not know where a step begins",
        when=lambda self: len(self._plans) > 1 or self.plan.strategy.copies,
    )
    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = LayerStep.of_call(kwargs)
        if self._scheduled and step.groups[0].size() > 1:  # ``begin`` and ``end`` come
            return original(*args, **kwargs)
        self.begin_step(step)
        result = original(*args, **kwargs)
        self.end_step(step)
        return result

    def begin(self, step: Step) -> None:
        self.begin_step(LayerStep.planned(step))

    def end(self, step: Step) -> None:
        self.end_step(LayerStep.planned(step))

    def begin_step(self, step: LayerStep) -> None:
        """Before the first pass: the plan of the step is known from here on."""
        if not step.training:
            return
        if self.memory is not None:
            self.memory.begin_step()
        if len(self._plans) == 1:
            return
        if self._tuner is None:
            self._tuner = Tuner(self._plans, step.row_bytes, _log)
            self.plan = self._tuner.plan
        if self._tuner.tries:
            device = device_of(step.models)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            self._started = time.perf_counter()

    def end_step(self, step: LayerStep) -> None:
        """After the last pass: all ranks that run the step choose the next one's plan."""
        tuner = self._tuner
        if tuner is None or not tuner.tries or not step.training:
            return
        room, device = float("inf"), device_of(step.models)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            free, _ = torch.cuda.mem_get_info(device)
            usable = _USABLE * (free + torch.cuda.memory_reserved(device))
            room = usable - torch.cuda.max_memory_allocated(device)
        seconds = (time.perf_counter() - self._started) / step.tokens
        rows = 0 if self.memory is None else self.memory.most_rows
        report = StepReport(seconds, room, rows)
        tuner.end_step(StepReport.of(gather_over(report, step.groups)))
        if tuner.plan != self.plan:
            self.plan = tuner.plan
            if self.memory is not None:
                self.memory.ring.clear()  # buffers of other sizes

    # --- calls ---

    @hooked(MOE_FORWARD, "MoE layers would run unchunked")
    def _chunked(
        self,
        original: Callable[..., Any],
        layer: Any,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        if self.plan.stock or intermediate_tensors is not None or _needs_stock(layer):
            return original(layer, hidden_states, intermediate_tensors, padding_mask)
        return self.forward(layer, hidden_states, padding_mask, self.plan)

    @untraced
    def forward(
        self,
        layer: Any,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        plan: LayerPlan,
    ) -> Any:
        """``MoELayer.forward`` with the routed part in chunks.

        Args:
            hidden_states: (sequence, batch, hidden).
            padding_mask: (batch, sequence), true for tokens that are none; or None.

        Returns:
            (output of the shape of ``hidden_states``, None).
        """
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()

        def compute(hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            shared = _Shared(layer, hidden)
            hidden = shared.rest
            probs, routing_map = layer.route(hidden, mask)
            latent = getattr(layer.config, "moe_latent_size", None)
            if latent:
                hidden, _ = layer.fc1_latent_proj(hidden)
            rows = hidden.reshape(-1, hidden.shape[-1])
            region = self._region(layer, rows.device)
            output = region(rows, probs, routing_map, plan, shared.compute)
            output = output.view(hidden.shape)
            if latent:
                output, _ = layer.fc2_latent_proj(output)
            return output if shared.output is None else output + shared.output

        if layer.moe_layer_recompute:
            arguments = (hidden_states,) if padding_mask is None else (hidden_states, padding_mask)
            return checkpoint(layer, compute, *arguments), None
        return compute(hidden_states, padding_mask), None

    def _region(self, layer: Any, device: torch.device) -> Region | FlexRegion:
        region = self._regions.get(layer)
        if region is None or not _has_parameters(region, layer.experts):
            memory = functools.partial(self.memory_on, device)
            region = self._regions[layer] = region_of(layer, device, memory, self._weights)
        return region


class _Shared:
    """The shared experts, which compute while the counts are on their way to the host.

    Megatron computes them before it routes, so autograd adds their gradient to the layer's input
    last. Here it does so, too, though they come later: sums have the same order. A gate takes the
    input a second time, which would give another order; so with one they compute at once.

    Args:
        layer: with or without them. hidden: its input.

    Attributes:
        rest: the input, for everything else.
        output: theirs; None: there are none.
    """

    def __init__(self, layer: Any, hidden: torch.Tensor) -> None:
        self._layer, self.output = layer, None
        self._own = self.rest = hidden
        self._late = layer.use_shared_expert and not layer.config.moe_shared_expert_gate
        if not self._late:
            self.output = layer.shared_experts_compute(hidden)
        elif hidden.requires_grad:
            self._own, self.rest = _Fork.apply(hidden)

    def compute(self) -> None:
        """Issue their forward pass."""
        if self._late:
            self.output = self._layer.shared_experts_compute(self._own)


class _Fork(torch.autograd.Function):
    """Twice the same tensor; the first one's gradient is added last."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden.view_as(hidden), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, shared: torch.Tensor, rest: torch.Tensor) -> Any:
        return rest + shared


def _has_parameters(region: Region | FlexRegion, experts: torch.nn.Module) -> bool:
    """False where others have taken their place (``load_state_dict(assign=True)``, adapters), which
    would get no gradients."""
    if isinstance(region, FlexRegion):
        return True
    return [*map(id, region.parameters)] == [*map(id, experts.parameters())]


def _needs_stock(layer: Any) -> bool:
    """True where Megatron's own forward has to run: evaluation and inference, graph capture."""
    if not layer.training or layer.fwd_execution_map != _STAGES:
        return True
    # Its own check, and its message.
    return layer.attn_tp_group.size() > 1 and not layer.config.sequence_parallel


def _log(text: str) -> None:
    if dist.get_rank() == 0:
        logger.info("MoE layers: %s", text)
