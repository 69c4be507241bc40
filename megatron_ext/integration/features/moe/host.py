"""Host memory of MoE layers: sized by the byte formula, checked with all ranks, allocated once.

How many rows a rank's experts get depends on the routing. The arena has room for balanced routing
and a quarter more; a chunk that finds none stays on the device, counted, and the log names the size
that would have held all.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ....moe.buffers import Memory
from ....moe.plan import Strategy, copied_bytes
from ....offload.host import Purpose
from ...callbacks import Callback
from ...errors import ConfigError
from ...hooks import hooked
from ...host_memory import memory_on_hosts, usable_bytes_a_rank
from ...pipeline import groups_of_call, pipeline_group
from ...targets import STEPS
from ...utils import chunks_of, device_of, gather_over
from .flags import FLAGS, PINNED, Sets, balanced
from .layer import FixedPolicy, PipelinedMoE

logger = logging.getLogger(__name__)

HEADROOM = 1.25  # for routing that is not balanced, and for gaps between places


class HostArenas(Callback):
    """Sizes the host arena of a rank's MoE layers.

    Args:
        strategies: that may run; where there are several, those are left out that need too much.
        calls: (model chunks, microbatches) -> microbatches of each pipeline rank between their
            forward and their backward pass.
        budget_bytes: the size of a rank's arena; where there are several strategies, the most.
        microbatches: the most of a step, if it is known.
    """

    def __init__(
        self,
        layers: PipelinedMoE,
        policy: FixedPolicy,
        strategies: Sequence[Strategy],
        calls: Sets,
        budget_bytes: int | None = None,
        microbatches: int = 0,
    ) -> None:
        self._layers, self._policy, self._strategies = layers, policy, tuple(strategies)
        self._calls, self._budget_bytes = calls, budget_bytes
        self._microbatches = microbatches
        # By pipeline, of which a process may have several: microbatches, and the arena's bytes.
        self._settled: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._rank = self._logged = 0
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._log_excess("over the run, ")

    @hooked(STEPS, "host memory would be pinned in the middle of a step")
    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("forward_only"):
            if not self._logged:
                self._log_excess()
            self._begin_step(kwargs)
        return original(*args, **kwargs)

    def _begin_step(self, call: Mapping[str, Any]) -> None:
        """Before a pipeline's first training step, and before one with more microbatches than any.

        Raises:
            ConfigError: a rank or a host has too little; on all ranks.
        """
        collection = call.get("pg_collection")
        pipeline = pipeline_group(call.get("p2p_communicator"), collection)
        microbatches = max(call["num_microbatches"], self._microbatches)
        if microbatches <= self._settled.get(pipeline, (0, 0))[0]:
            return
        self._rank = dist.get_rank()
        models = chunks_of(call["model"])
        tokens = call["seq_length"] * call["micro_batch_size"]
        needs, text = self._needs(models, microbatches, tokens)
        groups = groups_of_call(pipeline, collection)
        every = gather_over((needs, text), groups)
        most = {s: max((entry[0][s], entry[1]) for entry in every) for s in needs}
        memory = self._layers.memory_on(device_of(models))
        if len(self._strategies) == 1:
            (strategy,) = self._strategies
            self._require(strategy, *most[strategy])
            size = self._budget_bytes or round(HEADROOM * needs[strategy])
            self._allocate(strategy, self._settle(pipeline, microbatches, size), memory, groups)
        else:
            limit = usable_bytes_a_rank(groups)
            if self._budget_bytes is not None:
                limit = min(limit, self._budget_bytes)
            left = self._leave_out(limit, {s: need for s, (need, _) in most.items()})
            size = min(limit, round(HEADROOM * max(needs[s] for s in left)))
            memory.size_host(self._settle(pipeline, microbatches, size), now=False)

    def _settle(self, pipeline: Any, microbatches: int, size: int) -> int:
        """Note what a pipeline's passes take; the most that those of any pipeline do."""
        self._settled[pipeline] = microbatches, size
        return max(size for _, size in self._settled.values())

    def _log_excess(self, when: str = "") -> None:
        """One line where chunks have stayed on the device, and one at the end of the run."""
        memory = self._layers.memory
        if memory is None or memory.stayed == self._logged:
            return
        self._logged = memory.stayed
        logger.warning(
            "%srank %d: %d chunks of MoE layers have found no room in the host "
            "arena of %d bytes and stayed on the device; %d bytes would have held all; set %s to "
            "that",
            when,
            self._rank,
            memory.stayed,
            memory.engine.arena.capacity_bytes,
            memory.wanted_bytes,
            FLAGS[4],
        )

    def _needs(
        self, models: Sequence[Any], microbatches: int, tokens: int
    ) -> tuple[dict[Strategy, int], str]:
        """Bytes of this rank by strategy, if routing is balanced; and what they are made of."""
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.moe_layer import MoELayer

        layers = [m for model in models for m in model.modules() if isinstance(m, MoELayer)]
        if not layers:
            return dict.fromkeys(self._strategies, 0), ""
        shape, rows = balanced(layers[0].config, tokens)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        passes = self._calls(len(models), microbatches)[rank]
        calls = -(-len(layers) // len(models)) * passes
        text = (
            f"{len(layers)} MoE layers, {passes} passes in flight, {rows} rows a call if routing "
            "is balanced"
        )
        return {s: round(calls * copied_bytes(shape, rows, s)) for s in self._strategies}, text

    def _require(self, strategy: Strategy, need: int, text: str) -> None:
        budget = self._budget_bytes
        kept = budget is None or need <= budget
        PINNED.require(kept, strategy=strategy.value, need=need, text=text, budget=budget)

    def _allocate(
        self, strategy: Strategy, size: int, memory: Memory, groups: Sequence[Any]
    ) -> None:
        arena = memory.engine.arena
        fix = (
            f"take s4, which copies nothing to the host, lower {FLAGS[4]}, or have fewer "
            "microbatches in flight or ranks per host"
        )
        purpose = Purpose(f"{FLAGS[1]} {strategy.value}", fix)
        # A graph that is still there keeps its arena; what finds no room stays on the device.
        wanted = arena.capacity_bytes if arena.used_bytes else size
        with memory_on_hosts(wanted, arena.capacity_bytes, groups, purpose):
            if arena.used_bytes:
                return
            try:
                memory.size_host(size, now=True)
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def _leave_out(self, limit: int, most: Mapping[Strategy, int]) -> Sequence[Strategy]:
        """Let ``auto`` choose from strategies that keep the limit, the same on all ranks."""
        left = tuple(s for s in self._strategies if most[s] <= limit)
        out = [f"{s.value} ({most[s]} bytes)" for s in self._strategies if s not in left]
        if out and self._rank == 0:
            logger.info(
                "--moe-memory-reuse auto does not try %s: a rank may take %d bytes of its host",
                ", ".join(out),
                limit,
            )
        self._policy.allow(left)
        return left
