"""--pp-schedule and its options: which schedule, and its order for the units of any step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ...._input import meant, parse_bytes
from ....plan.budget import Budget, Splits, stages_of
from ....plan.estimate import flop_costs, paired, with_shard
from ....plan.model import Job
from ....schedule import (
    AUTO,
    GENERATORS,
    NAMES,
    CapExceeded,
    Costs,
    Cut,
    Placement,
    Schedule,
    ScheduleError,
    ScheduleSpec,
    Selected,
    check,
    load,
    select,
)
from ....schedule.memory_cap import Cap, ShareCap, parse_cap
from ....schedule.passes.offload import wanted_chunks
from ....schedule.planner import NOTHING, Knowledge, Planner, StepUnits
from ...errors import ConfigError, named_errors


@dataclass(frozen=True)
class ScheduleRequest:
    """What the flags ask for; ``resolve`` lets it plan.

    Attributes:
        name: a schedule's name, ``auto``, or the path of a schedule file.
        costs: as the user gives them, or None.
        cap: as ``ScheduleSpec``.
        cap_bytes: a cap in bytes; the model makes it a ``cap`` (``capped``).
        offload: half, full, auto or a number of chunks; None: nothing, or as a file has it.
        file: the loaded and checked schedule, if a file was given.
        job: the model, whose FLOPs are the costs where the user gives none; None: it is not known.
        splits: its layers of every stage, for a number of stages.
        decided: what ``auto`` has chosen; ``name`` is that schedule's then.
        note: why.
        barriers: of a vocabulary that is sharded over all ranks; 0: it is not.
        overlap: passes run in pairs, as ``ScheduleSpec``.
        cut: of every microbatch's sequence into slices; None: it is not cut.
        planner: of the schedule that answers it, once the model's chunks are known.
    """

    name: str
    costs: Costs | None = None
    cap: Cap | None = None
    cap_bytes: int | None = None
    offload: str | None = None
    file: Schedule | None = None
    job: Job | None = None
    splits: Splits | None = None
    decided: ScheduleSpec | None = None
    note: str = ""
    barriers: int = 0
    overlap: bool = False
    cut: Cut | None = None
    planner: Planner | None = None

    @classmethod
    def of(
        cls,
        text: str,
        cost: str | None = None,
        memory_cap: str | None = None,
        offloading: str | None = None,
    ) -> ScheduleRequest:
        """The request of the flags' values.

        Args:
            text: a schedule's name, ``auto``, or the path of a schedule file.
            cost: ``F,B,W[,HOP]`` to make the order for; None: the model's FLOPs.
            memory_cap: fraction of 1F1B's peak, or bytes a rank, for ``auto`` and schedules at any
                cap; with offload, for all.
            offloading: what is offloaded, or None.

        Raises:
            ConfigError: unknown name, an unreadable or invalid file, or options that do not fit.
        """
        named = GENERATORS.get(text)
        file = None if named or text == AUTO else _load(text)
        in_bytes = memory_cap is not None and memory_cap.strip().endswith("B")
        if named is not None and named.takes_memory_cap and memory_cap is None:
            raise ConfigError(f"--pp-schedule {text} needs a cap; add e.g. --pp-memory-cap 0.6")
        size: int | None = None
        cap: Cap | None = None
        with schedule_errors(text):
            costs = None if cost is None else Costs.parse(cost)
            if memory_cap is not None and in_bytes:
                size = parse_bytes(memory_cap)
            elif memory_cap is not None:
                cap = ShareCap(parse_cap(memory_cap))
        return cls(text, costs, cap, size, offloading, file)

    @property
    def vee(self) -> bool:
        """V placement is needed; not known of ``auto`` before ``decide``."""
        if self.file is not None:
            return self.file.placement.is_vee()
        return GENERATORS[self.name].placement == "vee"

    @property
    def loops(self) -> bool:
        """Stages are placed as Megatron does. So they are for ``auto``: it takes a V only where a
        layout lists the stages, or where all have equally many layers."""
        return self.name == AUTO or not self.vee

    @property
    def splits_backward(self) -> bool:
        """B and W are passes of their own; not known of ``auto`` before ``decide``."""
        if self.file is not None:
            return self.file.splits_backward
        return GENERATORS[self.name].split_backward

    def placement_on(self, pp: int, chunks: int) -> Placement:
        """The placement on ``pp`` ranks; not known of ``auto`` before ``decide``."""
        return ScheduleSpec(self.name, pp, 1, chunks, order=self.file).placement

    @property
    def placement(self) -> Placement:
        """Rank and chunk of every stage, where ``planner`` is there."""
        assert self.planner is not None
        return self.planner.spec.placement

    @property
    def offloads(self) -> bool:
        """True if activation sets are offloaded."""
        return self.offload is not None or (self.file is not None and self.file.has_offload)

    def decide(
        self, pp: int, microbatches: int, names: Sequence[str] = NAMES, chunks: int = 2
    ) -> ScheduleRequest:
        """The same with what ``auto`` stands for, also at other numbers of microbatches.

        The placement cannot change once the model is built, so this is decided once.

        Args:
            names: schedules that the model can be placed for.
            chunks: of those that take any number.

        Raises:
            ConfigError: none of them keeps the cap.
        """
        spec = replace(self.spec(pp, chunks, microbatches), names=tuple(names))
        found = _select(spec, AUTO)
        note = found.schedule.note
        if len(names) != len(NAMES):
            note += "; only these suit this model's layers and flags"
        return replace(self, name=found.schedule.name, decided=found.spec, note=note)

    def resolve(self, pp: int, chunks: int | None, microbatches: int) -> ScheduleRequest:
        """The same with a planner; asked for the full batch, so that options which do not fit end
        the run here.

        Args:
            chunks: model chunks a rank; None: the schedule's own.

        Raises:
            ConfigError: options that do not fit, or a cap that is not kept.
        """
        offload = self.offload
        spec = self.decided or self.spec(pp, chunks, microbatches)
        if offload is not None:
            _require_chunks(offload, spec.placement.chunks)
        note = self.note
        if self.decided is None and self.file is None and offload is None:
            found = _select(spec, self.name)
            spec, note = found.spec, found.schedule.note
        elif self.decided is None and isinstance(self.cap, Budget):
            with schedule_errors(self.name):
                note = self.cap.in_sets_text(spec.placement, spec.splits_backward)
        spec = replace(spec, offload=None)
        hidden = functools.partial(paired, stages=spec.placement.num_stages, pp=pp)
        planner = Planner(
            spec,
            self.cap,
            offload,
            cut=self.cut,
            chosen=self.decided is not None,
            paired=hidden if spec.overlap else None,
        )
        request = replace(self, note=note, planner=planner)
        request.first(microbatches)
        return request

    def spec(self, pp: int, chunks: int | None, microbatches: int) -> ScheduleSpec:
        """The request as ``select`` takes it, without offload."""
        spec = ScheduleSpec(
            self.name,
            pp,
            microbatches,
            chunks,
            self.costs or Costs(),
            self.cap,
            order=self.file,
        )
        return _with_costs(spec, self).sliced(self.cut)

    @property
    def about(self) -> str:
        """What the log adds to the schedule's name."""
        if not self.note:
            return ""
        return f"{', chosen by auto' if self.decided is not None else ''}: {self.note}"

    def first(self, microbatches: int) -> Schedule:
        """``plan`` before anything is measured."""
        return self.plan(microbatches)

    def plan(self, units: StepUnits | int, knowledge: Knowledge = NOTHING) -> Schedule:
        """``Planner.plan``; a number stands for so many equal microbatches.

        Raises:
            ConfigError: a file is for another number of microbatches, or an option does not fit.
        """
        units = StepUnits(units) if isinstance(units, int) else units
        file, planner = self.file, self.planner
        assert planner is not None
        if file is not None:
            held, asked = file.microbatches, units.microbatches
            if held != asked:
                raise ConfigError(
                    f"--pp-schedule {self.name} is for {held} microbatches, but the run has "
                    f"{asked}; generate it with --microbatches {asked}"
                )
        with schedule_errors(self.name):
            return planner.plan(units, knowledge)


def _with_costs(spec: ScheduleSpec, request: ScheduleRequest) -> ScheduleSpec:
    """``spec`` for the model's FLOPs where the user gives no costs."""
    flops, own = _flops(request, stages_of(spec)), request.file is None
    if own and request.costs is None:
        spec = replace(spec, costs=flops)
    if own and request.barriers:
        costs = with_shard(spec.costs, flops, spec.pp)
        spec = replace(spec, barriers=request.barriers, costs=costs)
    if own and request.overlap:
        spec = replace(spec, overlap=True, costs=paired(spec.costs, stages_of(spec), spec.pp))
    return spec


def _require_chunks(offload: str, chunks: int) -> None:
    """Refuse to offload more chunks than a rank has."""
    try:
        wanted_chunks(offload, chunks)
    except ValueError:
        raise ConfigError(
            f"{offload} chunks cannot be offloaded, since a rank has {chunks}; give 1 to {chunks}"
        ) from None


def _flops(request: ScheduleRequest, stages: int) -> Costs:
    """Costs of the model's FLOPs; equal ones where its layers or stages are not known."""
    if request.job is None or request.splits is None:
        return Costs()
    with suppress(ValueError):
        split = request.splits(stages)
        if sum(split.counts) == request.job.num_layers:
            return flop_costs(request.job, split)
    return Costs()


def _select(spec: ScheduleSpec, name: str) -> Selected:
    """``select`` with errors that name the flags."""
    with schedule_errors(name):
        return select(spec)


@contextmanager
def schedule_errors(name: str) -> Iterator[None]:
    """Errors inside name the flags of a schedule."""
    with named_errors(f"--pp-schedule {name}"):
        try:
            yield
        except CapExceeded as error:
            raise ValueError(
                f"{error.what}; raise --pp-memory-cap to {error.enough}, or use another schedule"
            ) from None


def _load(path: str) -> Schedule:
    """A checked schedule file."""
    names = (*NAMES, AUTO)
    is_file = path.endswith(".json") or "/" in path
    if not is_file:
        raise ConfigError(
            f"--pp-schedule {path!r} is not known{meant(path, names)}; give one of "
            f"{', '.join(names)}, or a file (*.json) from `megatron-ext schedule --output`"
        )
    with named_errors("--pp-schedule", ScheduleError):
        schedule = load(path).unlowered()
        if not schedule.slices:
            schedule.require_whole("training")
        check(schedule)
        _require_runnable(schedule)
    return schedule


def _require_runnable(schedule: Schedule) -> None:
    """Raises:
    ScheduleError: training has no such placement, or no such passes of the vocabulary.
    """
    placement, shared = schedule.placement, schedule.vocabulary
    if not (placement.is_vee() or placement.is_loop()):
        raise ScheduleError(f"stages are placed as {placement}, neither as Megatron's nor as a V")
    if len({*schedule.slices}) > 1:
        raise ScheduleError("microbatches are cut into different numbers of slices")
    if shared is not None and not shared.embeddings:
        raise ScheduleError("the vocabulary is sharded without the embedding")
