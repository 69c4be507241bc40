"""Every wrong combination of flags, found before training and answered with one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from ..schedule.check import check
from ..schedule.costs import Costs
from ..schedule.generators import AUTO, GENERATORS, NAMES, generate
from ..schedule.link import Link
from ..schedule.memory_cap import cap_sets, parse_cap
from ..schedule.offload_cap import (
    NO_CAP,
    CapNotKept,
    Make,
    auto_offloaded,
    caps_to_try,
    family,
    generate_offloaded,
)
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule, ScheduleError
from ..schedule.simulate import simulate
from .choose import ANY_CHUNKS, ONE_CHUNK, choose
from .errors import ConfigError
from .layout import count_stages, vee_layout_text
from .offload_request import OffloadRequest
from .rejections import REJECTIONS, require_supported_features

# Flags for layers that Megatron spreads unevenly, which may suit one placement and not another.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


class Choice:
    """What ``--pp-schedule`` and its options ask for, before Megatron's own validation has run.

    Args:
        text: a generator's name, or the path of a schedule file.
        cost: ``F,B,W[,HOP]`` to make the order for; None: equal costs.
        memory_cap: fraction of 1F1B's peak, for schedules at any cap; with offload, for all.
        group_size: for schedules in groups.
        offloading: what leaves the device, or None.

    Attributes:
        name: ``text``, or what auto decided for.
        vee: V placement is needed.
        file: the loaded and checked schedule, if a file was given.
        offload: as given; of a file that offloads, nothing more is to be decided.
        undecided: auto was asked for, and ``decide`` has to be called before anything else.
        note: why auto decided so.

    Raises:
        ConfigError: unknown name, an unreadable or invalid file, or options that do not fit.
    """

    def __init__(
        self,
        text: str,
        cost: str | None = None,
        memory_cap: str | None = None,
        group_size: int | None = None,
        offloading: OffloadRequest | None = None,
    ) -> None:
        self.name, self.offload = text, offloading
        self.file: Schedule | None = None
        self.undecided, self.note = text == AUTO, ""
        self._group_size = group_size
        self._cap_sets: int | None = None
        self._auto_offloads = False
        self._plans: dict[tuple[int, int, int, Costs], Schedule] = {}
        try:
            self._costs = Costs() if cost is None else Costs.parse(cost)
            self._cap = None if memory_cap is None else parse_cap(memory_cap)
        except ValueError as error:
            raise ConfigError(f"--pp-schedule {text}: {error}") from None
        if text in GENERATORS:
            generator = GENERATORS[text]
            self.vee = generator.placement == "vee"
            if generator.takes_memory_cap and self._cap is None:
                raise ConfigError(
                    f"--pp-schedule {text} needs a cap, a fraction of 1F1B's peak; add e.g. "
                    "--pp-memory-cap 0.6"
                )
            return
        if self.undecided:
            if group_size is not None:
                raise ConfigError(
                    f"--pp-schedule auto chooses the group size itself; drop --pp-group-size "
                    f"{group_size}, or use --pp-schedule gis"
                )
            return
        if any(x is not None for x in (cost, group_size, None if offloading else memory_cap)):
            raise ConfigError(
                f"--pp-schedule {text}: a file's order is fixed; drop --pp-cost, --pp-memory-cap "
                "and --pp-group-size"
            )
        if not _looks_like_file(text):
            raise ConfigError(
                f"--pp-schedule {text!r} is not known; use {', '.join(NAMES)}, {AUTO}, "
                "or give a file's path (*.json or *.csv, from `megatron-ext schedule --output`)"
            )
        try:
            self.file = Schedule.load(text).unlowered()
            if self.file.has_offload and offloading is not None:
                raise ScheduleError(
                    f"{text} says already what is offloaded; drop --pp-offload and the flags that "
                    "go with it, or write the file without --offload"
                )
            check(self.file)
        except ScheduleError as error:
            raise ConfigError(f"--pp-schedule: {error}") from None
        self.vee = self.file.placement.is_vee()
        if not self.vee and not self.file.placement.is_loop():
            raise ConfigError(
                f"--pp-schedule {text}: its placement {self.file.placement} is neither Megatron's "
                "(stage = chunk * pp + rank) nor the V; the runtime can place models only so"
            )

    def decide(
        self, pp: int, microbatches: int, names: Sequence[str] = NAMES, chunks: int = 2
    ) -> None:
        """What auto stands for in this run, also at other numbers of microbatches.

        The placement cannot change once the model is built, so this is decided once, for the full
        batch.

        Args:
            pp: pipeline ranks.
            microbatches: of the full batch.
            names: schedules that the model can be placed for.
            chunks: of those that take any number.

        Raises:
            ConfigError: none of them fits the cap.
        """
        link = None if self.offload is None else self.offload.link(pp)
        try:
            if link is not None:
                schedule = self._decide_offloaded(pp, microbatches, names, chunks, link)
            else:
                chosen = choose(pp, microbatches, self._costs, self._cap, names, chunks)
                schedule, self._cap = chosen.schedule, None
                self._group_size, self._cap_sets = chosen.group_size, chosen.memory_cap
                self._plans[pp, schedule.chunks, microbatches, self._costs] = schedule
        except ValueError as error:
            raise ConfigError(f"--pp-schedule auto: {error}; raise --pp-memory-cap") from None
        self.undecided, self.name, self.note = False, schedule.name, schedule.note
        self.vee = schedule.placement.is_vee()

    def _decide_offloaded(
        self, pp: int, microbatches: int, names: Sequence[str], chunks: int, link: Link
    ) -> Schedule:
        """What is fastest with offload, where its times are known before training."""
        assert self.offload is not None
        self._cap = self._cap or Fraction(1)
        self._auto_offloads = True
        return auto_offloaded(
            pp,
            microbatches,
            chunks,
            self._costs,
            link,
            self.offload.wanted,
            cap=self._cap,
            names=names,
        ).schedule

    @property
    def splits_backward(self) -> bool:
        """True if the schedule has B and W passes of their own."""
        if self.file is not None:
            return any(a.op == "W" for _, _, a in self.file.actions())
        return GENERATORS[self.name].split_backward

    @property
    def offloads(self) -> bool:
        """True if activation sets leave the device."""
        return self.offload is not None or (self.file is not None and self.file.has_offload)

    def placement(self, pp: int, chunks: int) -> Placement:
        """Where the stages lie; evaluation may have other microbatches than a file's."""
        if self.file is not None:
            return self.file.placement
        return Placement.vee(pp) if self.vee else Placement.loop(pp, chunks)

    def plan(
        self,
        pp: int,
        chunks: int,
        microbatches: int,
        link: Link | None = None,
        costs: Costs | None = None,
        reorder: bool = False,
    ) -> Schedule:
        """The training schedule for ``microbatches``.

        Args:
            pp, chunks: of the pipeline.
            microbatches: of a step.
            link: how activation sets travel, to decide which do; a file that offloads has its own.
            costs: measured, of the passes; None: as given by the user.
            reorder: make the order for ``costs`` too, and take it if it is faster under them.
                Otherwise they only help to decide what leaves the device.

        Raises:
            ConfigError: a file is for another number of microbatches, or an option does not fit.
        """
        if self.file is not None and self.file.microbatches != microbatches:
            raise ConfigError(
                f"schedule file {self.name} is for {self.file.microbatches} microbatches but the "
                f"run has {microbatches} (global batch / (micro batch * data parallel)); generate "
                f"it with --microbatches {microbatches}"
            )
        former = self._planned(pp, chunks, microbatches, self._costs, link, costs)
        if costs is None or not reorder:
            return former
        new = self._planned(pp, chunks, microbatches, costs, link, costs)
        before, after = simulate(former).makespan, simulate(new).makespan
        gain = float(1 - after / before)
        if gain > 0:
            return replace(new, note=f"re-planned for measured times: {gain:.2%} less time a step")
        than = f"{-gain:.2%} longer" if gain else "as long"
        return replace(
            former, note=f"the order stays: made for measured times it would take {than}"
        )

    def _planned(
        self,
        pp: int,
        chunks: int,
        microbatches: int,
        own: Costs,
        link: Link | None,
        costs: Costs | None,
    ) -> Schedule:
        """The order for the costs ``own``, offloaded over ``link`` under ``costs``."""
        if link is None or self.offload is None:
            base = self.file or self._generated(pp, chunks, microbatches, own)
            return base if costs is None else replace(base, costs=costs)
        make, caps = self._makes(pp, chunks, microbatches, own)

        def timed(sets: int | None) -> Schedule:
            order = make(sets)
            return order if costs is None else replace(order, costs=costs)

        wanted = self.offload.wanted
        try:
            planned = generate_offloaded(timed, link, wanted, cap=self._cap, caps=caps)
        except CapNotKept as error:
            # Times that are not the user's may be wrong, and training has begun: no reason to end.
            planned = error.plan
            if self.offload.times is not None:
                raise ConfigError(
                    f"--pp-schedule: {error.what}; raise --pp-memory-cap to {error.needed}, or use "
                    "another schedule"
                ) from None
        except ValueError as error:
            raise ConfigError(f"--pp-schedule {self.name}: {error}") from None
        return planned.schedule

    def _makes(
        self, pp: int, chunks: int, microbatches: int, costs: Costs
    ) -> tuple[Make, Sequence[int | None]]:
        """How the order is made that offload starts from, and the caps to make it for."""
        if self._auto_offloads:
            return family(self.name, pp, microbatches, chunks, costs, self._cap)
        if self.file is not None or not GENERATORS[self.name].takes_memory_cap or not self._cap:
            base = self.file or self._generated(pp, chunks, microbatches, costs)
            return (lambda _: base), NO_CAP
        made = partial(generate, self.name, pp, microbatches, chunks, costs)
        return (lambda sets: made(memory_cap=sets)), caps_to_try(self.name, pp, self._cap)

    def _generated(self, pp: int, chunks: int, microbatches: int, costs: Costs) -> Schedule:
        key = (pp, chunks, microbatches, costs)
        if key not in self._plans:
            try:
                cap = self._cap_sets
                if self._cap is not None and not self._caps_offload:
                    cap = cap_sets(self._cap, pp, chunks)
                self._plans[key] = generate(
                    self.name,
                    pp,
                    microbatches,
                    chunks,
                    costs,
                    group_size=self._group_size,
                    memory_cap=cap,
                )
            except ValueError as error:
                raise ConfigError(f"--pp-schedule {self.name}: {error}") from None
        return self._plans[key]

    @property
    def _caps_offload(self) -> bool:
        """The cap is for what offload leaves on the device, and not for the order itself."""
        return self.offload is not None and not GENERATORS[self.name].takes_memory_cap


def _looks_like_file(text: str) -> bool:
    return text.endswith((".json", ".csv")) or "/" in text


def before_megatron(args: Any, choice: Choice) -> None:
    """Checks that need only the user's flags; sets the virtual stages that the schedule needs.

    Raises:
        ConfigError: a combination that cannot work.
    """
    pp = args.pipeline_model_parallel_size
    if pp < 2:
        raise ConfigError(
            f"--pp-schedule {choice.name} needs --pipeline-model-parallel-size >= 2, got {pp}"
        )
    steps = getattr(args, "pp_profile_steps", None)
    if steps is not None and steps < 1:
        raise ConfigError(
            f"--pp-profile-steps must be 1 or more, got {steps}; drop it to keep the order"
        )
    if steps is not None and choice.file is not None:
        raise ConfigError(
            f"--pp-schedule {choice.name}: a file's order is fixed; drop --pp-profile-steps {steps}"
        )
    if choice.undecided:
        require_supported_features(args, choice.name, False)
        _decide(args, choice, pp)
        return
    require_supported_features(args, choice.name, choice.vee)
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


def _decide(args: Any, choice: Choice, pp: int) -> None:
    """What auto stands for; asks Megatron for the chunks that it needs."""
    microbatches = _full_microbatches(args, pp)
    asked = _virtual_stages_asked(args)
    layers = args.num_layers
    if asked is not None:
        # The user has settled the chunks, and with them that stages lie as Megatron lays them.
        stages = args.num_virtual_stages_per_pipeline_rank
        per_stage = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
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
    uneven = any(getattr(args, attribute, None) not in (None, False) for attribute in _UNEVEN)
    if not even or uneven or any(rule.applies(args, True) for rule in REJECTIONS):
        choice.decide(pp, microbatches, ONE_CHUNK)
        return
    choice.decide(pp, microbatches)
    if choice.vee:
        _place_vee(args, choice, pp)
    elif GENERATORS[choice.name].any_chunks:
        args.num_virtual_stages_per_pipeline_rank = 2
        # Stock refuses two virtual stages on two ranks without this; ours always overlaps.
        args.overlap_p2p_comm = True


def _full_microbatches(args: Any, pp: int) -> int:
    """Microbatches of the full batch, before Megatron has derived its data-parallel size."""
    ranks = args.tensor_model_parallel_size * pp * args.context_parallel_size
    per_step = args.micro_batch_size * max(args.world_size // ranks, 1)
    return max((args.global_batch_size or per_step) // per_step, 1)


def after_megatron(args: Any, choice: Choice) -> int:
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
    if choice.file is not None and getattr(args, "rampup_batch_size", None) is not None:
        raise ConfigError(
            "a schedule file has a fixed number of microbatches and cannot be used with "
            "--rampup-batch-size; use a schedule name"
        )
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    # Made (and kept) here, so that options which do not fit end the run before it starts.
    pp, link = args.pipeline_model_parallel_size, None
    if choice.offload is not None:
        choice.offload.check_chunks(chunks)
        link = choice.offload.link(pp)
    choice.plan(pp, chunks, microbatches, link)
    return chunks


def _place_vee(args: Any, choice: Choice, pp: int) -> None:
    """Say the V's stages in Megatron's own words: one layout string with two stages a rank."""
    for attribute in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ):
        value = getattr(args, attribute, None)
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


def _layout_has_one_chunk(args: Any, pp: int) -> bool:
    text = args.pipeline_model_parallel_layout
    return text is not None and count_stages(text) == pp


def _virtual_stages_asked(args: Any) -> str | None:
    for attribute in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    ):
        value = getattr(args, attribute, None)
        if value is not None:
            return f"--{attribute.replace('_', '-')} {value}"
    return None
