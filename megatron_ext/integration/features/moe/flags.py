"""The MoE flags: what they ask for, and what of Megatron does not go together with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...._input import attribute, parse_bytes
from ....moe import cost_file
from ....moe.decide import Measured
from ....moe.select import AUTO, Space
from ...arguments import MegatronArgs
from ...errors import ConfigError

CHUNKS = ("off", "auto", "1", "2", "4", "8")
STRATEGIES = ("none", "s1", "s2", "s3", "s4", "auto")
FLAGS = (
    "--moe-pipeline-chunks",
    "--moe-memory-reuse",
    "--moe-memory-budget",
    "--moe-pipeline-costs",
)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags; all defaults leave Megatron as it is."""
    group.add_argument(
        FLAGS[0],
        metavar="{" + ",".join(CHUNKS) + "}",
        default=None,
        help="run dispatch, experts and combine of every MoE layer in so many chunks of tokens, "
        "the communication of one beside the computation of another; auto measures; default: off",
    )
    group.add_argument(
        FLAGS[1],
        metavar="{" + ",".join(STRATEGIES) + "}",
        default=None,
        help="how the experts' input and what lies inside them are restored for the backward pass: "
        "s1 copies both from the host, s2 sends the input again, s3 computes the inside again, s4 "
        "does both, auto takes the fastest that keeps the budget; default: none, both are kept",
    )
    group.add_argument(
        FLAGS[2],
        metavar="BYTES",
        default=None,
        help="device memory that a rank's MoE layers may take, e.g. 8GiB; auto chooses within it",
    )
    group.add_argument(
        FLAGS[3],
        metavar="FILE",
        default=None,
        help="what the operations of an MoE layer cost, as an earlier run logged it, for auto; "
        "default: measured before a layer's first call",
    )


@dataclass(frozen=True)
class MoERequest:
    """The MoE flags of a run that uses them.

    Attributes:
        chunks: n, for every layer and step, or ``auto``.
        strategy: a strategy's name, or ``auto``.
        budget_bytes: for what is chosen; None: no limit.
        costs: in place of those that would be measured.
    """

    chunks: str
    strategy: str
    budget_bytes: int | None = None
    costs: Measured | None = None

    @classmethod
    def of(cls, args: MegatronArgs) -> MoERequest | None:
        """What ``args`` ask for; None if MoE layers stay Megatron's.

        Raises:
            ConfigError: flags that contradict each other or are unknown.
        """
        chunks, strategy, budget, costs = (getattr(args, _attribute(flag), None) for flag in FLAGS)
        if chunks is not None and chunks not in CHUNKS:
            raise ConfigError(f"{FLAGS[0]} must be one of {', '.join(CHUNKS)}, got {chunks!r}")
        if strategy is not None and strategy not in STRATEGIES:
            raise ConfigError(
                f"{FLAGS[1]} must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
            )
        if chunks in (None, "off"):
            for flag, value in zip(FLAGS[1:], (strategy, budget, costs)):
                if value not in (None, "none"):
                    raise ConfigError(
                        f"{flag} {value} is for MoE layers in chunks, which are off; add "
                        f"{FLAGS[0]} 2 (1 is the whole batch at once), or drop {flag}"
                    )
            return None
        for flag, value in ((FLAGS[2], budget), (FLAGS[3], costs)):
            if value is not None and AUTO not in (chunks, strategy):
                raise ConfigError(
                    f"{flag} {value} is what auto chooses by, and nothing is to be chosen; add "
                    f"{FLAGS[1]} auto, or drop {flag}"
                )
        nbytes = _read(FLAGS[2], budget, parse_bytes)
        given = _read(FLAGS[3], costs, cost_file.load)
        return cls(chunks, strategy or "none", nbytes, given)

    @property
    def stock(self) -> bool:
        """True where Megatron's own layer does all of it."""
        return (self.chunks, self.strategy) == ("1", "none")

    def space(self) -> Space:
        """What may be chosen."""
        return Space.of(self.chunks, self.strategy)

    def text(self, args: MegatronArgs) -> str:
        """For the log: what runs, and what of Megatron's has no effect there."""
        what = f"MoE layers in {self.chunks} chunk(s), --moe-memory-reuse {self.strategy}"
        if self.budget_bytes is not None:
            what += f", at most {self.budget_bytes} bytes"
        if not self.stock and args.moe_permute_fusion:
            what += " (they permute rows by index; --moe-permute-fusion has no effect on them)"
        return what

    def check(self, args: MegatronArgs) -> None:
        """Refuse what of Megatron cannot work with it; before Megatron's own validation.

        Raises:
            ConfigError: the first rule that applies.
        """
        if not args.num_experts:
            raise ConfigError(
                f"{FLAGS[0]} {self.chunks} is for MoE layers, and the model has none "
                f"(--num-experts is not set); drop {FLAGS[0]}"
            )
        for rule in CONFLICTS:
            found = rule.found(args, self.strategy)
            if found is not None:
                own = f"{FLAGS[0]} {self.chunks}"
                if rule.restored_only:
                    own = f"{FLAGS[1]} {self.strategy}"
                raise ConfigError(f"{own} does not support {rule.flag} {found}: {rule.reason}")


def _read(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


@dataclass(frozen=True)
class Conflict:
    """One feature of Megatron that MoE layers in chunks refuse.

    Attributes:
        flag: as the user wrote it.
        reason: why, and what to do instead; completes "X does not support FLAG VALUE: ...".
        values: those that conflict, for flags that take a value or several; empty: any but ``off``.
        off: value that means "not in use"; anything false means so too.
        restored_only: it concerns strategies other than none.
    """

    flag: str
    reason: str
    values: tuple[str, ...] = ()
    off: Any = False
    restored_only: bool = False

    def found(self, args: MegatronArgs, strategy: str) -> str | None:
        """The value in ``args`` that conflicts, as text; None if there is none."""
        value = getattr(args, _attribute(self.flag), self.off)
        if not value or value == self.off or (self.restored_only and strategy == "none"):
            return None
        if value is True:
            return "(set)"
        given = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
        wrong = [str(x) for x in given if not self.values or str(x) in self.values]
        return " ".join(wrong) or None


_ONE_CALL = "it works on a whole layer at once, which runs in chunks here; drop it"
_SCHEDULE = "its schedule calls the parts of an MoE layer itself and would pass the chunks by"
_THRICE = "the experts would be computed three times"
_QUANTIZED = "each chunk would be scaled and padded on its own; drop one of both"
_GRAPH = "a captured graph has fixed sizes, and chunks have those of the routing; drop it"
_SHARDED = "it gathers and frees parameters around whole layers; use --use-distributed-optimizer"

CONFLICTS = (
    Conflict(
        "--moe-token-dispatcher-type",
        "chunks have all-to-alls of their own; set it to alltoall",
        off="alltoall",
    ),
    Conflict(
        "--moe-pad-expert-input-to-capacity",
        "the capacity is that of the whole batch; drop it (--moe-expert-capacity-factor works)",
    ),
    Conflict("--overlap-moe-expert-parallel-comm", f"{_SCHEDULE}; drop one of both"),
    Conflict("--delay-wgrad-compute", f"{_ONE_CALL}, or use --pp-schedule, which delays them too"),
    Conflict("--overlap-dispatch-backward-with-experts-wgrad", _ONE_CALL),
    Conflict("--moe-shared-expert-overlap", _ONE_CALL),
    Conflict(
        "--recompute-granularity",
        f"{_THRICE}; use --moe-memory-reuse none, or recompute selectively",
        values=("full",),
        restored_only=True,
    ),
    Conflict(
        "--recompute-modules",
        f"{_THRICE}; drop moe there, or use --moe-memory-reuse none",
        values=("moe",),
        restored_only=True,
    ),
    Conflict(
        "--recompute-modules",
        "its recomputation does not run inside a backward pass of ours; drop moe_act there, "
        "--moe-memory-reuse s3 or s4 saves more",
        values=("moe_act",),
    ),
    Conflict(
        "--offload-modules",
        "it expects each layer's tensors once a pass; drop them there, --moe-memory-reuse s1 "
        "offloads both",
        values=("expert_fc1", "moe_act", "fused_group_mlp"),
    ),
    Conflict("--moe-paged-stash", f"{_ONE_CALL}; --moe-memory-reuse s1 offloads too"),
    Conflict("--cpu-offloading-num-layers", _ONE_CALL + " and use --moe-memory-reuse s1"),
    Conflict("--mlp-chunks-for-training", "it cuts before routing; drop it", off=1),
    Conflict("--enable-cuda-graph", _GRAPH),
    Conflict("--external-cuda-graph", _GRAPH),
    Conflict("--cuda-graph-impl", _GRAPH + ", or set it to none", off="none"),
    Conflict("--fp8-format", _QUANTIZED),
    Conflict("--fp4-format", _QUANTIZED),
    Conflict("--moe-router-padding-for-quantization", _QUANTIZED),
    Conflict("--moe-router-padding-for-fp8", _QUANTIZED),
    Conflict("--use-megatron-fsdp", _SHARDED),
    Conflict("--use-torch-fsdp2", _SHARDED),
)


def markdown() -> str:
    """The table as the documentation shows it."""
    lines = ["| flag | with | why, and what to do |", "|---|---|---|"]
    for rule in CONFLICTS:
        values = " ".join(("", *rule.values))
        with_ = "s1 to s4" if rule.restored_only else "any number of chunks"
        lines.append(f"| `{rule.flag}{values}` | {with_} | {rule.reason} |")
    return "\n".join(lines)


def _attribute(flag: str) -> str:
    renamed = {"--fp8-format": "fp8", "--fp4-format": "fp4"}
    return renamed.get(flag, attribute(flag))
