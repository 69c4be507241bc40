"""Iteration callbacks: how features take part in the forward-backward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from ..schedule.costs import Costs
from ..schedule.link import Link
from ..schedule.planner import Knowledge, StepUnits
from .hooks import Hook, declared

if TYPE_CHECKING:
    from ..runtime.channel import Channel
    from ..runtime.executor import Executor
    from ..runtime.trace import Recorder
    from ..runtime.watchdog import Watchdog
    from ..schedule.actions import Op
    from ..schedule.schedule import Schedule
    from .runner import Call, MegatronRunner, Mover, SetObserver


class Loads(NamedTuple):
    """What the microbatches of one training step are.

    Attributes:
        tokens: of each, in the order in which they are given.
        units: of each, for each of its slices, the shares of a whole microbatch's F, B, W and set,
            by which the plan is made; in that order, or rising where ``free``. Empty: all are
            equal.
        order: the number of the microbatch in every place. Plans that are made for a free order
            change it once more.
        free: they may run in another order than given.
    """

    tokens: tuple[int, ...]
    units: tuple[tuple[tuple[Fraction, ...], ...], ...]
    order: tuple[int, ...]
    free: bool

    @property
    def step(self) -> StepUnits:
        """For the planner."""
        return StepUnits(len(self.order), self.units, self.free)


def arranged(loads: Loads, plan: Schedule) -> Loads:
    """``loads`` in the order of a plan that was made for them: its units by place."""
    if plan.arrangement is None or not loads.units:
        return loads
    order = plan.arrangement.order
    return loads._replace(
        units=tuple(loads.units[place] for place in order),
        order=tuple(loads.order[place] for place in order),
    )


# One measured pass: (model chunk, operation, microbatch, seconds).
Duration = tuple[int, "Op", int, float]


@dataclass
class PlanInputs:
    """What training plans are made from, beside the user's flags. Callbacks write it.

    Attributes:
        steps_to_measure: the next training steps whose times a feature needs.
        link: transfer times of offloaded activation sets; None: as the flags have them.
        costs: measured in this run.
        reorder: make a new order for these costs, and not only a new offload plan.
        changed: plans made so far are out of date.
    """

    steps_to_measure: int = 0
    link: Link | None = None
    costs: Costs | None = None
    reorder: bool = False
    changed: bool = False

    @property
    def knowledge(self) -> Knowledge:
        """As the planner takes it."""
        return Knowledge(self.link, self.costs, self.reorder and self.costs is not None)


@dataclass
class Step:
    """One iteration. Attributes are set in the order in which they are listed.

    Attributes:
        call: the arguments of the forward-backward function.
        callbacks: of the features in use.
        mover, observer: of this rank's activation sets (see ``MegatronRunner``), or None.
        runner_type: makes the runner, with the arguments of ``MegatronRunner``; None: that one.
        losses: what the loss function reported on this rank.
        notes: facts of this iteration that other callbacks may ask for, by name.
        shape: of what travels between stages; None: shapes differ, and are sent ahead. The call's,
            unless a callback's ``begin`` sets another.
        loads: of its microbatches, to plan it for; None: they count as equal.
    """

    call: Call
    callbacks: Sequence[Callback] = ()
    plan: Schedule = field(init=False)
    mover: Mover | None = None
    observer: SetObserver | None = None
    runner_type: Callable[..., MegatronRunner] | None = None
    runner: MegatronRunner = field(init=False)
    channel: Channel = field(init=False)
    recorder: Recorder = field(init=False)
    executor: Executor = field(init=False)
    losses: list[Any] = field(default_factory=list)
    notes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    shape: tuple[int, ...] | None = field(init=False)
    loads: Loads | None = None

    def __post_init__(self) -> None:
        self.shape = self.call.shape

    @property
    def training(self) -> bool:
        """False for evaluation."""
        return not self.call.iteration.forward_only

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline."""
        rank: int = self.call.group.rank()
        return rank

    def note(self, name: str) -> Any:
        """The value of a note, computed now; None if no feature has it."""
        return self.notes[name]() if name in self.notes else None


class Callback:
    """What one feature puts in force for a run. A subclass overrides what it needs.

    All ranks of a pipeline get the same events in the same order, so events may communicate.
    """

    def hooks(self) -> Sequence[Hook]:
        """The places in Megatron that it replaces: by default its ``hooked`` methods."""
        return declared(self)

    def times(self, training: bool) -> bool:
        """True if the next iteration's passes must be timed."""
        return False

    def data_iterators(self, iterators: list[Any], training: bool) -> list[Any]:
        """Megatron's data iterators, or wrappers of them."""
        return iterators

    def before_plan(self, step: Step) -> None:
        """Only ``step.call`` is known; ``PlanInputs`` may be changed, and ``step.loads`` set."""

    def planned(self, plan: Schedule) -> None:
        """A training plan was made: lowered, checked, and the same on all ranks."""

    def planned_for(self, plan: Schedule, loads: Loads) -> None:
        """As ``planned``, for a step's own microbatches; one comes with nearly every step."""

    def begin(self, step: Step) -> None:
        """Before the first pass; ``step.plan`` is known. May set ``mover``, ``observer`` and
        ``runner_type``."""

    def passes_done(self, step: Step, watchdog: Watchdog) -> None:
        """After the last pass; communication here is still watched."""

    def end(self, step: Step) -> None:
        """After the last pass, with its times."""

    def profiled(self, step: Step, durations: Sequence[Duration]) -> None:
        """The profiler has the passes of all iterations that it was to measure."""

    def gradients_reduced(self, step: Step) -> None:
        """Megatron has reduced the gradients."""

    def returning(self, step: Step) -> None:
        """Last of all, before the losses are returned; may set them."""

    def dropped(self, step: Step) -> None:
        """The iteration was abandoned after an exception."""

    def close(self) -> None:
        """The run is over, or ``revert`` was called."""
