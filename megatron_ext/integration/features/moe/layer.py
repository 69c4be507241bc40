"""MPipeMoE inside Megatron: the routed part of every MoE layer, in chunks.

See docs/concepts/moe-runtime.md.

``MoELayer.forward`` is replaced in its class. Routing, shared experts, latent projections and the
layer's parameters are Megatron's own; what lies between dispatch and combine is ours. Wherever
Megatron's own forward pass does the same, or is needed, it runs.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ....moe.buffers import Memory
from ....moe.plan import ExecutionPolicy, LayerPlan, Strategy
from ....runtime.wgrad import WeightGradStore
from ... import saved_parameters
from ...callbacks import Callback, Step
from ...hooks import Hook, hooked
from ...pipeline import groups_of_call, pipeline_group
from ...targets import MOE_FORWARD, MOE_INIT, STEPS
from ...utils import chunks_of, untraced
from .experts import ExpertGradients, FlexRegion, Region, checkpoint, region_of
from .flags import Sets, require_supported

_STAGES = ["route", "expert_compute", "postprocess"]


class CallTimer:
    """Device time of one layer call, forward and backward, read when both are over.

    On a GPU these are events on the streams of the passes, and nothing waits for them.

    Args:
        hidden: the layer's input.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self._cuda, self.tokens = hidden.is_cuda, hidden.numel() // hidden.shape[-1]
        self._points = list[Any]()

    def _record(self, _: Any = None) -> None:
        point: Any = time.perf_counter()
        if self._cuda:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        self._points.append(point)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input, to be used in its place."""
        self._record()
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(self._record)
        return hidden

    def end(self, output: torch.Tensor) -> None:
        """The layer's output."""
        self._record()
        if output.requires_grad:
            output.register_hook(self._record)

    def ms_per_token(self) -> float | None:
        """Of forward and backward; None where backward has not run to the input. Waits for the
        device."""
        if len(self._points) != 4 or not self.tokens:
            return None
        if self._cuda:
            self._points[-1].synchronize()
        pairs = list(zip(self._points[::2], self._points[1::2]))
        milliseconds: float
        if self._cuda:
            milliseconds = sum(start.elapsed_time(end) for start, end in pairs)
        else:
            milliseconds = 1e3 * sum(end - start for start, end in pairs)
        return milliseconds / self.tokens


class LayerStep(NamedTuple):
    """One step of a model, of which a process may have several, each with its own pipeline.

    Attributes:
        models: chunks on this rank.
        groups: all in which ranks run it together (see ``groups_of_call``).
        tokens: of a microbatch.
        plan: by which it runs; None: by Megatron's own schedule.
    """

    models: Sequence[Any]
    pipeline: Any
    groups: Sequence[Any]
    microbatches: int
    tokens: int
    training: bool
    plan: Any = None

    @classmethod
    def of_call(cls, call: Mapping[str, Any]) -> LayerStep:
        """Of a call of one of Megatron's forward-backward functions."""
        collection = call.get("pg_collection")
        pipeline = pipeline_group(call.get("p2p_communicator"), collection)
        return cls(
            chunks_of(call["model"]),
            pipeline,
            groups_of_call(pipeline, collection),
            call["num_microbatches"],
            call["seq_length"] * call["micro_batch_size"],
            not call.get("forward_only"),
        )

    @classmethod
    def planned(cls, step: Step) -> LayerStep:
        """Of one that a schedule of ours runs."""
        call, iteration = step.call, step.call.iteration
        return cls(
            iteration.models,
            call.group,
            call.groups,
            iteration.num_microbatches,
            math.prod(call.batch),
            step.training,
            step.plan,
        )

    def layers(self) -> list[Any]:
        """The MoE layers on this rank."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return [m for model in self.models for m in model.modules() if isinstance(m, MoELayer)]

    def in_flight(self, layers: int, sets: Sets, microbatches: int = 0) -> tuple[int, int]:
        """Passes on this rank between their forward and their backward, and their calls of
        ``layers`` layers.

        Args:
            microbatches: of a step; 0: of this one.
        """
        chunks, ranks = len(self.models), self.pipeline.size()
        every = sets(ranks, chunks, microbatches or self.microbatches, self.plan)
        passes = every[self.pipeline.rank()]
        return passes, -(-layers // chunks) * passes


class Execution(NamedTuple):
    """How one call of a layer runs.

    Attributes:
        stock: Megatron's own layer runs.
        timer: of the call, if it is timed.
        changed: the plan differs from the last call's; its shared buffers have other sizes.
    """

    policy: ExecutionPolicy
    stock: bool
    timer: CallTimer | None = None
    changed: bool = False


class FixedPolicy:
    """How the calls of a rank's MoE layers run: here all by one plan.

    Args:
        plan: the same on all ranks of a layer's groups; it may change between two steps.
    """

    chooses = False  # whether the plan is chosen while training runs

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan

    @property
    def strategy(self) -> str:
        """Of all calls to come, as ``--moe-memory-reuse`` names it; ``auto``: one of several."""
        return self.plan.strategy.value

    def begin_step(self, step: LayerStep) -> None:
        """The calls to come are of another step; called where the plan is chosen."""

    def allow(self, strategies: Sequence[Strategy]) -> None:
        """There is host memory for these; called before the first step, the same on all ranks."""

    def begin(self, layer: Any, hidden: torch.Tensor, region: Callable[[], Any]) -> Execution:
        """For the next call of ``layer`` with ``hidden``; ``region`` gives the layer's."""
        return Execution(self.plan, self.plan.stock)

    def close(self) -> None:
        """No call will come."""


class PipelinedMoE(Callback):
    """Runs the MoE layers of one rank.

    Args:
        store: of the weight gradients that W passes compute, where the schedule has such; then
            its hooks are in place.
        scheduled: a schedule of ours runs every pipeline.
        options: of ``Memory``.

    Attributes:
        memory: what the layers share; None before the first call.
        at_steps: called before the first pass of each step.
    """

    def __init__(
        self,
        policy: FixedPolicy,
        store: WeightGradStore | None = None,
        scheduled: bool = False,
        **options: Any,
    ) -> None:
        self._policy, self._scheduled, self._options = policy, scheduled, options
        self.at_steps = [policy.begin_step] if policy.chooses else []
        self.memory: Memory | None = None
        self._splits = store is not None
        self._weights = ExpertGradients(store, lambda: policy.strategy not in ("none", "s0"))
        self._regions: weakref.WeakKeyDictionary[Any, Region | FlexRegion] = (
            weakref.WeakKeyDictionary()
        )

    def hooks(self) -> Sequence[Hook]:
        return (*super().hooks(), *self._weights.hooks(), *saved_parameters.hooks())

    def close(self) -> None:
        self._policy.close()
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

    @hooked(
        STEPS,
        "MoE layers would not know where a step begins",
        when=lambda self: bool(self.at_steps),
    )
    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = LayerStep.of_call(kwargs)
        if not self._scheduled or step.pipeline.size() == 1:  # otherwise ``begin`` comes
            self._begin(step)
        return original(*args, **kwargs)

    def begin(self, step: Step) -> None:
        self._begin(LayerStep.planned(step))

    def _begin(self, step: LayerStep) -> None:
        for note in self.at_steps:
            note(step)

    @hooked(MOE_INIT, "an MoE layer that cannot run in chunks would end the run at its first call")
    def _checked(
        self, original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(layer, *args, **kwargs)
        self._require(layer.config)

    @hooked(MOE_FORWARD, "MoE layers would run unchunked")
    def _chunked(
        self,
        original: Callable[..., Any],
        layer: Any,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        if intermediate_tensors is not None or _needs_stock(layer):
            return original(layer, hidden_states, intermediate_tensors, padding_mask)
        return self._train(original, layer, hidden_states, padding_mask)

    @untraced
    def _train(
        self,
        original: Callable[..., Any],
        layer: Any,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
    ) -> Any:
        region = functools.partial(self._region, layer, hidden_states.device)
        execution = self._policy.begin(layer, hidden_states, region)
        if execution.changed and self.memory is not None:
            self.memory.ring.clear()
        timer = execution.timer
        if timer is not None:
            hidden_states = timer.begin(hidden_states)
        if execution.stock:
            result = original(layer, hidden_states, None, padding_mask)
        else:
            result = self.forward(layer, hidden_states, padding_mask, execution.policy)
        if timer is not None:
            timer.end(result[0])
        return result

    def forward(
        self,
        layer: Any,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        policy: ExecutionPolicy,
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
            output = region(rows, probs, routing_map, policy, shared.compute)
            output = output.view(hidden.shape)
            if latent:
                output, _ = layer.fc2_latent_proj(output)
            return output if shared.output is None else output + shared.output

        if layer.moe_layer_recompute:
            arguments = (hidden_states,) if padding_mask is None else (hidden_states, padding_mask)
            return checkpoint(layer, compute, *arguments), None
        return compute(hidden_states, padding_mask), None

    def _require(self, config: Any) -> None:
        policy = self._policy
        require_supported(config, policy.strategy, policy.chooses, self._splits)

    def _region(self, layer: Any, device: torch.device) -> Region | FlexRegion:
        region = self._regions.get(layer)
        if region is None or not _has_parameters(region, layer.experts):
            self._require(layer.config)
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
