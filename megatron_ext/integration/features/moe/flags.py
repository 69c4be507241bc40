"""The MoE flags: what they ask for, and what of Megatron excludes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...._input import attribute, parse_bytes
from ....moe import cost_file
from ....moe.autotune import AUTO, SearchSpace
from ....moe.plan import Budget, BudgetError, LayerPlan, LayerShape, Restore, Strategy
from ....plan.moe_conflicts import CHOSEN, CONFLICTS, SPLIT, parts_of
from ....schedule import generate
from ....schedule.effects import peak_sets
from ...arguments import MegatronArgs
from ...errors import ConfigError, named_errors
from ...feature import Rule, require_no_conflict
from ...utils import most_microbatches
from .queues import QUEUE_CHUNKS, one_queue

FLAGS = (
    "--moe-pipeline-chunks",
    "--moe-memory-reuse",
    "--moe-memory-budget",
    "--moe-pipeline-costs",
    "--moe-memory-host-budget",
)
COPIED = Rule(
    f"{FLAGS[4]} {{host}} is for what s1 to s3 copy to the host",
    f"{FLAGS[1]} {{strategy}}{{why}} copies nothing",
    f"add {FLAGS[1]} s1 (s2, s3), or drop {FLAGS[4]}",
)
EXPERTS = Rule(
    f"{FLAGS[0]} {{chunks}} is for MoE layers",
    "the model has none (--num-experts is not set)",
    f"drop {FLAGS[0]}",
)
PINNED = Rule(
    f"{FLAGS[1]} {{strategy}} needs {{need}} bytes of host memory on a rank ({{text}})",
    f"{FLAGS[4]} is {{budget}}",
    "raise it to that, take s4, which copies nothing, or have fewer microbatches in flight",
)
NO_BIAS = Rule(
    "an MoE layer in chunks needs experts without a bias to be added after combine",
    "{model} returns one",
    "add --disable-bias-linear",
)
RULES = (COPIED, EXPERTS, PINNED, NO_BIAS)
# (pipeline ranks, model chunks a rank, microbatches, the step's plan where it is ours) -> most
# passes of each pipeline rank between their forward and their backward
Sets = Callable[[int, int, int, Any], list[int]]


@dataclass(frozen=True)
class MoERequest:
    """The MoE flags of a run that uses them.

    Attributes:
        chunks: n, for every layer and step, or ``auto``.
        strategy: a strategy's name, or ``auto``.
        budget_bytes: for what is chosen; None: no limit.
        costs: what an earlier run found.
        host_bytes: of the host, for a rank; None: by formula.
    """

    chunks: str
    strategy: str
    budget_bytes: int | None = None
    costs: cost_file.Costs | None = None
    host_bytes: int | None = None

    @classmethod
    def of(cls, args: MegatronArgs) -> MoERequest | None:
        """What ``args`` ask for; None if MoE layers stay Megatron's.

        Raises:
            ConfigError: what cannot be read, or is for nothing.
        """
        values = tuple(getattr(args, attribute(flag), None) for flag in FLAGS)
        chunks, strategy, budget, costs, host = values
        if chunks in (None, "off"):
            return None
        nbytes = _read(FLAGS[2], budget, parse_bytes)
        given = _read(FLAGS[3], costs, cost_file.load)
        host_bytes = _read(FLAGS[4], host, parse_bytes)
        request = cls(chunks, strategy or "none", nbytes, given, host_bytes)
        why = " without --moe-memory-budget" if strategy == AUTO else ""
        kept = host is None or request.copying()
        COPIED.require(kept, host=host, strategy=request.strategy, why=why)
        return request

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does all of it."""
        return (self.chunks, self.strategy) == ("1", "none")

    @property
    def chooses(self) -> bool:
        """True where something is left to be chosen."""
        return AUTO in (self.chunks, self.strategy)

    @property
    def plan(self) -> LayerPlan:
        """Of every call, where nothing is to be chosen."""
        return LayerPlan.of(int(self.chunks), self.strategy)

    def space(self) -> SearchSpace:
        """What may be chosen. With one hardware queue more chunks than two only save memory."""
        space = SearchSpace.of(self.chunks, self.strategy)
        if self.chunks == AUTO and self.budget_bytes is None and one_queue():
            return space._replace(chunks=tuple(n for n in space.chunks if n <= QUEUE_CHUNKS))
        return space

    def copying(self) -> tuple[Strategy, ...]:
        """Strategies that may run, if one of them copies to the host; otherwise none.

        Without a budget ``auto`` restores nothing.
        """
        if self.strategy == AUTO and self.budget_bytes is None:
            return ()
        may_run = self.space().strategies
        copies = any(Restore.OFFLOAD in (s.input, s.inside) for s in may_run)
        return may_run if copies else ()

    def text(self, args: MegatronArgs) -> str:
        """For the log: what runs, and what of Megatron's has no effect there."""
        what = f"MoE layers in {self.chunks} chunk(s), --moe-memory-reuse {self.strategy}"
        if self.budget_bytes is not None:
            what += f", at most {self.budget_bytes} bytes"
        if not self.stock and getattr(args, "moe_permute_fusion", False):
            what += " (they permute rows by index; --moe-permute-fusion has no effect on them)"
        return what

    def check(self, args: MegatronArgs, splits: bool = False) -> None:
        """Refuse what of Megatron cannot work with it; before Megatron's own validation.

        Args:
            splits: the schedule has passes of their own for weight gradients.

        Raises:
            ConfigError: the first rule that applies.
        """
        EXPERTS.require(args.num_experts, chunks=self.chunks)
        parts = dict.fromkeys(parts_of(self.strategy), f"{FLAGS[1]} {self.strategy}")
        if self.chooses:
            parts[CHOSEN] = f"{FLAGS[0] if self.chunks == AUTO else FLAGS[1]} {AUTO}"
        if splits:
            parts[SPLIT] = f"{FLAGS[0]} {self.chunks} with --pp-schedule {args.pp_schedule}"
        require_no_conflict(args, CONFLICTS, {"": f"{FLAGS[0]} {self.chunks}", **parts})


def _read(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    with named_errors(flag):
        return None if text is None else parse(text)


def require_supported(
    config: Any, strategy: str, chooses: bool = False, splits: bool = False
) -> None:
    """Refuse a layer that cannot run in chunks, however it was built.

    Args:
        config: of the layer; its attributes have the names of Megatron's flags.
        strategy: that may be used, or ``auto``.
        chooses: plans are chosen while training runs.
        splits: weight gradients may wait for a pass of their own.

    Raises:
        ConfigError: the first conflict.
    """
    what = f"an MoE layer that restores its experts ({FLAGS[1]} {strategy})"
    parts = {"": "an MoE layer in chunks", **dict.fromkeys(parts_of(strategy), what)}
    if chooses:
        parts[CHOSEN] = f"an MoE layer whose plan is chosen ({AUTO})"
    if splits:
        parts[SPLIT] = "an MoE layer in chunks under a schedule that splits backward passes"
    require_no_conflict(config, CONFLICTS, parts)


def layer_shape(config: Any, hidden: int, tp: int, element_bytes: int) -> LayerShape:
    """Sizes of a layer's experts.

    Args:
        config: Megatron's, or its arguments: the attributes that are read have the same names.
        hidden: elements of a token. tp: expert tensor parallel size.
    """
    ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
    gated = getattr(config, "gated_linear_unit", False) or getattr(config, "swiglu", False)
    row = getattr(config, "moe_latent_size", None) or hidden
    return LayerShape(row, max(1, ffn // tp), bool(gated), element_bytes)


def balanced(config: Any, tokens: int) -> tuple[LayerShape, int]:
    """Sizes of a layer's experts, and the rows of a call if routing is balanced.

    Args:
        config: Megatron's, or its arguments.
        tokens: of a microbatch.
    """
    tp = config.tensor_model_parallel_size
    etp = config.expert_tensor_parallel_size or tp
    rows = tokens * config.moe_router_topk * etp // (tp * config.context_parallel_size)
    return layer_shape(config, config.hidden_size, etp, config.params_dtype.itemsize), rows


def check_budget(args: MegatronArgs, space: SearchSpace, budget_bytes: int, sets: Sets) -> None:
    """Refuse a budget that cannot be kept even where all experts get the same number of rows.

    Args:
        args: validated by Megatron.

    Raises:
        ConfigError: with the smallest sufficient number.
    """
    pp, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    microbatches = most_microbatches(args)
    shape, rows = balanced(args, args.seq_length * args.micro_batch_size)
    frequency = args.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [1] + [0] * (frequency - 1)
    share = sum(pattern) / len(pattern)
    assert args.num_layers is not None  # Megatron has set it
    # Of an even split; a first or last stage may have more, which is then logged while it runs.
    layers = max(1, int(args.num_layers * share / (pp * chunks)))
    in_flight = max(sets(pp, chunks, microbatches, None))
    try:
        Budget(budget_bytes, shape, lambda: layers * in_flight).require(space.plans(), rows)
    except BudgetError as error:
        raise ConfigError(
            f"--moe-memory-budget: {error} ({layers} MoE layers, {in_flight} passes in flight, "
            f"{rows} rows a call if routing is balanced)"
        ) from None


def stock_sets(pp: int, chunks: int, microbatches: int) -> list[int]:
    """Most activation sets of each rank, between their forward and their backward pass, under
    Megatron's own schedules."""
    if pp == 1:
        return [1]
    if chunks == 1:
        return [min(pp - rank, microbatches) for rank in range(pp)]
    try:
        return peak_sets(generate("interleaved", pp, microbatches, chunks).ranks)
    except ValueError:  # microbatches in groups that ours do not have
        warmup = [2 * (pp - rank - 1) + (chunks - 1) * pp + 1 for rank in range(pp)]
        return [min(sets, chunks * microbatches) for sets in warmup]


def of_whole(passes: Sequence[int], plan: Any) -> list[int]:
    """As many of whole microbatches, rounded up, as ``passes`` of its slices are at most."""
    costs, whole = plan.unit_costs()
    largest = max(unit.size for unit in costs)
    return [-(-count * largest // whole) for count in passes]
