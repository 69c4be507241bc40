"""MoE layers whose plan is chosen while training runs: the tuner inside Megatron.

See docs/concepts/moe-planning.md.
"""

from __future__ import annotations

import atexit
import logging
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ....moe.autotune import AUTO, SearchSpace, StepReport, Tuner, bucket
from ....moe.cost_file import Costs
from ....moe.exchange import Exchange
from ....moe.graph import kept_bytes_per_row
from ....moe.plan import Budget, LayerShape, Strategy
from ....moe.region import Region
from ....runtime.draws import Draws
from .flags import Sets, layer_shape
from .layer import CallTimer, Execution, FixedPolicy, LayerStep

logger = logging.getLogger(__name__)

_DRAW = (
    "the experts draw random numbers (dropout of an adapter?), so auto does not try s0, s3 and s4, "
    "which would compute with others"
)
_NAMED = {"fp32": torch.float32, "fp64": torch.float64}


class _Layers:
    """The rank's layers of one kind, and what their calls of this step have shown."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner, self.step = tuner, -1
        self.bucket, self.timers = 0, list[CallTimer]()

    def report(self, tokens: int, rows: int) -> StepReport:
        """Of the step that is over, on this rank; of the one that begins a call of ``tokens``."""
        times = [t for t in (one.ms_per_token() for one in self.timers) if t is not None]
        self.timers.clear()
        # The first call pays for allocations.
        return StepReport(tokens, rows, statistics.median(times[1:] or times or [0.0]), len(times))


class ChosenMoE(FixedPolicy):
    """Policy of MoE layers of which something is to be chosen.

    Args:
        budget_bytes: of the rank's MoE layers on the device, or None.
        sets: what is in flight.
        costs: of an earlier run.
    """

    def __init__(
        self, space: SearchSpace, budget_bytes: int | None, sets: Sets, costs: Costs | None = None
    ) -> None:
        super().__init__(space.plans()[0])
        self._space, self._budget_bytes, self._sets = space, budget_bytes, sets
        self._known = Costs() if costs is None else costs
        # By the group whose ranks agree, of which a process with several models has several.
        self._kinds: weakref.WeakKeyDictionary[Any, dict[tuple[LayerShape, int, bool], _Layers]] = (
            weakref.WeakKeyDictionary()
        )
        # What a budget has to know of each region: bytes that its experts keep for a row, and
        # whether they draw random numbers.
        self._probed: weakref.WeakKeyDictionary[Region, tuple[float, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._step = self._rows = 0
        self._calls = 1  # in flight, of layers of the step's model
        self._logs: bool | None = None
        self._handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        atexit.register(self.close)

    chooses = True

    @property
    def strategy(self) -> str:
        names = [one.value for one in self._space.strategies]
        return names[0] if len(names) == 1 else AUTO

    def allow(self, strategies: Sequence[Strategy]) -> None:
        self._space = self._space._replace(strategies=tuple(strategies))

    def begin_step(self, step: LayerStep) -> None:
        self._step += 1
        if self._budget_bytes is not None and step.training:
            _, calls = step.in_flight(max(1, len(step.layers())), self._sets)
            self._calls = max(1, calls)

    def begin(self, layer: Any, hidden: torch.Tensor, region: Callable[[], Region]) -> Execution:
        # In the first call of a step the ranks of the layer's groups agree.
        exchange = region().exchange
        tp, size = exchange.tp_size, hidden.element_size()
        shape = layer_shape(layer.config, hidden.shape[-1], tp, size)
        kept_bytes, drawn = self._probe(layer, hidden, region(), shape.hidden)
        shape = shape._replace(kept_bytes=kept_bytes)
        key = shape, exchange.local_experts, drawn
        of_group = self._kinds.setdefault(exchange.groups.tp_ep, {})
        kind = of_group.get(key)
        if kind is None:
            kind = of_group[key] = self._kind(shape, exchange, drawn)
        tuner, tokens, before = kind.tuner, hidden.numel() // hidden.shape[-1], kind.tuner.plan
        if kind.step != self._step:
            first = kind.step < 0  # nothing is known but balanced routing
            rows = tokens * layer.config.moe_router_topk * tp if first else self._rows
            kind.step, kind.bucket = self._step, bucket(tokens)
            tuner.begin_step(StepReport(*_largest(kind.report(tokens, rows), hidden, exchange)))
        timer = None
        if torch.is_grad_enabled():
            tuner.count_call()
            # A plan is tried for calls of one size; the step's first call has it on every rank.
            if self._step and tuner.on_trial and bucket(tokens) == kind.bucket:
                timer = CallTimer(hidden)
                kind.timers.append(timer)
        return Execution(tuner, tuner.plan.stock, timer, tuner.plan != before)

    def kinds(self) -> list[_Layers]:
        """Of all groups that there are."""
        return [kind for found in self._kinds.values() for kind in found.values()]

    def close(self) -> None:
        atexit.unregister(self.close)
        for kind in self.kinds():
            for line in kind.tuner.summary():
                self._log(f"over the run, {kind.tuner.costs.layers}: {line}")
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _kind(self, shape: LayerShape, exchange: Exchange, drawn: bool) -> _Layers:
        name = (
            f"MoE layers of hidden size {shape.hidden}, expert FFN size {shape.ffn}, "
            f"{exchange.experts} experts on {exchange.ep_size} ranks"
        )
        known, budget, space = self._known, None, self._space
        if self._budget_bytes is not None:
            kept = tuple(one for one in space.strategies if not one.recomputes)
            if drawn and 0 < len(kept) < len(space.strategies):
                self._log(f"{name}: {_DRAW}")
                space = space._replace(strategies=kept)
            budget = Budget(self._budget_bytes, shape, lambda: self._calls)
        if known.layers not in ("", name):
            self._log(f"{name}: --moe-pipeline-costs is of other layers, {known.layers}")
            known = replace(known, times={})
        log = lambda line: self._log(f"{name}, {line}")  # noqa: E731
        return _Layers(Tuner(space, budget, replace(known, layers=name), log))

    def _probe(
        self, layer: Any, hidden: torch.Tensor, region: Region, width: int
    ) -> tuple[float, bool]:
        """Bytes that the experts of a layer keep for a row, and whether they draw random numbers,
        on any rank: layers of the same sizes may differ (adapters). Without a budget nothing
        depends on it."""
        if self._budget_bytes is None:
            return 0.0, False
        if region in self._probed:
            return self._probed[region]
        rows = self._rows
        probs = _NAMED.get(layer.config.moe_router_dtype, hidden.dtype)
        local, like = region.exchange.local_experts, hidden.new_empty((1, width))
        with torch.random.fork_rng([hidden.device] if hidden.is_cuda else []):
            draws = Draws(hidden.device)
            found = kept_bytes_per_row(region.experts, region.parameters, local, like, probs)
            most, drawn = _largest((found, draws.found()), hidden, region.exchange)
        self._rows = rows  # without those of the probe
        if layer.experts not in self._handles:
            # Rows are known to all ranks from the exchange of counts; Megatron's layer has its own.
            hook = layer.experts.register_forward_pre_hook(self._note_rows)
            self._handles[layer.experts] = hook
        self._probed[region] = most, bool(drawn)
        return self._probed[region]

    def _note_rows(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._rows = max(self._rows, len(inputs[0]))

    def _log(self, text: str) -> None:
        """One line for each stage of the pipeline."""
        if self._logs is None:  # known now; at the end Megatron may have forgotten its groups
            from megatron.core import parallel_state

            # A model may have groups of its own, and Megatron none.
            of_megatron = parallel_state.model_parallel_is_initialized()
            self._logs = dist.get_rank() == 0
            if of_megatron:
                self._logs = (
                    parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
                    and parallel_state.get_tensor_model_parallel_rank() == 0
                )
        if self._logs:
            logger.info("%s", text)


def _largest(values: Any, like: torch.Tensor, exchange: Exchange) -> list[float]:
    """Of each value the largest over the ranks of the layer's groups."""
    table = torch.tensor(tuple(values), dtype=torch.float64, device=like.device)
    group = exchange.groups.tp_ep
    if exchange.ep_size * exchange.tp_size > 1:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return table.tolist()
