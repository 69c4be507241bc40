"""--pp-schedule and its options: which schedule, and its order for any number of microbatches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from ...._input import parse_bytes, size_text
from ....plan.budget import Budget
from ....plan.layout import Split
from ....plan.model import PlanError
from ....plan.profile import Profile
from ....schedule.costs import Costs
from ....schedule.effects import peak_sets
from ....schedule.generators import AUTO, GENERATORS, NAMES, generate
from ....schedule.generators.auto import costs_for, time_taken
from ....schedule.generators.request import Objective
from ....schedule.io import load
from ....schedule.link import Link
from ....schedule.memory_cap import cap_sets, parse_cap
from ....schedule.offload_cap import (
    NO_CAP,
    CapNotKept,
    Make,
    auto_offloaded,
    caps_to_try,
    family,
    generate_offloaded,
)
from ....schedule.passes.check import check
from ....schedule.placement import Placement
from ....schedule.schedule import Schedule, ScheduleError
from ....schedule.simulate import simulate
from ...errors import ConfigError
from ..offload.request import OffloadRequest
from .families import ONE_CHUNK, choose


class Choice:
    """What ``--pp-schedule`` and its options ask for, before Megatron's own validation has run.

    Args:
        text: a generator's name, or the path of a schedule file.
        cost: ``F,B,W[,HOP]`` to make the order for; None: equal costs.
        memory_cap: fraction of 1F1B's peak, or bytes a rank (then ``give_budget`` has to follow),
            for schedules at any cap; with offload, for all.
        group_size: for schedules in groups.
        offloading: what leaves the device, or None.
        objective: what the order makes short, as ``generate``.

    Attributes:
        name: ``text``, or what auto decided for.
        vee: V placement is needed.
        file: the loaded and checked schedule, if a file was given.
        offload: as given; of a file that offloads, nothing more is to be decided.
        undecided: auto was asked for, and ``decide`` has to be called before anything else.
        note: why auto decided so, or what a cap in bytes has become.
        cap_bytes: the cap, if it was given in bytes.

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
        objective: Objective = "makespan",
    ) -> None:
        self.name, self.offload, self._objective = text, offloading, objective
        self.file: Schedule | None = None
        self.undecided, self.note = text == AUTO, ""
        self._group_size = group_size
        self._cap_sets: int | None = None
        self._auto_offloads = False
        self._plans: dict[tuple[int, int, int, Costs], Schedule] = {}
        self._budget: Budget | None = None
        self._profile: Profile | None = None
        self._splits: Callable[[int], Split] | None = None
        self._auto = self.undecided
        try:
            self._costs = Costs() if cost is None else Costs.parse(cost)
            self._cap: Fraction | None = None
            self.cap_bytes: int | None = None
            if memory_cap is not None and re.search("B$", memory_cap.strip()):
                self.cap_bytes = parse_bytes(memory_cap)
            elif memory_cap is not None:
                self._cap = parse_cap(memory_cap)
        except ValueError as error:
            raise ConfigError(f"--pp-schedule {text}: {error}") from None
        if text in GENERATORS:
            generator = GENERATORS[text]
            self.vee = generator.placement == "vee"
            if generator.takes_memory_cap and memory_cap is None:
                raise ConfigError(
                    f"--pp-schedule {text} needs a cap, a fraction of 1F1B's peak; add e.g. "
                    "--pp-memory-cap 0.6"
                )
            if self.cap_bytes and not generator.takes_memory_cap and offloading is None:
                raise ConfigError(
                    f"--pp-schedule {text}: the memory of {text} is fixed and takes no "
                    f"--pp-memory-cap {memory_cap}; use auto or v-cap, or offload"
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
            self.file = load(text).unlowered()
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

    def give_profile(self, profile: Profile, splits: Callable[[int], Split]) -> None:
        """Plan with a former run's measurements from the first step on.

        Args:
            profile: of this model.
            splits: layers of every stage, for a number of stages.
        """
        self._profile, self._splits = profile, splits

    def give_budget(self, budget: Budget) -> None:
        """What the bytes of the cap are to be compared with."""
        self._budget = budget

    def fit(self, pp: int, chunks: int, microbatches: int) -> None:
        """Turn a cap in bytes, and a profile, into sets and costs for a schedule that is chosen.

        Args:
            pp, chunks: of the pipeline.
            microbatches: of the full batch.

        Raises:
            ConfigError: nothing fits.
        """
        placement = self.placement(pp, chunks)
        if self._profile is not None and self._splits is not None:
            if not self._auto:
                self._costs = self._profile.costs(self._splits(placement.num_stages))
            if self.offload is not None and self.offload.times is None:
                split = self._splits(placement.num_stages)
                times = self._profile.link_times(split, placement)
                self.offload = replace(self.offload, measured=times)
        if self._budget is None or self._cap is not None or self._cap_sets is not None:
            return
        try:
            if self.offload is not None:
                self._cap = self._budget.cap(placement, self.splits_backward)
                self.note = "; ".join(filter(None, (self.note, self._cap_in_sets(placement))))
            elif self.file is None and GENERATORS[self.name].takes_memory_cap:
                fitting = self._budget.fastest(
                    pp, microbatches, chunks, self._costs, [self.name], self._objective
                )
                self._cap_sets, self.note = fitting.shape.memory_cap, fitting.note
                self._plans[pp, chunks, microbatches, self._costs] = fitting.schedule
        except PlanError as error:
            raise ConfigError(
                f"--pp-schedule {self.name}: {error}; raise --pp-memory-cap"
            ) from None

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
        if self._profile is not None and self._splits is not None:
            self._costs = self._profile.costs(
                self._splits(pp * (1 if names == ONE_CHUNK else chunks))
            )
        try:
            if self._budget is not None and self.offload is not None:
                self._cap = self._offload_cap(pp, names, chunks)
            if link is not None:
                schedule = self._decide_offloaded(pp, microbatches, names, chunks, link)
            elif self._budget is not None and self.offload is None:
                fitting = self._budget.fastest(
                    pp, microbatches, chunks, self._costs, names, self._objective
                )
                schedule = replace(fitting.schedule, note=fitting.note)
                self._group_size, self._cap_sets = (
                    fitting.shape.group_size,
                    fitting.shape.memory_cap,
                )
                self._took(schedule, pp, microbatches)
            else:
                chosen = choose(
                    pp, microbatches, self._costs, self._cap, names, chunks, self._objective
                )
                schedule, self._cap = chosen.schedule, None
                self._group_size, self._cap_sets = chosen.group_size, chosen.memory_cap
                self._took(schedule, pp, microbatches)
        except ValueError as error:
            raise ConfigError(f"--pp-schedule auto: {error}; raise --pp-memory-cap") from None
        self.undecided, self.name, self.note = False, schedule.name, schedule.note
        if self._budget is not None and self._cap is not None:
            self.note += f"; {self._cap_in_sets(schedule.placement)}"
        self.vee = schedule.placement.is_vee()

    def _cap_in_sets(self, placement: Placement) -> str:
        """What bytes have become where sets are offloaded, in words."""
        assert self._budget is not None and self._cap is not None
        measured = self._budget.profile is not None and self._budget.profile.set_bytes is not None
        return (
            f"{size_text(self._budget.size)} a rank are a cap of "
            f"{cap_sets(self._cap, placement.pp, placement.chunks)} activation sets of "
            f"{'measured' if measured else 'estimated'} size on a device"
        )

    def _took(self, schedule: Schedule, pp: int, microbatches: int) -> None:
        """Keep what auto has made, under the costs that its number of stages has."""
        self._costs = costs_for(self._costs, schedule.placement.num_stages) or self._costs
        self._plans[pp, schedule.chunks, microbatches, self._costs] = schedule

    def _offload_cap(self, pp: int, names: Sequence[str], chunks: int) -> Fraction:
        """A cap in bytes as a fraction, whichever of ``names`` it will be."""
        assert self._budget is not None
        placements = {}
        for name in names:
            made = GENERATORS[name]
            count = chunks if made.any_chunks else made.default_chunks
            vee = made.placement == "vee"
            placement = Placement.vee(pp) if vee else Placement.loop(pp, count)
            placements[vee, count] = placement, made.split_backward
        return min(self._budget.cap(*asked) for asked in placements.values())

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
            objective=self._objective,
        ).schedule

    @property
    def about(self) -> str:
        """What the log adds to the schedule's name."""
        if not self.note:
            return ""
        return f", chosen by auto: {self.note}" if self._auto else f": {self.note}"

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
        profile: Profile | None = None,
    ) -> Schedule:
        """The training schedule for ``microbatches``.

        Args:
            pp, chunks: of the pipeline.
            microbatches: of a step.
            link: how activation sets travel, to decide which do; a file that offloads has its own.
            costs: measured, of the passes; None: as given by the user.
            reorder: make the order for ``costs`` too, and take it if it is faster under them.
                Otherwise they only help to decide what leaves the device.
            profile: with ``reorder``, where the costs are from; its bytes decide anew what keeps a
                cap that was given in bytes.

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
        refused, fits = "", True
        budget, before_it = None, (self._budget, self._cap)
        if self._budget is not None and profile is not None:
            budget = replace(self._budget, profile=profile)
        try:
            if budget is not None and self.offload is None:
                fits = budget.worst(former).total <= budget.size
                new = self._refitted(budget, pp, chunks, microbatches, costs)
            else:
                if budget is not None:
                    placement, self._budget = former.placement, budget
                    self._cap = budget.cap(placement, self.splits_backward)
                    fits = max(peak_sets(former.ranks)) <= self._cap * placement.num_stages
                new = self._planned(pp, chunks, microbatches, costs, link, costs)
        except (PlanError, ConfigError) as error:
            # Training has begun, and what it runs now is no worse than it was.
            new, refused = former, f"; {'by measured bytes ' * (budget is not None)}{error}"
            self._budget, self._cap = before_it
        before, after = (time_taken(simulate(one), self._objective) for one in (former, new))
        gain = float(1 - after / before)
        if gain > 0 or (not fits and not refused):
            time = f"{gain:.2%} less time" if gain >= 0 else f"{-gain:.2%} more time"
            why = "measured times" if fits else "measured bytes, which the former order exceeds"
            held = ""
            if budget is not None:
                own = f"{new.name} has {budget.describe(new)}"
                held = f"; {own if self.offload is None else self._cap_in_sets(new.placement)}"
            return replace(new, note=f"re-planned for {why}: {time} a step{held}")
        than = f"{-gain:.2%} longer" if gain else "as long"
        note = f"the order stays: made for measured times it would take {than}{refused}"
        return replace(former, note=note)

    def _refitted(
        self, budget: Budget, pp: int, chunks: int, microbatches: int, costs: Costs
    ) -> Schedule:
        """The fastest order that keeps ``budget`` and for which the model is placed already.

        Raises:
            PlanError: none does.
        """
        names: Sequence[str] = (self.name,)
        if self._auto:
            own = GENERATORS[self.name]
            names = [
                name
                for name, made in GENERATORS.items()
                if (made.placement, made.split_backward) == (own.placement, own.split_backward)
                and (chunks if made.any_chunks else made.default_chunks) == chunks
            ]
        return budget.fastest(pp, microbatches, chunks, costs, names, self._objective).schedule

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
            return family(self.name, pp, microbatches, chunks, costs, self._cap, self._objective)
        if self.file is not None or not GENERATORS[self.name].takes_memory_cap or not self._cap:
            base = self.file or self._generated(pp, chunks, microbatches, costs)
            return (lambda _: base), NO_CAP
        made = partial(
            generate, self.name, pp, microbatches, chunks, costs, objective=self._objective
        )
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
                    objective=self._objective,
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
