"""Checks of ``--pp-schedule`` and its options against Megatron's arguments."""

from __future__ import annotations

import logging

from ....plan.budget import Budget
from ....plan.profile import Profile
from ....schedule.generators import GENERATORS
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...feature import require_no_conflict
from ...layout import count_stages, vee_layout_text
from ...utils import full_batch
from . import V_PLACEMENT, Schedule
from .choose import Choice
from .families import ANY_CHUNKS, ONE_CHUNK
from .job import job_of_args, splits_of

logger = logging.getLogger(__name__)

# Flags for layers that Megatron spreads unevenly, which may suit one placement and not another.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def before_megatron(args: MegatronArgs, choice: Choice, profile: Profile | None = None) -> None:
    """Checks that need only the user's flags; sets the virtual stages that the schedule needs.

    Args:
        args: Megatron's, parsed and not yet validated.
        choice: what ``--pp-schedule`` asks for; ``auto`` is decided here.
        profile: of a former run, to plan with.

    Raises:
        ConfigError: a combination that cannot work.
    """
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        raise ConfigError(
            f"--pp-schedule {choice.name} needs --pipeline-model-parallel-size >= 2, got {pp}"
        )
    if profile is not None:
        choice.give_profile(profile, splits_of(args))
    if choice.cap_bytes is not None:
        job = job_of_args(args)
        choice.give_budget(Budget(job, choice.cap_bytes, splits_of(args), profile))
        if args.rank == 0 and job.assumptions:
            logger.warning(
                "megatron_ext: --pp-memory-cap %s: %s",
                args.pp_memory_cap,
                "; ".join(job.assumptions),
            )
    flag = f"--pp-schedule {choice.name}"
    undecided = choice.undecided
    parts = {"": flag, V_PLACEMENT: flag} if not undecided and choice.vee else {"": flag}
    require_no_conflict(args, Schedule.conflicts, parts)
    if undecided:
        _decide(args, choice, pp)
        return
    if choice.file is not None and choice.file.pp != pp:
        raise ConfigError(
            f"schedule file {choice.name} is for pp={choice.file.pp} but "
            f"--pipeline-model-parallel-size is {pp}; generate it with --pp {pp}"
        )
    if choice.vee:
        _place_vee(args, choice, pp)
        return
    asked = _virtual_stages_asked(args)
    if choice.file is not None and choice.file.chunks > 1:
        if asked is None:
            args.num_virtual_stages_per_pipeline_rank = choice.file.chunks
    elif choice.file is None and GENERATORS[choice.name].any_chunks:
        if asked is None:
            raise ConfigError(
                f"--pp-schedule {choice.name} needs the number of model chunks a rank; add "
                "--num-virtual-stages-per-pipeline-rank 2 (or more)"
            )
    elif asked is not None and not _layout_has_one_chunk(args, pp):
        raise ConfigError(
            f"--pp-schedule {choice.name} has one model chunk a rank, but virtual stages are set "
            f"({asked}); remove that flag or use --pp-schedule interleaved"
        )


def _decide(args: MegatronArgs, choice: Choice, pp: int) -> None:
    """What auto stands for; asks Megatron for the chunks that it needs."""
    microbatches = _full_microbatches(args, pp)
    asked = _virtual_stages_asked(args)
    layers = args.num_layers
    if asked is not None:
        # The user has settled the chunks, and with them that stages lie as Megatron lays them.
        stages = args.num_virtual_stages_per_pipeline_rank
        per_stage = args.num_layers_per_virtual_pipeline_stage
        if stages is None and per_stage and layers:
            stages = layers // pp // per_stage
        if not stages or stages < 2:
            raise ConfigError(
                f"--pp-schedule auto cannot choose under {asked}; name a schedule, or replace it "
                "by --num-virtual-stages-per-pipeline-rank"
            )
        choice.decide(pp, microbatches, ANY_CHUNKS, stages)
        return
    even = layers is not None and layers % (2 * pp) == 0
    uneven = any(getattr(args, attribute) not in (None, False) for attribute in _UNEVEN)
    if (
        not even
        or uneven
        or any(conflict.found(args) is not None for conflict in Schedule.conflicts)
    ):
        choice.decide(pp, microbatches, ONE_CHUNK)
        return
    choice.decide(pp, microbatches)
    if choice.vee:
        _place_vee(args, choice, pp)
    elif GENERATORS[choice.name].any_chunks:
        args.num_virtual_stages_per_pipeline_rank = 2
        # Stock refuses two virtual stages on two ranks without this; ours always overlaps.
        args.overlap_p2p_comm = True


def _full_microbatches(args: MegatronArgs, pp: int) -> int:
    """Microbatches of the full batch, before Megatron has derived its data-parallel size."""
    ranks = args.tensor_model_parallel_size * pp * args.context_parallel_size
    per_step = args.micro_batch_size * max(args.world_size // ranks, 1)
    return max((full_batch(args) or per_step) // per_step, 1)


def after_megatron(args: MegatronArgs, choice: Choice) -> int:
    """Checks that need Megatron's derived values; returns the model chunks a rank.

    Raises:
        ConfigError: the schedule and the model's virtual stages or microbatches disagree.
    """
    chunks = args.virtual_pipeline_model_parallel_size or 1
    expected = choice.file.chunks if choice.file is not None else None
    if choice.vee:
        expected = 2
    if expected is not None and chunks != expected:
        raise ConfigError(
            f"--pp-schedule {choice.name} has {expected} model chunks a rank but the flags make "
            f"{chunks}; remove the virtual-stage flags"
        )
    for flag in ("rampup_batch_size", "step_batch_size_schedule"):
        # Before core_v0.18 Megatron lacks the second.
        if choice.file is not None and getattr(args, flag, None) is not None:
            raise ConfigError(
                "a schedule file has a fixed number of microbatches and cannot be used with "
                f"--{flag.replace('_', '-')}; use a schedule name"
            )
    batch = full_batch(args)
    assert batch is not None  # Megatron has set it
    microbatches = batch // (args.micro_batch_size * args.data_parallel_size)
    # Made (and kept) here, so that options which do not fit end the run before it starts.
    pp, link = args.pipeline_model_parallel_size, None
    choice.fit(pp, chunks, microbatches)
    if choice.offload is not None:
        choice.offload.check_chunks(chunks)
        link = choice.offload.link(pp)
    choice.plan(pp, chunks, microbatches, link)
    return chunks


def _place_vee(args: MegatronArgs, choice: Choice, pp: int) -> None:
    """Say the V's stages in Megatron's own words: one layout string with two stages a rank."""
    for attribute in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ):
        value = getattr(args, attribute)
        if value is not None:
            raise ConfigError(
                f"--pp-schedule {choice.name} always has two model chunks a rank; remove "
                f"--{attribute.replace('_', '-')} {value}"
            )
    args.pipeline_model_parallel_layout = vee_layout_text(args, pp)
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False
    # Stock refuses two virtual stages on two ranks without this; our executor always overlaps.
    args.overlap_p2p_comm = True


def _layout_has_one_chunk(args: MegatronArgs, pp: int) -> bool:
    text = args.pipeline_model_parallel_layout
    return text is not None and count_stages(text) == pp


def _virtual_stages_asked(args: MegatronArgs) -> str | None:
    for attribute in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    ):
        value = getattr(args, attribute)
        if value is not None:
            return f"--{attribute.replace('_', '-')} {value}"
    return None
