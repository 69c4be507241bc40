"""What of Megatron does not go together with our schedules: one table, for code, docs and tests.

Everything else is meant to work. A rule looks at one of Megatron's arguments before training; its
sentence says what was set, why that cannot work, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._input import attribute
from .arguments import MegatronArgs
from .errors import ConfigError


@dataclass(frozen=True)
class Rejection:
    """One feature of Megatron that a schedule refuses.

    Attributes:
        flag: as the user wrote it.
        off: value of the argument that means "not in use", or several; anything false means so too.
        reason: why, and what to do instead; completes "X does not support FLAG: ...".
        vee_only: it concerns V placement, not the schedules with Megatron's own placement.
    """

    flag: str
    reason: str
    off: Any = False
    vee_only: bool = False

    @property
    def attribute(self) -> str:
        """The argument's name in Megatron's ``args``."""
        return attribute(self.flag)

    def applies(self, args: MegatronArgs, vee: bool) -> bool:
        """True if ``args`` use the feature."""
        off = self.off if isinstance(self.off, tuple) else (self.off,)
        value = getattr(args, self.attribute, None)
        return bool(value) and value not in off and (vee or not self.vee_only)


_ORDER = "it works out what comes next from the order of stock's schedules; drop it"
_GRAPH = "graphs are captured for the order of stock's schedules; drop it"

REJECTIONS = (
    Rejection("--cpu-offloading", "Megatron allows it only without a pipeline; drop it"),
    Rejection("--fine-grained-activation-offloading", _ORDER),
    Rejection(
        "--overlap-moe-expert-parallel-comm",
        "it is a schedule of its own that runs a forward and a backward pass as one; drop it, or "
        "drop --pp-schedule",
    ),
    Rejection(
        "--delay-wgrad-compute",
        "the schedule itself delays weight gradients, to where they fill gaps; drop it",
    ),
    Rejection(
        "--defer-embedding-wgrad-compute",
        "the schedule itself decides when the output layer's weight gradient is computed; drop it",
    ),
    Rejection("--enable-cuda-graph", _GRAPH),
    Rejection("--external-cuda-graph", _GRAPH),
    Rejection("--cuda-graph-impl", _GRAPH + ", or set it to none", off="none"),
    Rejection(
        "--use-megatron-fsdp",
        "it frees parameters after each pass, but a weight gradient may come passes later; use "
        "--use-distributed-optimizer",
    ),
    Rejection(
        "--use-torch-fsdp2",
        "it frees parameters after each pass, but a weight gradient may come passes later; use "
        "--use-distributed-optimizer",
    ),
    Rejection(
        "--num-microbatches-with-partial-activation-checkpoints",
        "which microbatches may keep their activations depends on the order of stock's schedules; "
        "drop it and use a schedule with less memory",
        off=None,
    ),
    Rejection(
        "--overlap-param-gather-with-optimizer-step",
        "it expects chunks to start in the order of stock's interleaved schedule; use "
        "--overlap-param-gather alone",
    ),
    Rejection(
        "--hybrid-context-parallel",
        "it reorders microbatches inside stock's schedules; drop it",
    ),
    Rejection("--moe-paged-stash", _ORDER),
    Rejection(
        "--perform-rl-step",
        "inference between training steps runs its own pipeline through the model; drop one of "
        "both",
    ),
    Rejection(
        "--inprocess-restart",
        "the hooks of the first start would meet the second; let torchrun restart the ranks "
        "(--max-restarts)",
    ),
    Rejection(
        "--hybrid-layer-pattern",
        "it places layers in the order of Megatron's own stages; use a schedule without V "
        "placement, e.g. zb-h1 or interleaved-zb",
        off=None,
        vee_only=True,
    ),
    Rejection(
        "--use-legacy-models",
        "Megatron's legacy models number their layers in loop order; drop it, or use a schedule "
        "without V placement, e.g. zb-h1",
        vee_only=True,
    ),
)


def require_supported_features(
    args: MegatronArgs, name: str, vee: bool, rules: Sequence[Rejection] = REJECTIONS
) -> None:
    """Refuse a run that uses something of ``rules``.

    Args:
        args: Megatron's arguments, before its own validation.
        name: the flag that does not go with it, for the sentence.
        vee: it has V placement.
        rules: every schedule's, or those of a feature.

    Raises:
        ConfigError: the first rule that applies.
    """
    for rule in rules:
        if rule.applies(args, vee):
            value = getattr(args, rule.attribute)
            raise ConfigError(
                f"{name} does not support {rule.flag} (set to {value}): {rule.reason}"
            )


def markdown() -> str:
    """The table as the documentation shows it."""
    lines = ["| flag | with | why, and what to do |", "|---|---|---|"]
    for rule in REJECTIONS:
        placement = "V placement" if rule.vee_only else "every schedule"
        lines.append(f"| `{rule.flag}` | {placement} | {rule.reason} |")
    return "\n".join(lines)
