"""The feature protocol: flags, checks, hooks and events.

A feature is one class in a folder or file below ``features/``. ``features.FEATURES`` lists them;
everything that is done for flags (parsing, help, documentation, comparison over ranks, "off means
off") loops over that list, and every run has one object of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._input import attribute
from .arguments import MegatronArgs
from .callbacks import Callback, PlanInputs

if TYPE_CHECKING:
    from ..runtime.wgrad import WeightGradStore
    from .features.schedule.choose import ScheduleRequest
    from .pipeline import ScheduledPipeline


@dataclass(frozen=True)
class Flag:
    """A command-line option of ours. Its default is always None, which means "not given".

    Attributes:
        name: with its dashes.
        help: for ``--help``; ``%`` must be doubled.
        metavar: the value in ``--help``.
        alone: it works without ``--pp-schedule``.
        compared: given the value and all arguments, what must be equal on all ranks; default: the
            value itself. For files, whose paths may differ between nodes.
        not_in_library: why it needs Megatron's arguments (see ``Run.library``), and what to do.
        not_in_library_as: values of which that is so, all where None: an example, and whether a
            value is one, given with all arguments.
        choices: the values that it takes; none: any.
        least: the smallest number that it takes.
    """

    name: str
    help: str
    metavar: str | None = None
    kind: Callable[[str], Any] = str
    switch: bool = False
    alone: bool = False
    compared: Callable[[str, MegatronArgs], str] | None = None
    not_in_library: str = ""
    not_in_library_as: tuple[str, Callable[[str, MegatronArgs], bool]] | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None

    def refusal(self, args: MegatronArgs, library: bool = False) -> str | None:
        """The first of its rules that ``args``, where it was given, do not keep; None: all are."""
        name, value = self.name, self.of(args)
        text = name if value is True else f"{name} {value}"
        if self.choices and value not in self.choices:
            return f"{name} must be one of {', '.join(self.choices)}, got {value!r}"
        if self.least is not None and value != "auto" and value < self.least:
            return f"{name} must be {self.least} or more, got {value}"
        if library and self.not_in_library:
            if self.not_in_library_as is None:
                return f"{name} cannot be used here: {self.not_in_library}"
            if self.not_in_library_as[1](str(value), args):
                return f"{text} cannot be used here: {self.not_in_library}"
        if not self.alone and args.pp_schedule is None:
            return f"{name} needs --pp-schedule; add it or drop {name}"
        return None

    @property
    def shown(self) -> str | None:
        """Its value in ``--help``."""
        return "{" + ",".join(self.choices) + "}" if self.choices else self.metavar

    @property
    def attribute(self) -> str:
        """The option's name in parsed arguments."""
        return attribute(self.name)

    def of(self, args: MegatronArgs) -> Any:
        """The value in parsed arguments; None if the flag was not given."""
        return getattr(args, self.attribute, None)

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Declare the option."""
        if self.switch:
            group.add_argument(self.name, action="store_true", default=None, help=self.help)
            return
        group.add_argument(
            self.name,
            type=self.kind,
            metavar=self.shown,
            default=None,
            help=self.help,
        )


@dataclass
class Run:
    """One training run with our flags; what the features share.

    Attributes:
        training: Megatron's training package is in use, not only its core.
        library: there is no command line (``megatron_ext.enable``). What Megatron's arguments would
            hold is known only when a model comes; ``for_model`` is the run of that model.
        request: what ``--pp-schedule`` asks for; None: Megatron's own schedule runs.
        schedule: the same with its planner; known after Megatron's validation, or see ``choice``.
        chunks: model chunks a rank; known after Megatron's validation, or with the model.
        experts_in_chunks: MoE layers run in chunks of tokens.
        inputs: of training plans; callbacks change them while the run goes on.
        models: of a library: the chunks of the model whose run this is, with their wrappers.
        group, groups: of a library: the model's pipeline, and all in which ranks run its calls
            together, that first.
        notices: for rank 0's log once the run is set up.
        lengths_of: of a library: a user's function from what a data iterator gives for one
            microbatch to the lengths of its sequences.
        slices_of: of a sequence of so many tokens, where lengths are known; None: it is not cut.
    """

    args: MegatronArgs
    version: str
    training: bool = True
    library: bool = False
    request: ScheduleRequest | None = None
    schedule: ScheduleRequest | None = None
    chunks: int = 1
    experts_in_chunks: bool = False
    inputs: PlanInputs = field(default_factory=PlanInputs)
    store: WeightGradStore | None = None
    pipeline: ScheduledPipeline | None = None
    models: Sequence[Any] = ()
    group: Any = None
    groups: Sequence[Any] = ()
    notices: list[str] = field(default_factory=list)
    lengths_of: Callable[[Any], Any] | None = None
    slices_of: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        self.request = self.request or self.schedule

    def choice(self, microbatches: int) -> ScheduleRequest:
        """The request with its planner; in a library settled by the first training step.

        Raises:
            ConfigError: options that do not fit the model, or a cap that is not kept.
        """
        if self.schedule is None:
            assert self.request is not None
            pp = self.args.pipeline_model_parallel_size
            self.schedule = self.request.resolve(pp, self.chunks, microbatches)
        return self.schedule

    def for_model(self, args: MegatronArgs, models: Sequence[Any], groups: Sequence[Any]) -> Run:
        """The run of one of a library's models: what all share stays, the rest is its own."""
        return replace(
            self,
            args=args,
            chunks=len(models),
            models=models,
            group=groups[0],
            groups=groups,
            schedule=None,
            inputs=PlanInputs(),
            pipeline=None,
        )


class Feature(Callback):
    """One feature in one run, or in one of a library's models. A subclass overrides what it needs.

    Attributes:
        per_model: its state is one model's; with several models in a process each gets its own.
    """

    flags: tuple[Flag, ...] = ()
    per_model: bool = False

    def check_flags(self, run: Run) -> None:
        """Check our own flags, of which every run knows all before anything else.

        Raises:
            ConfigError: a combination that cannot work.
        """

    def check(self, run: Run) -> None:
        """Check them with Megatron's arguments, before its own validation, which may be changed; in
        a library with the model whose run this is.

        Raises:
            ConfigError: a combination that cannot work.
        """

    def check_derived(self, run: Run) -> None:
        """Check what Megatron's validation has derived.

        Raises:
            ConfigError: a combination that cannot work.
        """

    def start(self, run: Run) -> Sequence[Callback]:
        """What is put in force for ``run``, itself or parts; empty if the feature is off.

        Later features' hooks wrap those of earlier ones. The callbacks' events come in the order of
        the features when an iteration begins, and in the reverse order when it ends.

        Raises:
            ConfigError: this machine or these ranks cannot run it.
        """
        return ()
