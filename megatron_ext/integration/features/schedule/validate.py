"""Checks of ``--pp-schedule`` and its options against Megatron's arguments."""

from __future__ import annotations

import logging
from dataclasses import replace

from ....plan.profile import Profile
from ....schedule import AUTO, GENERATORS
from ....schedule.select import ANY_CHUNKS, ONE_CHUNK
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...feature import Run, require_no_conflict
from ...layout import count_stages, vee_layout_text
from ...utils import full_batch
from . import V_PLACEMENT, Schedule
from .choose import Choice, ScheduleRequest
from .job import job_of_args, splits_of

logger = logging.getLogger(__name__)

# Flags for layers that Megatron spreads unevenly, which may suit one placement and not another.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def before_megatron(
    args: MegatronArgs, request: ScheduleRequest, profile: Profile | None = None
) -> ScheduleRequest:
    """Checks that need only the user's flags; sets the virtual stages that the schedule needs.

    Args:
        args: Megatron's, parsed and not yet validated.
        request: what ``--pp-schedule`` asks for.
        profile: of a former run, to plan with.

    Returns:
        ``request`` with the profile, with this job for a cap in bytes, and with ``auto`` decided.

    Raises:
        ConfigError: a combination that cannot work.
    """
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        raise ConfigError(
            f"--pp-schedule {request.name} needs --pipeline-model-parallel-size >= 2, got {pp}"
        )
    request = replace(request, profile=profile, splits=splits_of(args))
    if request.cap_bytes is not None:
        job = job_of_args(args)
        request = request.for_job(job)
        if args.rank == 0 and job.assumptions:
            logger.warning(
                "megatron_ext: --pp-memory-cap %s: %s",
                args.pp_memory_cap,
                "; ".join(job.assumptions),
            )
    flag = f"--pp-schedule {request.name}"
    auto = request.name == AUTO
    parts = {"": flag, V_PLACEMENT: flag} if not auto and request.vee else {"": flag}
    require_no_conflict(args, Schedule.conflicts, parts)
    if auto:
        return _decide(args, request, pp)
    if request.file is not None and request.file.pp != pp:
        raise ConfigError(
            f"schedule file {request.name} is for pp={request.file.pp} but "
            f"--pipeline-model-parallel-size is {pp}; generate it with --pp {pp}"
        )
    if request.vee:
        _place_vee(args, request, pp)
        return request
    asked = _virtual_stages_asked(args)
    if request.file is not None and request.file.chunks > 1:
        if asked is None:
            args.num_virtual_stages_per_pipeline_rank = request.file.chunks
    elif request.file is None and GENERATORS[request.name].any_chunks:
        if asked is None:
            raise ConfigError(
                f"--pp-schedule {request.name} needs the number of model chunks a rank; add "
                "--num-virtual-stages-per-pipeline-rank 2 (or more)"
            )
    elif asked is not None and not _layout_has_one_chunk(args, pp):
        raise ConfigError(
            f"--pp-schedule {request.name} has one model chunk a rank, but virtual stages are set "
            f"({asked}); remove that flag or use --pp-schedule interleaved"
        )
    return request


def require_named(run: Run) -> None:
    """Refuse what can be decided only with all of Megatron's arguments.

    Raises:
        ConfigError: ``auto``, or a cap in bytes.
    """
    assert run.request is not None
    if run.request.name == AUTO:
        raise ConfigError(
            "--pp-schedule auto would choose the placement of the model's stages, which must be "
            "known before the model is built; run `megatron-ext compare` for your sizes and name "
            "the schedule"
        )
    if run.request.cap_bytes is not None:
        raise ConfigError(
            f"--pp-memory-cap {run.args.pp_memory_cap} in bytes needs the sizes of the model and "
            "its optimizer before they are built; run `megatron-ext plan` for them and give the "
            "cap as a fraction of 1F1B's peak"
        )


def check_model(run: Run) -> None:
    """Checks of a library's model: what its configuration uses, and how it was cut into chunks.

    Raises:
        ConfigError: a combination that cannot work.
    """
    request, pp, chunks = run.request, run.args.pipeline_model_parallel_size, len(run.models)
    assert request is not None
    if pp < 2:
        raise ConfigError(
            f"--pp-schedule {request.name} needs a pipeline of 2 ranks or more, got {pp}; use "
            "Megatron's forward_backward_no_pipelining for this model"
        )
    flag = f"--pp-schedule {request.name}"
    require_no_conflict(
        run.args, Schedule.conflicts, {"": flag, **({V_PLACEMENT: flag} if request.vee else {})}
    )
    if request.file is not None:
        if (request.file.pp, request.file.chunks) != (pp, chunks):
            raise ConfigError(
                f"{flag} is for {request.file.pp} ranks with {request.file.chunks} chunk(s) each, "
                f"but the model was built for {pp} with {chunks}; generate it with --pp {pp} "
                f"--chunks {chunks}"
            )
        return
    generator = GENERATORS[request.name]
    fits = chunks > 1 if generator.any_chunks else chunks == generator.default_chunks
    if not fits:
        wanted = "2 or more" if generator.any_chunks else generator.default_chunks
        size = None if wanted == 1 else 2
        raise ConfigError(
            f"{flag} needs {wanted} model chunk(s) on each rank, but the model was built with "
            f"{chunks}; build it with virtual_pipeline_model_parallel_size={size}"
        )


def _decide(args: MegatronArgs, request: ScheduleRequest, pp: int) -> ScheduleRequest:
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
        return request.decide(pp, microbatches, ANY_CHUNKS, stages)
    even = layers is not None and layers % (2 * pp) == 0
    uneven = any(getattr(args, attribute) not in (None, False) for attribute in _UNEVEN)
    if (
        not even
        or uneven
        or any(conflict.found(args) is not None for conflict in Schedule.conflicts)
    ):
        return request.decide(pp, microbatches, ONE_CHUNK)
    request = request.decide(pp, microbatches)
    if request.vee:
        _place_vee(args, request, pp)
    elif GENERATORS[request.name].any_chunks:
        args.num_virtual_stages_per_pipeline_rank = 2
        # Stock refuses two virtual stages on two ranks without this; ours always overlaps.
        args.overlap_p2p_comm = True
    return request


def _full_microbatches(args: MegatronArgs, pp: int) -> int:
    """Microbatches of the full batch, before Megatron has derived its data-parallel size."""
    ranks = args.tensor_model_parallel_size * pp * args.context_parallel_size
    per_step = args.micro_batch_size * max(args.world_size // ranks, 1)
    return max((full_batch(args) or per_step) // per_step, 1)


def after_megatron(args: MegatronArgs, request: ScheduleRequest) -> Choice:
    """Checks that need Megatron's derived values; returns what runs.

    Raises:
        ConfigError: the schedule and the model's virtual stages or microbatches disagree.
    """
    chunks = args.virtual_pipeline_model_parallel_size or 1
    expected = request.file.chunks if request.file is not None else None
    if request.vee:
        expected = 2
    if expected is not None and chunks != expected:
        raise ConfigError(
            f"--pp-schedule {request.name} has {expected} model chunks a rank but the flags make "
            f"{chunks}; remove the virtual-stage flags"
        )
    for flag in ("rampup_batch_size", "step_batch_size_schedule"):
        # Before core_v0.18 Megatron lacks the second.
        if request.file is not None and getattr(args, flag, None) is not None:
            raise ConfigError(
                "a schedule file has a fixed number of microbatches and cannot be used with "
                f"--{flag.replace('_', '-')}; use a schedule name"
            )
    batch = full_batch(args)
    assert batch is not None  # Megatron has set it
    microbatches = batch // (args.micro_batch_size * args.data_parallel_size)
    return request.resolve(args.pipeline_model_parallel_size, chunks, microbatches)


def _place_vee(args: MegatronArgs, request: ScheduleRequest, pp: int) -> None:
    """Say the V's stages in Megatron's own words: one layout string with two stages a rank."""
    for attribute in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ):
        value = getattr(args, attribute)
        if value is not None:
            raise ConfigError(
                f"--pp-schedule {request.name} always has two model chunks a rank; remove "
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
