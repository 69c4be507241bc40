"""--pp-schedule and its options: which schedule, and its order for any number of microbatches."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ...._input import meant, parse_bytes
from ....plan.budget import Budget, Splits, profiled, stages_of
from ....plan.estimate import Estimate, paired, with_shard
from ....plan.model import Job
from ....plan.profile import Profile
from ....schedule import (
    AUTO,
    GENERATORS,
    NAMES,
    CapExceeded,
    Costs,
    Cut,
    Link,
    OffloadSpec,
    Placement,
    Schedule,
    ScheduleError,
    ScheduleSpec,
    Selected,
    check,
    load,
    select,
)
from ....schedule.generators import MOST_EFFORT, Objective, default_effort
from ....schedule.memory_cap import Cap, ShareCap, parse_cap
from ....schedule.planner import NOTHING, Knowledge, Planner, StepUnits
from ...errors import ConfigError
from ...offload_request import OffloadRequest


@dataclass(frozen=True)
class ScheduleRequest:
    """What the flags ask for, before Megatron's own validation has run.

    Attributes:
        name: a schedule's name, ``auto``, or the path of a schedule file.
        costs: as the user gives them, or None.
        cap, group_size, objective, effort: as ``ScheduleSpec``.
        cap_bytes: a cap in bytes; ``for_job`` makes it a ``cap``.
        offload: what is offloaded, or None.
        file: the loaded and checked schedule, if a file was given.
        profile: a former run's measurements, to plan with from the first step on.
        splits: layers of every stage, for a number of stages; beside ``profile``.
        estimate: of the costs, where neither the user nor a profile has them.
        decided: what ``auto`` has chosen; ``name`` is that schedule's then.
        note: why.
        barriers: of a vocabulary that is sharded over all ranks; 0: it is not.
        shard: estimates the times of its passes, where ``costs`` have none.
        overlap: passes run in pairs, as ``ScheduleSpec``.
        cut: of every microbatch's sequence into slices; None: it is not cut.
        cuts: to choose ``cut`` from; empty: it is given.
    """

    name: str
    costs: Costs | None = None
    cap: Cap | None = None
    cap_bytes: int | None = None
    group_size: int | None = None
    offload: OffloadRequest | None = None
    objective: Objective = "makespan"
    effort: float = field(default_factory=default_effort)
    file: Schedule | None = None
    profile: Profile | None = None
    splits: Splits | None = None
    estimate: Estimate | None = None
    decided: ScheduleSpec | None = None
    note: str = ""
    barriers: int = 0
    shard: Estimate | None = None
    overlap: bool = False
    cut: Cut | None = None
    cuts: tuple[Cut, ...] = ()

    @classmethod
    def of(
        cls,
        text: str,
        cost: str | None = None,
        memory_cap: str | None = None,
        group_size: int | None = None,
        offloading: OffloadRequest | None = None,
        objective: Objective = "makespan",
        effort: float | None = None,
    ) -> ScheduleRequest:
        """The request of the flags' values.

        Args:
            text: a schedule's name, ``auto``, or the path of a schedule file.
            cost: ``F,B,W[,HOP]`` to make the order for; None: a profile's, or an estimate's.
            memory_cap: fraction of 1F1B's peak, or bytes a rank, for ``auto`` and schedules at any
                cap; with offload, for all.
            group_size: for schedules in groups.
            offloading: what is offloaded, or None.
            objective: what the order makes short, as ``generate``.
            effort: seconds of search, about; > 0. None: the default.

        Raises:
            ConfigError: unknown name, an unreadable or invalid file, or options that do not fit.
        """
        size, cap = None, None
        if effort is not None and not 0 < effort <= MOST_EFFORT:
            raise ConfigError(
                f"--pp-effort must be more than 0 and at most {MOST_EFFORT} seconds, got {effort:g}"
            )
        try:
            seconds = default_effort() if effort is None else effort
            costs = None if cost is None else Costs.parse(cost)
            if memory_cap is not None and re.search("B$", memory_cap.strip()):
                size = parse_bytes(memory_cap)
            elif memory_cap is not None:
                cap = ShareCap(parse_cap(memory_cap))
        except ValueError as error:
            raise ConfigError(f"--pp-schedule {text}: {error}") from None
        request = cls(text, costs, cap, size, group_size, offloading, objective, seconds)
        if text in GENERATORS:
            _require_cap(text, memory_cap, size, offloading)
        elif text == AUTO:
            if group_size is not None:
                raise ConfigError(
                    f"--pp-schedule auto chooses the group size itself; drop --pp-group-size "
                    f"{group_size}, or use --pp-schedule gis"
                )
        else:
            if any(x is not None for x in (cost, group_size, None if offloading else memory_cap)):
                raise ConfigError(
                    f"--pp-schedule {text}: a file's order is fixed; drop --pp-cost, "
                    "--pp-memory-cap and --pp-group-size"
                )
            request = replace(request, file=_load(text, offloading))
        return request

    @property
    def vee(self) -> bool:
        """V placement is needed; not known of ``auto`` before ``decide``."""
        if self.file is not None:
            return self.file.placement.is_vee()
        return GENERATORS[self.name].placement == "vee"

    @property
    def splits_backward(self) -> bool:
        """B and W are passes of their own; not known of ``auto`` before ``decide``."""
        if self.file is not None:
            return self.file.splits_backward
        return GENERATORS[self.name].split_backward

    def placement(self, pp: int, chunks: int) -> Placement:
        """The placement on ``pp`` ranks; not known of ``auto`` before ``decide``."""
        return ScheduleSpec(self.name, pp, 1, chunks, order=self.file).placement

    @property
    def offloads(self) -> bool:
        """True if activation sets are offloaded."""
        return self.offload is not None or (self.file is not None and self.file.has_offload)

    def for_job(self, job: Job) -> ScheduleRequest:
        """The same with a cap in bytes as a cap on the ranks of ``job``."""
        assert self.cap_bytes is not None and self.splits is not None
        budget = Budget(job, self.cap_bytes, self.splits, self.profile, sets_grow=True)
        return replace(self, cap=budget)

    @property
    def needs_estimate(self) -> bool:
        """True if neither the user, nor a profile, nor a schedule file gives times of passes."""
        return self.costs is None and self.profile is None and self.file is None

    def estimated(self, estimate: Estimate) -> ScheduleRequest:
        """The same with the order made for ``estimate``; what ``auto`` has chosen stays."""
        decided = self.decided
        if decided is not None:
            decided = replace(decided, costs=estimate.costs(decided.placement.num_stages))
            # Bytes depend on the order, too, and a cap is kept by the one that was chosen for it.
            if isinstance(self.cap, Budget) and decided.offload is None:
                decided = decided if self.cap.fits(select(decided).schedule) else self.decided
        return replace(self, estimate=estimate, decided=decided)

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
        link = None if self.offload is None else self.offload.link(pp)
        found = _select(_with_offload(spec, self.offload, link), AUTO)
        note = found.schedule.note
        if len(names) != len(NAMES):
            note += "; only these suit this model's layers and flags"
        return replace(self, name=found.schedule.name, decided=found.spec, note=note)

    def resolve(self, pp: int, chunks: int | None, microbatches: int) -> Choice:
        """What runs; made for the full batch, so that options which do not fit end the run here.

        Args:
            chunks: model chunks a rank; None: the schedule's own.

        Raises:
            ConfigError: options that do not fit, or a cap that is not kept.
        """
        offload = self.offload
        spec = self.decided or self.spec(pp, chunks, microbatches)
        if offload is not None:
            placement = spec.placement
            offload.check_chunks(placement.chunks)
            if self.profile is not None and self.splits is not None and offload.times is None:
                split = self.splits(placement.num_stages)
                offload = replace(offload, measured=self.profile.link(split, placement))
            offload.check_times(placement)
        note = self.note
        if self.decided is None and self.file is None and offload is None:
            found = _select(spec, self.name)
            spec, note = found.spec, found.schedule.note
        elif self.decided is None and isinstance(self.cap, Budget):
            note = self.cap.in_sets_text(spec.placement, spec.splits_backward)
        request, spec = replace(self, offload=offload, note=note), replace(spec, offload=None)
        hidden = functools.partial(request.paired, pp=pp, stages=spec.placement.num_stages)
        planner = Planner(
            spec,
            self.cap,
            None if offload is None else offload.wanted,
            # Times that are not the user's may be wrong, and training has begun: no reason to end.
            lenient=offload is not None and offload.times is None,
            cut=self.cut,
            chosen=self.decided is not None,
            paired=hidden if spec.overlap else None,
        )
        choice = Choice(request, planner)
        choice.first(microbatches)
        return choice

    def spec(self, pp: int, chunks: int | None, microbatches: int) -> ScheduleSpec:
        """The request as ``select`` takes it, without offload."""
        spec = ScheduleSpec(
            self.name,
            pp,
            microbatches,
            chunks,
            self.costs or Costs(),
            self.cap,
            self.group_size,
            objective=self.objective,
            effort=self.effort,
            order=self.file,
        )
        if self.profile is not None and self.splits is not None:
            spec = profiled(spec, self.profile, self.splits)
        elif self.estimate is not None:
            spec = replace(spec, costs=self.estimate.costs(stages_of(spec)))
        if self.barriers and self.file is None:
            costs = with_shard(spec.costs, self.shard, pp, stages_of(spec))
            spec = replace(spec, barriers=self.barriers, costs=costs)
        if self.overlap and self.file is None:
            spec = replace(spec, overlap=True, costs=self.paired(spec.costs, pp, stages_of(spec)))
        return spec.sliced(self.cut)

    def paired(self, costs: Costs, pp: int, stages: int) -> Costs:
        """``costs`` with communication that pairs hide, as much as is estimated."""
        return paired(costs, self.estimate or self.shard, stages, pp)


@dataclass(frozen=True)
class Choice:
    """What a run executes: the planner of its schedule, in the words of its flags.

    Attributes:
        request: what it answers, with measured transfer times if a profile has them.
        planner: makes its plans.
    """

    request: ScheduleRequest
    planner: Planner

    @property
    def name(self) -> str:
        """Of the schedule, or the path of its file."""
        return self.request.name

    @property
    def offload(self) -> OffloadRequest | None:
        """What is offloaded; None for a file that offloads, which has decided it."""
        return self.request.offload

    @property
    def placement(self) -> Placement:
        """Rank and chunk of every stage."""
        return self.planner.spec.placement

    @property
    def about(self) -> str:
        """What the log adds to the schedule's name."""
        if not self.request.note:
            return ""
        by = ", chosen by auto" if self.request.decided is not None else ""
        return f"{by}: {self.request.note}"

    def first(self, microbatches: int) -> Schedule:
        """``plan`` before anything is measured."""
        link = None if self.offload is None else self.offload.link(self.placement.pp)
        return self.plan(microbatches, Knowledge(link))

    def plan(self, units: StepUnits | int, knowledge: Knowledge = NOTHING) -> Schedule:
        """``Planner.plan``; a number stands for so many equal microbatches.

        Raises:
            ConfigError: a file is for another number of microbatches, or an option does not fit.
        """
        units = StepUnits(units) if isinstance(units, int) else units
        file = self.request.file
        if file is not None and file.microbatches != units.microbatches:
            raise ConfigError(
                f"schedule file {self.name} is for {file.microbatches} microbatches but the "
                f"run has {units.microbatches} (global batch / (micro batch * data parallel)); "
                f"generate it with --microbatches {units.microbatches}"
            )
        with named_errors(self.name):
            return self.planner.plan(units, knowledge)


def _with_offload(
    spec: ScheduleSpec, offload: OffloadRequest | None, link: Link | None
) -> ScheduleSpec:
    """``spec`` with what is offloaded over ``link``, if both are known."""
    if offload is None or link is None:
        return spec
    return replace(spec, offload=OffloadSpec(offload.wanted, link))


def _select(spec: ScheduleSpec, name: str) -> Selected:
    """``select`` with errors that name the flags."""
    with named_errors(name):
        return select(spec)


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Errors inside name the flags of a schedule."""
    try:
        yield
    except CapExceeded as error:
        raise ConfigError(
            f"--pp-schedule {name}: {error.what}; raise --pp-memory-cap to {error.enough}, or use "
            "another schedule"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--pp-schedule {name}: {error}") from None


def _require_cap(
    name: str, memory_cap: str | None, size: int | None, offloading: OffloadRequest | None
) -> None:
    """Refuse a named schedule with a cap too little or too many."""
    takes = GENERATORS[name].takes_memory_cap
    if takes and memory_cap is None:
        raise ConfigError(
            f"--pp-schedule {name} needs a cap, a fraction of 1F1B's peak; add e.g. "
            "--pp-memory-cap 0.6"
        )
    if size and not takes and offloading is None:
        raise ConfigError(
            f"--pp-schedule {name}: the memory of {name} is fixed and takes no "
            f"--pp-memory-cap {memory_cap}; use auto or v-cap, or offload"
        )


def _load(path: str, offloading: OffloadRequest | None) -> Schedule:
    """A checked schedule file that Megatron's model can be placed for."""
    if not (path.endswith((".json", ".csv")) or "/" in path):
        raise ConfigError(
            f"--pp-schedule {path!r} is not known; use {', '.join(NAMES)}, {AUTO}, "
            "or give a file's path (*.json or *.csv, from `megatron-ext schedule --output`)"
            + meant(path, (*NAMES, AUTO))
        )
    try:
        schedule = load(path).unlowered()
        if not schedule.slices:
            schedule.require_whole("training")
        if len({*schedule.slices}) > 1:
            raise ScheduleError(
                f"{path} has {min(schedule.slices)} to {max(schedule.slices)} slices a microbatch, "
                "but training cuts all microbatches of a file alike; write it with --slices K"
            )
        if schedule.has_offload and offloading is not None:
            raise ScheduleError(
                f"{path} has its own offload actions; drop --pp-offload and the flags that "
                "go with it, or write the file without --offload"
            )
        if schedule.vocabulary is not None and (
            schedule.barriers != 1 or not schedule.vocabulary.embeddings
        ):
            raise ScheduleError(
                f"{path} has {schedule.barriers} barriers a microbatch, but training runs the "
                "passes of a sharded vocabulary with one; write the file with "
                "--vocabulary-barriers 1"
            )
        check(schedule)
    except ScheduleError as error:
        raise ConfigError(f"--pp-schedule: {error}") from None
    if not schedule.placement.is_vee() and not schedule.placement.is_loop():
        raise ConfigError(
            f"--pp-schedule {path}: its placement {schedule.placement} is neither Megatron's "
            "(stage = chunk * pp + rank) nor the V; the runtime can place models only so"
        )
    return schedule
