"""MoE layers that choose how they run, from Megatron's arguments (docs/12)."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ....moe import cost_file
from ....moe.costs import LayerShape
from ....moe.decide import Chooser, Measured, Name, load_of
from ....moe.region import Region
from ....moe.select import BudgetError, Space, what_fits
from ....moe.settings import Decides
from ....schedule.effects import peak_sets
from ....schedule.generators import generate
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...utils import full_batch

logger = logging.getLogger(__name__)

# (model chunks a rank, microbatches) -> most activation sets of each pipeline rank
Sets = Callable[[int, int], list[int]]


class ChosenMoE:
    """Policy of MoE layers of which something is to be chosen.

    Args:
        space: what may be chosen.
        budget_bytes: of the rank's MoE layers on the device, or None.
        sets: what is in flight on each pipeline rank.
        costs: of every layer; None: each is measured before its first call.
    """

    stock = False

    def __init__(
        self, space: Space, budget_bytes: int | None, sets: Sets, costs: Measured | None = None
    ) -> None:
        self._space, self._sets, self._costs = space, sets, costs
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._chooser = Chooser(space, budget_bytes, self._load, self._say)
        self._speaks: bool | None = None
        atexit.register(self.close)

    @property
    def restores(self) -> bool:
        """See ``Policy``."""
        return self._space.strategies != ("none",)

    def built(self, layer: Any) -> None:
        """See ``Policy``."""
        self._layers.add(layer)

    def of(self, layer: Any, region: Region, rows: torch.Tensor, probs: torch.Tensor) -> Decides:
        """See ``Policy``."""
        config, exchange = layer.config, region.exchange
        shape = layer_shape(
            config, rows.shape[1], exchange.ep_size, exchange.tp_size, rows.element_size()
        )

        name = Name(shape, exchange.local_experts)

        def measured(count: int) -> Measured:
            from ....moe.measure import measure

            if self._costs is not None:  # the same on all ranks: agreement.py has compared the file
                return self._costs
            found = measure(region, shape, count, rows.dtype, probs.dtype)
            self._say(f"{name}, measured for {count} rows on a rank: {cost_file.dump(found)}")
            return found

        return self._chooser.layer(name, measured)

    def summary(self) -> list[str]:
        """What ran how often: a line for each way."""
        return self._chooser.summary()

    def close(self) -> None:
        """See ``Policy``; says what ran."""
        atexit.unregister(self.close)
        for line in self.summary():
            self._say(f"over the run {line}")

    def _say(self, text: str) -> None:
        """One line for each stage of the pipeline."""
        if self._speaks is None:  # known now; at the end Megatron may have forgotten its groups
            from megatron.core import parallel_state

            self._speaks = (
                parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
                and parallel_state.get_tensor_model_parallel_rank() == 0
            )
        if self._speaks:
            logger.warning("megatron_ext: %s", text)

    def _load(self) -> tuple[int, int]:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        rank = parallel_state.get_pipeline_model_parallel_rank()
        sets = self._sets(chunks, get_num_microbatches())[rank]
        return max(1, -(-len(self._layers) // chunks)), sets


def layer_shape(config: Any, hidden: int, ranks: int, tp: int, element_bytes: int) -> LayerShape:
    """Sizes of a layer's experts.

    Args:
        config: Megatron's, or its arguments: the attributes that are read have the same names.
        hidden: elements of a row that travels.
        ranks: expert parallel. tp: expert tensor parallel.
    """
    ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
    gated = getattr(config, "gated_linear_unit", False) or getattr(config, "swiglu", False)
    return LayerShape(
        hidden,
        max(1, ffn // tp),
        "swiglu" if gated else "gelu",
        config.moe_router_topk,
        ranks,
        element_bytes,
    )


def stock_sets(pp: int, chunks: int, microbatches: int) -> list[int]:
    """Most activation sets of each rank under Megatron's own schedules."""
    if pp == 1:
        return [1]
    if chunks == 1:
        return [min(pp - rank, microbatches) for rank in range(pp)]
    try:
        return peak_sets(generate("interleaved", pp, microbatches, chunks).ranks)
    except ValueError:  # microbatches in groups that ours do not have
        warmup = [2 * (pp - rank - 1) + (chunks - 1) * pp + 1 for rank in range(pp)]
        return [min(sets, chunks * microbatches) for sets in warmup]


def check_budget(args: MegatronArgs, space: Space, budget_bytes: int, sets: Sets) -> None:
    """Refuse a budget that cannot be kept even where all experts get the same number of rows.

    Args:
        args: validated by Megatron.

    Raises:
        ConfigError: with the least that would do.
    """
    pp, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    per_step = args.micro_batch_size * args.data_parallel_size
    microbatches = (full_batch(args) or per_step) // per_step
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    shards = args.context_parallel_size * args.tensor_model_parallel_size
    rows = args.seq_length * args.micro_batch_size * args.moe_router_topk * etp // shards
    hidden = args.moe_latent_size or args.hidden_size
    size = torch.empty(0, dtype=args.params_dtype).element_size()
    shape = layer_shape(args, hidden, args.expert_model_parallel_size, etp, size)
    frequency = args.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [1] + [0] * (frequency - 1)
    share = sum(pattern) / len(pattern)
    assert args.num_layers is not None  # Megatron has set it
    # Of an even split; a first or last stage may have more, which is then told while it runs.
    layers = max(1, int(args.num_layers * share / (pp * chunks)))
    in_flight = max(sets(chunks, microbatches))
    try:
        what_fits(shape, load_of(rows, layers, in_flight), budget_bytes, space)
    except BudgetError as error:
        raise ConfigError(
            f"--moe-memory-budget: {error} ({layers} MoE layers, {in_flight} passes in flight, "
            f"{rows} rows a call if routing is balanced)"
        ) from None
