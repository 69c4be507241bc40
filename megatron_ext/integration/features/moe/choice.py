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
from ....moe.graph import kept_bytes_per_row
from ....moe.plan import Budget, LayerShape, Strategy
from ....moe.region import Region
from ....runtime.draws import Draws
from .flags import Sets, layer_shape
from .layer import CallTimer, Execution, FixedPolicy

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
        sets: what is in flight on each pipeline rank.
        costs: of an earlier run.
    """

    def __init__(
        self, space: SearchSpace, budget_bytes: int | None, sets: Sets, costs: Costs | None = None
    ) -> None:
        super().__init__(space.plans()[0])
        self._space, self._budget_bytes, self._sets = space, budget_bytes, sets
        self._known = Costs() if costs is None else costs
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kinds: dict[tuple[LayerShape, int, Any], _Layers] = {}
        self._step = self._rows = 0
        self._microbatches = 1  # of a call outside of Megatron's schedules
        self._calls: dict[tuple[int, int], int] = {}
        self._logs: bool | None = None
        self._handles: list[Any] = []
        atexit.register(self.close)

    steps = chooses = True

    @property
    def strategy(self) -> str:
        names = [one.value for one in self._space.strategies]
        return names[0] if len(names) == 1 else AUTO

    def built(self, layer: Any) -> None:
        self._layers.add(layer)
        if self._budget_bytes is not None:
            # Rows are known to all ranks from the exchange of counts; Megatron's layer has its own.
            self._handles.append(layer.experts.register_forward_pre_hook(self._note_rows))

    def allow(self, strategies: Sequence[Strategy]) -> None:
        self._space = self._space._replace(strategies=tuple(strategies))

    def begin_step(self, microbatches: int) -> None:
        self._step += 1
        self._microbatches = microbatches
        self._calls.clear()  # another plan may have come

    def begin(self, layer: Any, hidden: torch.Tensor, region: Callable[[], Region]) -> Execution:
        # In the first call of a step the ranks of the layer's groups agree.
        tp, size = region().exchange.tp_size, hidden.element_size()
        shape = layer_shape(layer.config, hidden.shape[-1], tp, size)
        # Ranks agree within the layer's group: with several models a process has several.
        key = shape, region().exchange.local_experts, region().exchange.groups.tp_ep
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._kind(shape, layer, hidden, region())
        tuner, tokens, before = kind.tuner, hidden.numel() // hidden.shape[-1], kind.tuner.plan
        if kind.step != self._step:
            first = kind.step < 0  # nothing is known but balanced routing
            rows = tokens * layer.config.moe_router_topk * tp if first else self._rows
            kind.step, kind.bucket = self._step, bucket(tokens)
            tuner.begin_step(StepReport(*_largest(kind.report(tokens, rows), hidden, region())))
        timer = None
        if torch.is_grad_enabled():
            tuner.count_call()
            # A plan is tried for calls of one size; the step's first call has it on every rank.
            if tuner.on_trial and bucket(tokens) == kind.bucket:
                timer = CallTimer(hidden)
                kind.timers.append(timer)
        return Execution(tuner, tuner.plan.stock, timer, tuner.plan != before)

    def summary(self) -> list[str]:
        """What ran how often: a line for each plan."""
        return [line for kind in self._kinds.values() for line in kind.tuner.summary()]

    def close(self) -> None:
        atexit.unregister(self.close)
        for kind in self._kinds.values():
            for line in kind.tuner.summary():
                self._log(f"over the run, {kind.tuner.costs.layers}: {line}")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _kind(self, shape: LayerShape, layer: Any, hidden: torch.Tensor, region: Region) -> _Layers:
        """A tuner, once the bytes that a budget counts are known to all ranks."""
        exchange = region.exchange
        name = (
            f"MoE layers of hidden size {shape.hidden}, expert FFN size {shape.ffn}, "
            f"{exchange.experts} experts on {exchange.ep_size} ranks"
        )
        known, budget, space = self._known, None, self._space
        if self._budget_bytes is not None:
            known, drawn = self._probed(layer, hidden, region, shape.hidden)
            kept = tuple(one for one in space.strategies if not one.recomputes)
            if drawn and 0 < len(kept) < len(space.strategies):
                self._log(f"{name}: {_DRAW}")
                space = space._replace(strategies=kept)
            shape = shape._replace(kept_bytes=known.kept_bytes or 0)
            budget = Budget(self._budget_bytes, shape, self._in_flight)
        if known.layers not in ("", name):
            self._log(f"{name}: --moe-pipeline-costs is of other layers, {known.layers}")
            known = replace(known, times={})
        log = lambda line: self._log(f"{name}, {line}")  # noqa: E731
        return _Layers(Tuner(space, budget, replace(known, layers=name), log))

    def _probed(
        self, layer: Any, hidden: torch.Tensor, region: Region, width: int
    ) -> tuple[Costs, bool]:
        """Costs with the bytes that the experts keep, and whether they draw random numbers."""
        known, rows = self._known, self._rows
        probs = _NAMED.get(layer.config.moe_router_dtype, hidden.dtype)
        local, like = region.exchange.local_experts, hidden.new_empty((1, width))
        with torch.random.fork_rng([hidden.device] if hidden.is_cuda else []):
            draws = Draws(hidden.device)
            found = kept_bytes_per_row(region.experts, region.parameters, local, like, probs)
            most, drawn = _largest((found, draws.found()), hidden, region)
        self._rows = rows  # without those of the probe
        return replace(known, kept_bytes=known.kept_bytes or most), bool(drawn)

    def _note_rows(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._rows = max(self._rows, len(inputs[0]))

    def _log(self, text: str) -> None:
        """One line for each stage of the pipeline."""
        if self._logs is None:  # known now; at the end Megatron may have forgotten its groups
            from megatron.core import parallel_state

            self._logs = (
                parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
                and parallel_state.get_tensor_model_parallel_rank() == 0
            )
        if self._logs:
            logger.info("%s", text)

    def _in_flight(self) -> int:
        """Layers on the rank times microbatches between their forward and their backward."""
        from megatron.core import parallel_state

        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        key = chunks, self._microbatches
        if key not in self._calls:
            self._calls[key] = self._sets(*key)[parallel_state.get_pipeline_model_parallel_rank()]
        return max(1, -(-len(self._layers) // chunks)) * self._calls[key]


def _largest(values: Any, like: torch.Tensor, region: Region) -> list[float]:
    """Of each value the largest over the ranks of the layer's groups."""
    table = torch.tensor(tuple(values), dtype=torch.float64, device=like.device)
    group = region.exchange.groups.tp_ep
    if region.exchange.ep_size * region.exchange.tp_size > 1:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return table.tolist()
