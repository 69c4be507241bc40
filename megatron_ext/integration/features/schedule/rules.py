"""What ``--pp-schedule`` refuses, as data: single options of Megatron, and combinations.

Of these one table for each time at which the facts are there, by ``choose`` and ``validate``.
"""

from __future__ import annotations

from typing import Any

from ...._conflict import Conflict, Rule, first_broken
from ....schedule.generators import MOST_EFFORT
from ...arguments import MegatronArgs
from ...errors import ConfigError

_ORDER = "it works out what comes next from the order of stock's schedules; drop it"
_FSDP = (
    "it frees parameters after each pass, but a weight gradient may come passes later; use "
    "--use-distributed-optimizer"
)
_COUNT = "a file has a fixed number of microbatches; use a schedule's name"
V_PLACEMENT = "V placement"
FILE = "a schedule file"


class _LocalAttention(Conflict):
    """A conflict with Megatron's local attention only; Transformer Engine's ignores the flag."""

    def found(self, args: MegatronArgs) -> str | None:
        return super().found(args) if args.transformer_impl == "local" else None


CONFLICTS: tuple[Conflict, ...] = (
    Conflict("--cpu-offloading", "Megatron allows it only without a pipeline; drop it"),
    Conflict("--fine-grained-activation-offloading", _ORDER),
    Conflict(
        "--defer-embedding-wgrad-compute",
        "the schedule itself decides when the output layer's weight gradient is computed; drop it",
    ),
    Conflict("--use-megatron-fsdp", _FSDP),
    Conflict("--use-torch-fsdp2", _FSDP),
    Conflict(
        "--num-microbatches-with-partial-activation-checkpoints",
        "which microbatches may keep their activations depends on the order of stock's "
        "schedules; drop it and use a schedule with less memory",
    ),
    Conflict(
        "--overlap-param-gather-with-optimizer-step",
        "it expects chunks to start in the order of stock's interleaved schedule; use "
        "--overlap-param-gather alone",
    ),
    Conflict(
        "--hybrid-context-parallel",
        "it reorders microbatches inside stock's schedules; drop it",
    ),
    Conflict("--moe-paged-stash", _ORDER),
    Conflict(
        "--perform-rl-step",
        "inference between training steps runs its own pipeline through the model; drop one "
        "of them",
    ),
    Conflict(
        "--inprocess-restart",
        "the hooks of the first start would meet the second; let torchrun restart the ranks "
        "(--max-restarts)",
    ),
    Conflict("--rampup-batch-size", _COUNT, only=FILE),
    Conflict("--step-batch-size-schedule", _COUNT, only=FILE),
    Conflict(
        "--use-legacy-models",
        "Megatron's legacy models number their layers in loop order; drop it, or use a "
        "schedule without V placement, e.g. zb-h1",
        only=V_PLACEMENT,
    ),
    Conflict(
        "--heterogeneous-layers-config-path",
        "Megatron's scripts build these layers for one chunk a rank; use a schedule with one, "
        "e.g. zb-h1",
        only=V_PLACEMENT,
    ),
    Conflict(
        "--iterations-to-skip",
        "Megatron's scripts draw the data of skipped iterations for one chunk a rank; use a "
        "schedule with one, e.g. zb-h1",
        only=V_PLACEMENT,
    ),
    _LocalAttention(
        "--reset-attention-mask",
        "with --transformer-impl local the stages between the first and the last would look "
        "across documents, since Megatron's scripts make this mask on these two alone; use a "
        "schedule without V placement, e.g. zb-h1, on two ranks",
        only=V_PLACEMENT,
    ),
)


def require(rules: tuple[Rule, ...], **facts: Any) -> None:
    """Refuse facts that break a rule.

    Raises:
        ConfigError: the first one.
    """
    found = first_broken(rules, facts)
    if found is not None:
        raise ConfigError(found)


OPTIONS = (
    Rule(
        lambda it: it.effort is not None and not 0 < it.effort <= MOST_EFFORT,
        f"--pp-effort must be more than 0 and at most {MOST_EFFORT} seconds, got {{effort:g}}",
    ),
    Rule(
        lambda it: it.auto and it.group_size is not None,
        "--pp-schedule auto chooses the group size itself; drop --pp-group-size {group_size}, or "
        "use --pp-schedule gis",
    ),
    Rule(
        lambda it: (
            it.file and (it.cost or it.group_size is not None or (it.cap and not it.offload))
        ),
        "--pp-schedule {name}: a file's order is fixed; drop --pp-cost, --pp-memory-cap and "
        "--pp-group-size",
    ),
    Rule(
        lambda it: it.takes_cap and it.cap is None,
        "--pp-schedule {name} needs a cap, a fraction of 1F1B's peak; add e.g. --pp-memory-cap 0.6",
    ),
    Rule(
        lambda it: it.in_bytes and not (it.takes_cap or it.auto or it.file or it.offload),
        "--pp-schedule {name}: the memory of {name} is fixed and takes no --pp-memory-cap {cap}; "
        "use auto or v-cap, or offload",
    ),
    Rule(
        lambda it: it.slices[0] < it.slices[1],
        "--pp-schedule: {name} has {slices[0]} to {slices[1]} slices a microbatch, but training "
        "cuts all microbatches of a file alike; write it with --slices K",
    ),
    Rule(
        lambda it: it.file and it.file.has_offload and it.offload,
        "--pp-schedule: {name} has its own offload actions; drop --pp-offload and the flags that "
        "go with it, or write the file without --offload",
    ),
    Rule(
        lambda it: (
            it.file
            and it.file.vocabulary is not None
            and (it.file.barriers != 1 or not it.file.vocabulary.embeddings)
        ),
        "--pp-schedule: {name} has {file.barriers} barriers a microbatch, but training runs the "
        "passes of a sharded vocabulary with one; write the file with --vocabulary-barriers 1",
    ),
    Rule(
        lambda it: it.file and not (it.file.placement.is_vee() or it.file.placement.is_loop()),
        "--pp-schedule {name}: its placement {file.placement} is neither Megatron's (stage = "
        "chunk * pp + rank) nor the V; the runtime can place models only so",
    ),
)
PIPELINE = (
    Rule(
        lambda it: it.pp < 2,
        "--pp-schedule {name} needs {size} >= 2, got {pp}; raise it, or drop the schedule",
    ),
    Rule(
        lambda it: it.file and it.file.pp != it.pp,
        "--pp-schedule {name} is a file for {file.pp} pipeline ranks, but there are {pp}; generate "
        "it with --pp {pp}",
    ),
    Rule(
        lambda it: it.file and it.sharded and it.file.barriers != 1,
        "--pp-schedule {name} has no passes of a sharded vocabulary; write the file with "
        "--vocabulary",
    ),
    Rule(
        lambda it: it.file and not it.sharded and it.file.barriers,
        "--pp-schedule {name} has passes of a sharded vocabulary; write the file without "
        "--vocabulary, or add --pp-vocab-parallel",
    ),
)
ASKED = (
    Rule(
        lambda it: it.stages is not None and it.stages % it.pp,
        "--pp-schedule {given}: {flag} lists {stages} stages, which {pp} pipeline ranks cannot "
        "share; list {pp} or a multiple of it",
    ),
    Rule(
        lambda it: it.auto and it.flag and it.stages is None and (it.chunks or 0) < 2,
        "--pp-schedule auto cannot choose under {flag}; name a schedule, or replace it by "
        "--num-virtual-stages-per-pipeline-rank",
    ),
    Rule(
        lambda it: it.least > 1 and it.one_only,
        "--pp-schedule {name} has {least} model chunks a rank, but this Megatron's hybrid models "
        "have one; use a schedule with one chunk, e.g. zb-h1, or megatron-core 0.17 or newer",
    ),
    Rule(
        lambda it: it.vee and it.flag and it.stages is None,
        "--pp-schedule {name} always has two model chunks a rank; remove {flag}",
    ),
)
CHUNKS = (
    Rule(
        lambda it: it.made is None or not it.least <= it.made <= (it.most or it.made),
        "--pp-schedule {name} needs {number} a rank, but {makes}; {fix}",
    ),
)
RULES = (*OPTIONS, *PIPELINE, *ASKED, *CHUNKS)
