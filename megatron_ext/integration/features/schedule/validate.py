"""Checks of ``--pp-schedule`` and its options against Megatron's arguments."""

from __future__ import annotations

from dataclasses import dataclass

from ....schedule import AUTO, GENERATORS
from ....schedule.select import suiting
from ...arguments import MegatronArgs
from ...errors import ConfigError, named_errors
from ...feature import Run, require_no_conflict
from ...layout import LayerPattern, count_stages, vee_layout_text
from ...model_classes import (
    builds_chunks,
    builds_other_models,
    require_chunks,
    script_provider,
)
from ...utils import full_batch, most_microbatches
from .choose import ScheduleRequest
from .described import described
from .rules import (
    ASKED,
    CHUNKS,
    FILE,
    PIPELINE,
    SCHEDULE,
    SEVERAL_CHUNKS,
    V_PLACEMENT,
    require,
)

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


def _asked(args: MegatronArgs, request: ScheduleRequest, pp: int) -> _Asked | None:
    """What the flags say of chunks, in whichever of Megatron's four ways.

    Raises:
        ConfigError: the schedule, or this model, cannot have them.
    """
    pattern, layout = LayerPattern.of(args), args.pipeline_model_parallel_layout
    per_stage, chunks = (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    stages = None if layout is None else count_stages(layout)
    flag = f"{_LAYOUT} {layout}"
    if pattern is not None and layout is None:
        stages, flag = pattern.listed, f"{pattern.flag} {pattern.text}"
    if stages is not None:
        chunks = stages // pp
    elif per_stage is not None:
        ends = sum(bool(getattr(args, attribute)) for attribute in _UNEVEN[2:])  # count as layers
        chunks = ((args.num_layers or 0) + ends) // pp // (per_stage or 1) or None
        flag = f"{_LAYERS} {per_stage}"
    else:
        flag = "" if chunks is None else f"{_CHUNKS} {chunks}"
    auto = request.name == AUTO
    least = (chunks or 0) if auto and flag else _chunks_of(request)[0]
    require(
        ASKED,
        name=request.name,
        given=args.pp_schedule,
        auto=auto,
        vee=not auto and request.vee,
        pp=pp,
        flag=flag,
        stages=stages,
        chunks=chunks,
        least=least,
    )
    if least > 1:
        require_chunks(script_provider(), request.name, least)
    return _Asked(flag, chunks, stages is not None) if flag else None


def check_facts(run: Run) -> None:
    """Checks of a run whose facts are known: Megatron's arguments, parsed and not yet validated, in
    which the virtual stages are set that the schedule needs; or a library's model.

    Its request then has this job.

    Raises:
        ConfigError: a combination that cannot work.
    """
    args, request = run.args, run.request
    assert request is not None
    pp, flag = args.pipeline_model_parallel_size, f"--pp-schedule {request.name}"
    size = "pipeline_model_parallel_size"
    size = size if run.library else f"--{size.replace('_', '-')}"
    sharded = bool(args.pp_vocab_parallel)
    file, name = request.file, request.name
    ranks = file and file.pp
    facts = {"name": name, "file": file, "ranks": ranks, "pp": pp, "size": size, "sharded": sharded}
    grouped = getattr(args, "microbatch_group_size_per_vp_stage", None)
    require(PIPELINE, **facts, grouped=grouped)
    if not run.library:
        request = described(args, request)
    auto = request.name == AUTO
    _require_no_conflict(args, request, flag)
    if run.library:
        stages = None if _chunks_of(request)[0] == 1 else 2
        fix = f"build it with virtual_pipeline_model_parallel_size={stages}"
        chunks = len(run.models)
        _require_chunks(request, chunks, f"the model was built with {chunks}", fix)
    else:
        run.request = _decide(args, request, pp) if auto else _asked_for(args, request, pp)
        if auto:
            _require_no_conflict(args, run.request, flag)


def _require_no_conflict(args: MegatronArgs, request: ScheduleRequest, flag: str) -> None:
    """Refuse options that the request's schedule does not support; of ``auto`` before it has chosen
    those that none does."""
    named = request.name != AUTO
    parts = {
        "": True,
        V_PLACEMENT: named and request.vee,
        SEVERAL_CHUNKS: named and _chunks_of(request)[0] > 1,
        FILE: request.file is not None,
    }
    require_no_conflict(args, SCHEDULE, {part: flag for part, there in parts.items() if there})


def _asked_for(args: MegatronArgs, request: ScheduleRequest, pp: int) -> ScheduleRequest:
    """``request``, which names its schedule, once Megatron is asked for its chunks."""
    asked, (least, most) = _asked(args, request, pp), _chunks_of(request)
    if request.vee:
        _place_vee(args, pp)
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
    return request


def _chunks_of(request: ScheduleRequest) -> tuple[int, int | None]:
    """The fewest and the most model chunks a rank of a schedule; None: any number."""
    if request.file is not None:
        return request.file.chunks, request.file.chunks
    if request.name == AUTO:
        return 1, None
    generator = GENERATORS[request.name]
    return (2, None) if generator.any_chunks else (generator.default_chunks,) * 2


def _require_chunks(request: ScheduleRequest, chunks: int | None, makes: str, fix: str) -> None:
    """Refuse a number of model chunks a rank, or an unknown one, that the schedule cannot have."""
    least, most = _chunks_of(request)
    number = f"{least}{'' if most else ' or more'} model chunk{'s' * (least > 1)}"
    require(
        CHUNKS,
        name=request.name,
        least=least,
        most=most,
        number=number,
        made=chunks,
        makes=makes,
        fix=fix,
    )


def _decide(args: MegatronArgs, request: ScheduleRequest, pp: int) -> ScheduleRequest:
    """What auto stands for; asks Megatron for the chunks that it needs."""
    asked = _asked(args, request, pp)
    names = _suitable(args, pp, asked)
    microbatches = _full_microbatches(args, pp)
    chunks = 2 if asked is None else max(asked.chunks or 0, 2)
    request = request.decide(pp, microbatches, names, chunks)
    if request.vee:
        _place_vee(args, pp)
    elif asked is None and GENERATORS[request.name].any_chunks:
        _ask_for_chunks(args, pp, 2)
    return request


def _suitable(args: MegatronArgs, pp: int, asked: _Asked | None) -> tuple[str, ...]:
    """The schedules that auto may choose from: those that this model can be built for, and that
    take its microbatches."""
    provider = script_provider()
    vee = not _excluded(args, V_PLACEMENT)
    vee = vee and not (provider is not None and builds_other_models(provider))
    chunks: int | None = None
    if asked is not None:
        # Flags for virtual stages also say that stages lie as Megatron lays them.
        vee = vee and asked.listed and asked.chunks == 2 and _vee_takes_layout(args, pp)
        chunks = asked.chunks or 0
    else:
        pattern = LayerPattern.of(args)
        layers = args.num_layers or 0 if pattern is None else pattern.layers
        uneven = any(getattr(args, attribute) not in (None, False) for attribute in _UNEVEN)
        one = provider is not None and not builds_chunks(provider)
        one = one or _excluded(args, SEVERAL_CHUNKS)
        if uneven or one or not layers or layers % (2 * pp):
            chunks, vee = 1, False
    return suiting(chunks, vee, equal=args.pp_microbatch_costs in (None, "equal"))


def _excluded(args: MegatronArgs, part: str) -> bool:
    return any(rule.found(args) is not None for rule in SCHEDULE if rule.only == part)


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


def after_megatron(args: MegatronArgs, request: ScheduleRequest) -> ScheduleRequest:
    """Checks that need Megatron's derived values; returns what runs.

    Raises:
        ConfigError: the schedule and the model's virtual stages or microbatches disagree.
    """
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if request.vee or request.file is not None:  # others are refused by their generators
        fix = "remove the virtual-stage flags"
        _require_chunks(request, chunks, f"the flags make {chunks}", fix)
    pp = args.pipeline_model_parallel_size
    return request.resolve(pp, chunks, most_microbatches(args))


def _place_vee(args: MegatronArgs, pp: int) -> None:
    """Say the V's stages in Megatron's own words: one layout string with two stages a rank."""
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
        asked = f"--pp-schedule {args.pp_schedule} with {chunks} model chunks on each of {pp} ranks"
        with named_errors(asked):
            pattern.list_stages(args, chunks * pp)
    args.overlap_p2p_comm = True
