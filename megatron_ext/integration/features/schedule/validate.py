"""Checks of ``--pp-schedule`` and its options against Megatron's arguments."""

from __future__ import annotations

from dataclasses import dataclass

from ....schedule import AUTO, GENERATORS, Schedule
from ....schedule.select import suiting
from ...arguments import MegatronArgs
from ...errors import ConfigError
from ...feature import Run
from ...layout import LayerPattern, count_stages, vee_layout_text
from ...model_classes import (
    builds_chunks,
    builds_other_models,
    script_provider,
)
from ...support import VEE, Arguments, denied
from ...utils import full_batch, most_microbatches
from .choose import ScheduleRequest
from .described import described

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
        stages, flag = pattern.listed, f"{pattern.flag} {pattern.main}"
    if stages is not None:
        chunks = stages // pp
    elif per_stage is not None:
        ends = sum(bool(getattr(args, attribute)) for attribute in _UNEVEN[2:])  # count as layers
        chunks = ((args.num_layers or 0) + ends) // pp // (per_stage or 1) or None
        flag = f"{_LAYERS} {per_stage}"
    else:
        flag = "" if chunks is None else f"{_CHUNKS} {chunks}"
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
    pp, file = args.pipeline_model_parallel_size, request.file
    if file is not None:
        _require_fits(request.name, file, pp, bool(args.pp_vocab_parallel))
    if not run.library:
        request = described(args, request)
    auto = request.name == AUTO
    if run.library:
        _require_chunks(request, len(run.models))
    else:
        run.request = _decide(args, request, pp) if auto else _asked_for(args, request, pp)


def _asked_for(args: MegatronArgs, request: ScheduleRequest, pp: int) -> ScheduleRequest:
    """``request``, which names its schedule, once Megatron is asked for its chunks."""
    asked, (least, most) = _asked(args, request, pp), _chunks_of(request)
    if request.vee:
        _place_vee(args, pp)
    elif asked is None and most is None:
        raise ConfigError(
            f"--pp-schedule {request.name} needs 2 or more model chunks a rank; add e.g. "
            f"{_CHUNKS} 2"
        )
    elif asked is not None:
        if asked.chunks is not None:
            _require_chunks(request, asked.chunks)
    elif least > 1:
        _ask_for_chunks(args, least)
    return request


def _chunks_of(request: ScheduleRequest) -> tuple[int, int | None]:
    """The fewest and the most model chunks a rank of a schedule; None: any number."""
    if request.file is not None:
        return request.file.chunks, request.file.chunks
    if request.name == AUTO:
        return 1, None
    generator = GENERATORS[request.name]
    return (2, None) if generator.any_chunks else (generator.default_chunks,) * 2


def _require_chunks(request: ScheduleRequest, chunks: int) -> None:
    """Refuse a number of model chunks a rank that the schedule cannot have.

    Raises:
        ConfigError: it is another one.
    """
    least, most = _chunks_of(request)
    if chunks < least or chunks > (most or chunks):
        raise ConfigError(
            f"--pp-schedule {request.name} needs {least}{'' if most else ' or more'} model chunks "
            f"a rank, but there are {chunks}; change the virtual stages, or the schedule"
        )


def _require_fits(name: str, file: Schedule, pp: int, sharded: bool) -> None:
    """Refuse a schedule file of another pipeline.

    Raises:
        ConfigError: it is for other ranks, or for a vocabulary that is not sharded as here.
    """
    if file.pp != pp:
        raise ConfigError(
            f"--pp-schedule {name} is for {file.pp} pipeline ranks, but there are {pp}; generate "
            f"it with --pp {pp}"
        )
    if sharded != bool(file.barriers):
        raise ConfigError(
            f"--pp-schedule {name} is for a {'whole' if sharded else 'sharded'} vocabulary; write "
            f"it {'with' if sharded else 'without'} --vocabulary"
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
        _ask_for_chunks(args, 2)
    return request


def _suitable(args: MegatronArgs, pp: int, asked: _Asked | None) -> tuple[str, ...]:
    """The schedules that auto may choose from: those that this model can be built for, and that
    take its microbatches."""
    provider = script_provider()
    hybrid = LayerPattern.of(args) is not None
    vee = denied(args, {VEE}) is None and not hybrid
    vee = vee and not (provider is not None and builds_other_models(provider))
    chunks: int | None = None
    if asked is not None:
        # Flags for virtual stages also say that stages lie as Megatron lays them.
        vee = vee and asked.listed and asked.chunks == 2 and _vee_takes_layout(args, pp)
        chunks = asked.chunks or 0
    else:
        layers = args.num_layers or 0
        uneven = any(getattr(args, attribute) not in (None, False) for attribute in _UNEVEN)
        one = provider is not None and not builds_chunks(provider)
        asked_args = Arguments(args)
        # Megatron gives their data, or builds their layers, for one chunk a rank.
        one = one or bool(
            asked_args.multiple_validation_sets or asked_args.heterogeneous_layers_config_path
        )
        if uneven or one or hybrid or not layers or layers % (2 * pp):
            chunks, vee = 1, False
    return suiting(chunks, vee, equal=args.pp_microbatch_costs in (None, "equal"))


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
        _require_chunks(request, chunks)
    pp = args.pipeline_model_parallel_size
    return request.resolve(pp, chunks, most_microbatches(args))


def fails_late(args: MegatronArgs, request: ScheduleRequest, chunks: int) -> list[str]:
    """Lines for the log on what would end the run hours later.

    Raises:
        ConfigError: it is known to end it.
    """
    asked = Arguments(args)
    if chunks > 1 and asked.multiple_validation_sets:
        raise ConfigError(
            "--multiple-validation-sets gives data of several sets where evaluation needs data of "
            f"{chunks} model chunks; use a schedule with one chunk a rank, e.g. zb-h1"
        )
    if request.file is not None and (asked.rampup_batch_size or asked.step_batch_size_schedule):
        raise ConfigError(
            f"--pp-schedule {request.name} is for {request.file.microbatches} microbatches, and "
            "their number will change; name a schedule instead of a file"
        )
    lines = []
    if asked.inprocess_restart:
        lines.append("--inprocess-restart: after a failure let torchrun restart (--max-restarts)")
    if asked.perform_rl_step and (request.vee or asked.pp_vocab_parallel):
        lines.append("--perform-rl-step: this model cannot generate text, so rollouts will fail")
    if asked.save and asked.ckpt_format == "torch" and asked.pp_vocab_parallel:
        lines.append("--ckpt-format torch: only this schedule and these sizes load the checkpoints")
    return lines


def _place_vee(args: MegatronArgs, pp: int) -> None:
    """Say the V's stages in Megatron's own words: one layout string with two stages a rank.

    Raises:
        ConfigError: a hybrid model has a pattern in its place.
    """
    if LayerPattern.of(args) is not None:
        raise ConfigError(
            "a V does not place the layers of a hybrid pattern; use a schedule with Megatron's own "
            "placement, e.g. zb-h1 or interleaved-zb"
        )
    args.pipeline_model_parallel_layout = vee_layout_text(args, pp)
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    args.account_for_embedding_in_pipeline_split = False
    args.account_for_loss_in_pipeline_split = False
    # Stock refuses two virtual stages on two ranks without this; ours always overlaps.
    args.overlap_p2p_comm = True


def _ask_for_chunks(args: MegatronArgs, chunks: int) -> None:
    """Ask Megatron for model chunks, where the user's flags leave them open.

    Raises:
        ConfigError: a hybrid model's pattern does not list the stages.
    """
    pattern = LayerPattern.of(args)
    if pattern is not None:
        raise ConfigError(f"list {chunks} stages for each pipeline rank in {pattern.flag}")
    args.num_virtual_stages_per_pipeline_rank = chunks
    args.overlap_p2p_comm = True
