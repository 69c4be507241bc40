"""What ``--pp-schedule`` refuses, as data: combinations; single options are in ``plan.refusals``.

Rules are in one table for each time at which their facts are there.
"""

from __future__ import annotations

from ....plan.refusals import FILE as FILE
from ....plan.refusals import SCHEDULE as SCHEDULE
from ....plan.refusals import SEVERAL_CHUNKS as SEVERAL_CHUNKS
from ....plan.refusals import V_PLACEMENT as V_PLACEMENT
from ...rules import TWO_RANKS, Rule
from ...rules import require as require

OPTIONS = (
    Rule(
        "--pp-schedule auto does not support --pp-group-size {group_size}",
        "it chooses the group size itself",
        "drop it, or use --pp-schedule gis",
        lambda it: it.auto and it.group_size is not None,
    ),
    Rule(
        "--pp-schedule {name} does not support --pp-cost, --pp-memory-cap and --pp-group-size",
        "a file's order is fixed",
        "drop them",
        lambda it: (
            it.file and (it.cost or it.group_size is not None or (it.cap and not it.offload))
        ),
    ),
    Rule(
        "--pp-schedule {name} needs a cap, a fraction of 1F1B's peak",
        "there is none",
        "add e.g. --pp-memory-cap 0.6",
        lambda it: it.takes_cap and it.cap is None,
    ),
    Rule(
        "--pp-schedule {name} does not support --pp-memory-cap {cap}",
        "the memory of {name} is fixed",
        "use auto or v-cap, or offload",
        lambda it: it.in_bytes and not (it.takes_cap or it.auto or it.file or it.offload),
    ),
    Rule(
        "--pp-schedule {name} needs microbatches that are all cut alike",
        "it has {fewest} to {most} slices a microbatch",
        "write it with --slices K",
        lambda it: it.fewest < it.most,
    ),
    Rule(
        "--pp-schedule {name} does not support --pp-offload",
        "it has its own offload actions",
        "drop --pp-offload and the flags that go with it, or write the file without --offload",
        lambda it: it.file and it.file.has_offload and it.offload,
    ),
    Rule(
        "--pp-schedule {name} needs the passes of a sharded vocabulary with one barrier",
        "it has {barriers} barriers a microbatch",
        "write the file with --vocabulary-barriers 1",
        lambda it: (
            it.file
            and it.file.vocabulary is not None
            and (it.file.barriers != 1 or not it.file.vocabulary.embeddings)
        ),
    ),
    Rule(
        "--pp-schedule {name} needs Megatron's placement (stage = chunk * pp + rank) or the V",
        "its placement is {placement}",
        "write it with one of them",
        lambda it: it.file and not (it.file.placement.is_vee() or it.file.placement.is_loop()),
    ),
)
PIPELINE = (
    TWO_RANKS,
    Rule(
        "--pp-schedule {name} is for {ranks} pipeline ranks",
        "there are {pp}",
        "generate it with --pp {pp}",
        lambda it: it.file and it.file.pp != it.pp,
    ),
    Rule(
        "--pp-vocab-parallel needs a schedule with passes of a sharded vocabulary",
        "{name} has none",
        "write the file with --vocabulary",
        lambda it: it.file and it.sharded and it.file.barriers != 1,
    ),
    Rule(
        "--pp-schedule {name} is for a sharded vocabulary",
        "--pp-vocab-parallel is off",
        "write the file without --vocabulary, or add --pp-vocab-parallel",
        lambda it: it.file and not it.sharded and it.file.barriers,
    ),
    Rule(
        "--pp-schedule {name} does not support --microbatch-group-size-per-virtual-pipeline-stage "
        "{grouped} on {pp} pipeline ranks",
        "the groups of microbatches are those of its order",
        "drop it, or use --pp-schedule gis --pp-group-size {grouped}",
        lambda it: it.grouped not in (None, it.pp),  # Megatron fills in the latter
    ),
)
ASKED = (
    Rule(
        "--pp-schedule {given} needs stages that {pp} pipeline ranks can share",
        "{flag} lists {stages}",
        "list {pp} or a multiple of it",
        lambda it: it.stages is not None and it.stages % it.pp,
    ),
    Rule(
        "--pp-schedule auto does not support {flag}",
        "it cannot choose the chunks under it",
        "name a schedule, or replace it by --num-virtual-stages-per-pipeline-rank",
        lambda it: it.auto and it.flag and it.stages is None and (it.chunks or 0) < 2,
    ),
    Rule(
        "--pp-schedule {name} does not support {flag}",
        "it always has two model chunks a rank",
        "remove that flag",
        lambda it: it.vee and it.flag and it.stages is None,
    ),
)
CHUNKS = (
    Rule(
        "--pp-schedule {name} needs {number} a rank",
        "{makes}",
        "{fix}",
        lambda it: it.made is None or not it.least <= it.made <= (it.most or it.made),
    ),
)
COUNT = Rule(
    "--pp-schedule {name} is for {held} microbatches",
    "the run has {asked} (global batch / (micro batch * data parallel))",
    "generate it with --microbatches {asked}",
)
NAMED = Rule(
    "--pp-schedule needs one of {names}, or a file's path (*.json, from `megatron-ext "
    "schedule --output`)",
    "{name!r} is not known",
    "give one of them{meant}",
)
SIZES = Rule(
    "--pp-memory-cap {cap} in bytes needs the model's sizes",
    "{reason}",
    "give the cap as a fraction of 1F1B's peak",
)
RULES = (*OPTIONS, *PIPELINE, *ASKED, *CHUNKS, COUNT, NAMED, SIZES)
