"""Checks of ``--pp-schedule`` and its options against Megatron's arguments."""

from __future__ import annotations

from dataclasses import dataclass

from ....schedule import AUTO, GENERATORS
from ....schedule.select import suiting
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...feature import Run, require_no_conflict
from ...layout import LayerPattern, count_stages, hybrid_without_stages, vee_layout_text
from ...model_classes import (
    builds_chunks,
    builds_other_models,
    require_chunks,
    script_provider,
)
from ...utils import full_batch
from . import V_PLACEMENT, Schedule
from .choose import Choice, ScheduleRequest
from .estimate import described
from .slice_count import suitable, with_slices

# Flags for layers that Megatron spreads unevenly, which may suit one placement and not another.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_LAYOUT, _CHUNKS, _LAYERS = (
    "--pipeline-model-parallel-layout",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)


@dataclass(frozen=True)
class _Asked:
    """Model chunks a rank that the user's flags ask for.

    Attributes:
        flag: with its value.
        chunks: None where the flag's number of them is known to Megatron only.
        listed: the flag lists all stages in model order, for any placement.
    """

    flag: str
    chunks: int | None
    listed: bool


def _asked(args: MegatronArgs, pp: int) -> _Asked | None:
    """What the flags say of chunks, in whichever of Megatron's four ways.

    Raises:
        ConfigError: stages that the ranks cannot share.
    """
    pattern, layout = LayerPattern.of(args), args.pipeline_model_parallel_layout
    stages = None if layout is None else count_stages(layout)
    flag = f"{_LAYOUT} {layout}"
    if pattern is not None and layout is None:
        stages, flag = pattern.listed, f"{pattern.flag} {pattern.text}"
    if stages is not None:
        if stages % pp:
            raise ConfigError(
                f"--pp-schedule {args.pp_schedule}: {flag} lists {stages} stages, which {pp} "
                f"pipeline ranks cannot share; list {pp} or a multiple of it"
            )
        return _Asked(flag, stages // pp, True)
    per_stage, chunks = (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    if per_stage is not None:
        layers = args.num_layers or 0
        return _Asked(f"{_LAYERS} {per_stage}", layers // pp // (per_stage or 1) or None, False)
    return None if chunks is None else _Asked(f"{_CHUNKS} {chunks}", chunks, False)


def check_facts(run: Run) -> None:
    """Checks of a run whose facts are known: Megatron's arguments, parsed and not yet validated, in
    which the virtual stages are set that the schedule needs; or a library's model.

    Its request then has the profile, this job for a cap in bytes, and ``auto`` and the number of
    slices decided.

    Raises:
        ConfigError: a combination that cannot work.
    """
    args, request = run.args, run.request
    assert request is not None
    pp, flag = args.pipeline_model_parallel_size, f"--pp-schedule {request.name}"
    if pp < 2:
        option = "pipeline_model_parallel_size"
        option = option if run.library else f"--{option.replace('_', '-')}"
        raise ConfigError(f"{flag} needs {option} >= 2, got {pp}; raise it, or drop the schedule")
    if not run.library:
        request = described(args, request, run.profile)
    auto = request.name == AUTO
    parts = {"": flag, V_PLACEMENT: flag} if not auto and request.vee else {"": flag}
    require_no_conflict(args, Schedule.conflicts, parts)
    if request.file is not None and request.file.pp != pp:
        raise ConfigError(
            f"{flag} is a file for {request.file.pp} pipeline ranks, but there are {pp}; generate "
            f"it with --pp {pp}"
        )
    if run.library:
        size = None if _chunks_of(request)[0] == 1 else 2
        fix = f"build it with virtual_pipeline_model_parallel_size={size}"
        chunks = len(run.models)
        _require_chunks(request, chunks, f"the model was built with {chunks}", fix)
    else:
        run.request = _decide(args, request, pp) if auto else _asked_for(args, request, pp)


def _asked_for(args: MegatronArgs, request: ScheduleRequest, pp: int) -> ScheduleRequest:
    """``request``, which names its schedule, once Megatron is asked for its chunks."""
    asked, (least, most) = _asked(args, pp), _chunks_of(request)
    if least > 1:
        _require_chunks_possible(args, request.name, least)
    if request.vee:
        _place_vee(args, request, pp, asked)
    elif asked is not None:
        fix = f"list {least * pp} stages" if asked.listed else "remove that flag"
        if most is None:
            fix = f"{fix} or more" if asked.listed else "set it to 2 or more"
        other = "interleaved" if most == 1 else "one with one chunk, e.g. zb-h1"
        if asked.chunks is not None or most == 1:
            makes = f"{asked.flag} makes {asked.chunks or 'several'}"
            _require_chunks(
                request, asked.chunks, makes, f"{fix}, or use another schedule: {other}"
            )
    elif most is None:
        pattern = LayerPattern.of(args)
        fix = "add --num-virtual-stages-per-pipeline-rank 2 (or more)"
        if pattern is not None:
            fix = f"list a multiple of {pp} stages, e.g. {pattern.example(2 * pp)}"
        _require_chunks(request, None, "no flag says how many", fix)
    elif least > 1:
        _ask_for_chunks(args, pp, least)
    chunks = None if asked is None or request.vee else asked.chunks
    return with_slices(args, request, _full_microbatches(args, pp), chunks=chunks)


def _chunks_of(request: ScheduleRequest) -> tuple[int, int | None]:
    """The fewest and the most model chunks a rank of a schedule; None: any number."""
    if request.file is not None:
        return request.file.chunks, request.file.chunks
    generator = GENERATORS[request.name]
    return (2, None) if generator.any_chunks else (generator.default_chunks,) * 2


def _require_chunks(request: ScheduleRequest, chunks: int | None, makes: str, fix: str) -> None:
    """Refuse a number of model chunks a rank, or an unknown one, that the schedule cannot have."""
    least, most = _chunks_of(request)
    if chunks is None or not least <= chunks <= (most or chunks):
        number = least if most else f"{least} or more"
        raise ConfigError(
            f"--pp-schedule {request.name} needs {number} model chunk{'s' * (least > 1)} a rank, "
            f"but {makes}; {fix}"
        )


def _require_chunks_possible(args: MegatronArgs, name: str, chunks: int) -> None:
    """Refuse several chunks of a model that can have only one."""
    require_chunks(script_provider(), name, chunks)
    if hybrid_without_stages(args):
        raise ConfigError(
            f"--pp-schedule {name} has {chunks} model chunks a rank, but this Megatron's hybrid "
            "models have one; use a schedule with one chunk, e.g. zb-h1, or megatron-core 0.17 or "
            "newer"
        )


def _decide(args: MegatronArgs, request: ScheduleRequest, pp: int) -> ScheduleRequest:
    """What auto stands for; asks Megatron for the chunks that it needs."""
    asked = _asked(args, pp)
    chunks = 2 if asked is None else asked.chunks or 0
    if asked is not None and chunks < 2 and not asked.listed:
        raise ConfigError(
            f"--pp-schedule auto cannot choose under {asked.flag}; name a schedule, or replace it "
            "by --num-virtual-stages-per-pipeline-rank"
        )
    names = suitable(args, _suitable(args, pp, asked))
    if asked is not None and chunks > 1:
        _require_chunks_possible(args, AUTO, chunks)
    microbatches, chunks = _full_microbatches(args, pp), max(chunks, 2)
    request = with_slices(args, request, microbatches, names, chunks)
    request = request.decide(pp, microbatches, names, chunks)
    if request.vee:
        _place_vee(args, request, pp, asked)
    elif asked is None and GENERATORS[request.name].any_chunks:
        _ask_for_chunks(args, pp, 2)
    return request


def _suitable(args: MegatronArgs, pp: int, asked: _Asked | None) -> tuple[str, ...]:
    """The schedules that auto may choose from: those that this model can be built for."""
    provider = script_provider()
    vee = not any(c.found(args) is not None for c in Schedule.conflicts if c.only == V_PLACEMENT)
    vee = vee and not (provider is not None and builds_other_models(provider))
    if asked is not None:
        # Flags for virtual stages also say that stages lie as Megatron lays them.
        vee = vee and asked.listed and asked.chunks == 2 and _vee_takes_layout(args, pp)
        return suiting(asked.chunks or 0, vee)
    pattern = LayerPattern.of(args)
    layers = args.num_layers or 0 if pattern is None else pattern.layers
    uneven = any(getattr(args, attribute) not in (None, False) for attribute in _UNEVEN)
    one = provider is not None and not builds_chunks(provider)
    if uneven or one or not layers or layers % (2 * pp) or hybrid_without_stages(args):
        return suiting(1, False)
    return suiting(None, vee)


def _vee_takes_layout(args: MegatronArgs, pp: int) -> bool:
    if args.pipeline_model_parallel_layout is None:
        return True
    try:
        vee_layout_text(args, pp)
    except ConfigError:
        return False
    return True


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
    if request.vee or request.file is not None:  # others are refused by their generators
        fix = "remove the virtual-stage flags"
        _require_chunks(request, chunks, f"the flags make {chunks}", fix)
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


def _place_vee(args: MegatronArgs, request: ScheduleRequest, pp: int, asked: _Asked | None) -> None:
    """Say the V's stages in Megatron's own words: one layout string with two stages a rank."""
    if asked is not None and not asked.listed:
        raise ConfigError(
            f"--pp-schedule {request.name} always has two model chunks a rank; remove {asked.flag}"
        )
    if LayerPattern.of(args) is None:
        args.pipeline_model_parallel_layout = vee_layout_text(args, pp)
        args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
        args.account_for_embedding_in_pipeline_split = False
        args.account_for_loss_in_pipeline_split = False
        # Stock refuses two virtual stages on two ranks without this; ours always overlaps.
        args.overlap_p2p_comm = True
    else:
        _ask_for_chunks(args, pp, 2)


def _ask_for_chunks(args: MegatronArgs, pp: int, chunks: int) -> None:
    """Ask Megatron for model chunks, where the user's flags leave them open."""
    pattern = LayerPattern.of(args)
    if pattern is None:
        args.num_virtual_stages_per_pipeline_rank = chunks
    else:
        try:
            pattern.list_stages(args, chunks * pp)
        except ConfigError as error:
            raise ConfigError(
                f"--pp-schedule {args.pp_schedule} with {chunks} model chunks on each of {pp} "
                f"ranks: {error}"
            ) from None
    args.overlap_p2p_comm = True
