"""Bytes of activation sets: on the device and on the host, by the plan and at the least."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....offload.arena import arena_bytes
from ....offload.host import require_host_memory
from ....offload.host_memory import available_host_bytes
from ....offload.sets import Footprint
from ....schedule.actions import Action, Op, Operation
from ....schedule.effects import FREES, passes, peak
from ....schedule.schedule import Schedule
from ....schedule.units import Unit
from ...errors import named_errors
from ...utils import gather_over

Part = tuple[int, int]  # (model chunk, slice of a microbatch)
# The largest set seen so far of each part.
Footprints = Mapping[Part, Footprint]


def require_on_hosts(needed_bytes: int, held_bytes: int, groups: Sequence[Any]) -> None:
    """Check, with all ranks of a call, that their arenas fit into their hosts' memory.

    No rank of the call allocates before all have looked.

    Args:
        held_bytes: of an arena of this rank that goes away.
        groups: of the call.

    Raises:
        ConfigError: the ranks of one host, whichever, need too much.
    """
    mine = socket.gethostname(), needed_bytes, held_bytes, available_host_bytes()
    every = gather_over(mine, groups)
    for host in sorted({entry[0] for entry in every}):
        needs, held, available = zip(*(entry[1:] for entry in every if entry[0] == host))
        with named_errors(f"host {host}"):
            require_host_memory(needs, min(available) + sum(held))


def part_of(chunk: int, unit: int) -> Part:
    """Whose sets are alike: those of one slice of every microbatch in one chunk."""
    return chunk, unit.slice if isinstance(unit, Unit) else 0


def of_chunks(footprints: Footprints, of: Callable[[Footprint], int]) -> dict[int, int]:
    """Bytes of the set of a whole microbatch, by model chunk."""
    found: dict[int, int] = {}
    for (chunk, _), footprint in footprints.items():
        found[chunk] = found.get(chunk, 0) + of(footprint)
    return found


def device_bytes(plan: Schedule, rank: int, footprints: Footprints) -> int:
    """The most that the sets of a rank take on the device under ``plan``."""
    row = list(passes(plan.ranks[rank]))
    offloaded = {action[1:] for action in row if action.op is Op.OFFLOAD}

    def change(action: Action) -> int:
        chunk = plan.placement.chunk_of(action.stage)
        f = footprints.get(part_of(chunk, action.microbatch), Footprint())
        if action.op in FREES:
            return -(f.reloaded if action[1:] in offloaded else f.device)
        changes: dict[Operation, int]
        changes = {Op.F: f.device, Op.RELEASE: f.kept - f.device, Op.PREPARE: f.reloaded - f.kept}
        return changes.get(action.op, 0)

    return peak(map(change, row))


def host_bytes(plan: Schedule, rank: int, footprints: Footprints) -> int:
    """The size of the arena that a rank needs for ``plan``."""
    moves = []
    for op, stage, microbatch in passes(plan.ranks[rank]):
        if op is Op.OFFLOAD or op is Op.RELOAD:
            part = part_of(plan.placement.chunk_of(stage), microbatch)
            footprint = footprints.get(part, Footprint())
            moves.append(((stage, microbatch), footprint.host))
    return arena_bytes(moves)


def least_set_bytes(model: torch.nn.Module, config: Any, shape: tuple[int, ...] | None) -> int:
    """Bytes that a set of one model chunk has at least, before any was seen.

    What a transformer layer keeps after all cheap recomputation: the inputs of both norms, query,
    key, value, context, and the output of a dense layer's first linear (PipeOffload, section 2:
    20 bytes per token and hidden element with 16-bit numbers).

    Args:
        model: the chunk, unwrapped.
        config: its transformer configuration.
        shape: (sequence, microbatch, hidden) of what this rank gets from its neighbour; None: it
            varies, and nothing is known.
    """
    layers = getattr(getattr(model, "decoder", None), "layers", ())
    if shape is None or not layers:
        return 0
    sequence, batch, hidden = shape
    size = (config.pipeline_dtype or torch.float32).itemsize
    tokens = sequence * batch
    if config.recompute_granularity == "full":
        return 0 if config.recompute_method == "block" else tokens * hidden * size
    width = 2 * hidden  # sharded as the message is
    full = tokens * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    inner = 0
    if not getattr(config, "multi_latent_attention", False):
        heads = config.num_attention_heads
        groups = config.num_query_groups or heads
        inner += (2 * heads + 2 * groups) * config.kv_channels
    modules = getattr(config, "recompute_modules", None) or ()
    if not config.num_moe_experts and "mlp" not in modules:
        inner += config.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
    inner //= config.tensor_model_parallel_size
    nbytes: int = len(layers) * (tokens * width + full * inner) * size
    return nbytes
