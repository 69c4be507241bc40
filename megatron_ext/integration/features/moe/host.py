"""Host memory of MoE layers: sized by the byte formula, checked with all ranks, allocated once.

How many rows a rank's experts get depends on the routing. The arena has room for balanced routing
and a quarter more; a chunk that finds none stays on the device, counted, and the log names the size
that would have held all.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ....moe.buffers import Memory
from ....moe.plan import Strategy, copied_bytes
from ....offload.host import Purpose
from ...callbacks import Callback
from ...errors import ConfigError
from ...host_memory import memory_on_hosts, usable_bytes_a_rank
from ...utils import device_of, gather_over, unwrapped
from .flags import FLAGS, PINNED, Sets, balanced
from .layer import FixedPolicy, LayerStep, PipelinedMoE

logger = logging.getLogger(__name__)

HEADROOM = 1.25  # for routing that is not balanced, and for gaps between places


class HostArenas(Callback):
    """Sizes the host arena of a rank's MoE layers.

    Args:
        strategies: that may run; where there are several, those are left out that need too much.
        calls: in flight, in whole microbatches.
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
        # By model, of which a process may have several: microbatches, and the arena's bytes.
        self._settled: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._rank = self._logged = 0
        layers.at_steps.append(self._begin_step)
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._log_excess("over the run, ")

    def _begin_step(self, step: LayerStep) -> None:
        """Before a model's first training step, and before one with more microbatches than any.

        Raises:
            ConfigError: a rank or a host has too little; on all ranks.
        """
        if not step.training:
            return
        if not self._logged:
            self._log_excess()
        model = unwrapped(step.models[0])
        microbatches = max(step.microbatches, self._microbatches)
        if microbatches <= self._settled.get(model, (0, 0))[0]:
            return
        self._rank = dist.get_rank()
        needs, text = self._needs(step, microbatches)
        groups = step.groups
        every = gather_over((needs, text), groups)
        most = {s: max((entry[0][s], entry[1]) for entry in every) for s in needs}
        memory = self._layers.memory_on(device_of(step.models))
        if len(self._strategies) == 1:
            (strategy,) = self._strategies
            self._require(strategy, *most[strategy])
            size = self._budget_bytes or round(HEADROOM * needs[strategy])
            self._allocate(strategy, self._settle(model, microbatches, size), memory, groups)
        else:
            limit = usable_bytes_a_rank(groups)
            if self._budget_bytes is not None:
                limit = min(limit, self._budget_bytes)
            left = self._leave_out(limit, {s: need for s, (need, _) in most.items()})
            size = min(limit, round(HEADROOM * max(needs[s] for s in left)))
            memory.size_host(self._settle(model, microbatches, size), now=False)

    def _settle(self, model: Any, microbatches: int, size: int) -> int:
        """Note what a model's passes take; the most that those of any model do."""
        self._settled[model] = microbatches, size
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

    def _needs(self, step: LayerStep, microbatches: int) -> tuple[dict[Strategy, int], str]:
        """Bytes of this rank by strategy, if routing is balanced; and what they are made of."""
        layers = step.layers()
        if not layers:
            return dict.fromkeys(self._strategies, 0), ""
        shape, rows = balanced(layers[0].config, step.tokens)
        passes, calls = step.in_flight(len(layers), self._calls, microbatches)
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
