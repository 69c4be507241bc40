"""What the offload plan needs to know of the machine, agreed on by the ranks of a pipeline."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from ....offload.device import Device
from ....offload.engine import FileTurns, Policy, Turns
from ....offload.host import require_host_memory
from ....offload.host_memory import available_host_bytes
from ....offload.rates import Rates
from ....schedule.actions import Op
from ....schedule.link import Link, travel_time
from ....schedule.placement import Placement
from ...errors import ConfigError
from ...measuring import Seconds, measure_link
from ...utils import gather


@dataclass(frozen=True)
class TransferSetup:
    """How sets travel in this run.

    Attributes:
        policy: the same on all ranks of the job.
        rates: of this rank; None if nothing had to be measured.
        why: of the policy.
        turns: for ``paired`` on devices that need it.
    """

    policy: Policy
    rates: Rates | None
    why: str
    turns: Turns | None = None


def settle(asked: str | None, measured: bool, device: Device, group: Any) -> TransferSetup:
    """Measure the link where that is needed, and agree on the transfer policy.

    All ranks of ``group``, the pipeline's, must call this together, in all pipelines of the job,
    which get one policy.

    Args:
        asked: the policy that the user or a file wants; None: what measurements speak for.
        measured: True if rates are needed to plan.
        device: of this rank.
        group: the pipeline's process group.

    Raises:
        ConfigError: ``paired`` is asked for, and neighbours are on different hosts.
    """
    rank, hosts = group.rank(), gather(socket.gethostname(), group)
    pairs = [(hosts[i], hosts[i + 1]) for i in range(0, len(hosts) - 1, 2)]
    apart = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if asked == Policy.PAIRED and apart is not None:
        a, b = pairs[apart]
        raise ConfigError(
            f"--pp-offload-transfer paired is for pipeline neighbours that share a PCIe switch, "
            f"but ranks {2 * apart} and {2 * apart + 1} are on different hosts ({a} and {b}); "
            "use single or dual, or leave it out to measure"
        )
    rates, opinion, why = None, asked, "as asked for"
    if measured or asked is None:
        rates, mine = measure_link(rank, len(hosts), apart is None, device, group)
        opinions = gather((mine[0].value, mine[1]))
        if asked is None:
            opinion = _consensus([choice for choice, _ in opinions])
            first = next(i for i, (choice, _) in enumerate(opinions) if choice == opinion)
            why = f"measured: on rank {first}, {opinions[first][1]}"
    policy = Policy(opinion)
    return TransferSetup(policy, rates, why, _turns(policy, device, rank, group))


def link(
    setup: TransferSetup,
    placement: Placement,
    rank: int,
    seconds: Seconds,
    sizes: Mapping[int, int],
) -> Link:
    """The measured link of all ranks, for planning; all ranks of the job call this together.

    Of ranks at the same place in their pipelines the slowest counts: all follow one plan.

    Args:
        setup: as settled.
        placement: of the stages.
        rank: this one's, in the pipeline.
        seconds: of this rank's passes, by chunk and operation.
        sizes: per chunk, what one set sends.
    """
    assert setup.rates is not None
    mine = [
        max(
            (
                travel_time(
                    nbytes, rate, sum(seconds.get((chunk, op), 0.0) for op in (Op.F, Op.B, Op.W))
                )
                for chunk, nbytes in sizes.items()
            ),
            default=Fraction(1, 64),
        )
        for rate in ways(setup)
    ]
    there, back = [Fraction(0)] * placement.pp, [Fraction(0)] * placement.pp
    for at, (one, other) in gather((rank, mine)):
        there[at], back[at] = max(there[at], one), max(back[at], other)
    return Link.of(placement.pp, there, back, setup.policy.value)


def ways(setup: TransferSetup) -> tuple[float, float]:
    """Bytes/s to the host and back of this rank, as the policy has them."""
    rates = setup.rates
    assert rates is not None
    if setup.policy is Policy.DUAL:
        return rates.to_host_together, rates.to_device_together
    return rates.to_host, rates.to_device


def require_memory_on_hosts(needed_bytes: int, held_bytes: int = 0) -> None:
    """Check, with all ranks of the job, that their arenas fit into their hosts' memory.

    Args:
        needed_bytes: of this rank.
        held_bytes: of an arena of this rank that goes away.

    Raises:
        ConfigError: the ranks of one host, whichever, need too much.
    """
    mine = socket.gethostname(), needed_bytes, held_bytes, available_host_bytes()
    every = gather(mine)
    for host in sorted({entry[0] for entry in every}):
        needs, held, available = zip(*(entry[1:] for entry in every if entry[0] == host))
        try:
            require_host_memory(needs, min(available) + sum(held))
        except ValueError as error:
            raise ConfigError(f"host {host}: {error}") from None


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


def _consensus(opinions: Sequence[str]) -> str:
    """One policy for all: whoever suffers from a neighbour decides, full duplex needs everybody."""
    if Policy.PAIRED in opinions:
        return Policy.PAIRED.value
    return Policy.DUAL.value if set(opinions) == {Policy.DUAL.value} else Policy.SINGLE.value


def _turns(policy: Policy, device: Device, rank: int, group: Any) -> Turns | None:
    """Locks that each pair shares, where the device can hold them."""
    if policy is not Policy.PAIRED or not device.guards_copies:
        return None
    folder = None
    if rank % 2 == 0:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = tempfile.mkdtemp(prefix="megatron-ext-turns-", dir=memory)
    turns = FileTurns(Path(gather(folder, group)[rank // 2 * 2]))
    gather(None, group)  # both of a pair have their files
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return turns
