"""``--pp-slices``: every microbatch runs as slices of its sequence."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...._input import attribute
from ....plan.slices import FLAG, PACKED
from ...callbacks import Callback, Step
from ...errors import ConfigError
from ...feature import Feature, Flag, Run
from ...utils import Wrappers
from .model import SlicedModel
from .run import Batches, SliceRunner, require_nothing_left
from .state import Cuts
from .wanted import TOKENS, WEIGHTS, Wanted


class Slices(SlicedModel, Feature):
    """On with ``--pp-slices`` of 2 or more: runs training iterations in slices."""

    flags = (
        Flag(
            FLAG,
            "cut the sequence of every training microbatch into K slices (default 1), for few "
            "microbatches and long sequences: a slice attends to those before it",
            "K",
            int,
            least=1,
        ),
        Flag(
            TOKENS,
            f"in place of {FLAG}: as many slices as make them no longer than N tokens on average; "
            "with --pp-microbatch-costs lengths each microbatch has its own number",
            "N",
            int,
            least=1,
        ),
        Flag(
            WEIGHTS,
            f"with {FLAG}: each (default), every slice has a W of its own, or joined, one product "
            "for all slices of a microbatch, whose sets stay until then; for schedules with W",
            choices=("each", "joined"),
        ),
    )

    def check_flags(self, run: Run) -> None:
        file, args = None if run.request is None else run.request.file, run.args
        if file is None:
            return
        count = file.slices[0] if file.slices else 1
        joined = args.pp_slice_weights
        if args.pp_slices not in (None, count) or args.pp_slice_tokens is not None:
            raise ConfigError(f"{_text(run)} is not what the schedule file has; drop it")
        if joined is not None and (joined == "joined") != file.joined:
            raise ConfigError(f"{WEIGHTS} {joined} is not what the schedule file has; drop it")

    def check(self, run: Run) -> None:
        wanted = _wanted(run)
        if wanted is None or run.request is None:
            return
        self._ask(run, wanted)

    def _ask(self, run: Run, wanted: Wanted) -> None:
        """Ask for an order of the slices of this model's sequences."""
        args, tokens = run.args, run.args.seq_length
        assert run.request is not None and tokens is not None
        lengths_differ = run.library and getattr(args, "variable_seq_lengths", False)
        # Other features learn how sequences of known length are cut.
        run.slices_of = functools.partial(wanted.count_of, config=args)
        of_steps = args.pp_microbatch_costs == "lengths"
        if wanted.tokens is not None and lengths_differ and not of_steps:
            raise ConfigError(f"{_text(run)} needs --pp-microbatch-costs lengths; add it")
        if wanted.count > 1:
            cut = wanted.shortest(args) if lengths_differ else wanted.cut(tokens, args)
            run.request = replace(run.request, cut=cut)

    def start(self, run: Run) -> Sequence[Callback]:
        wanted = _wanted(run)
        if wanted is None or run.request is None:
            return ()
        self._cut, self.implementations = wanted, _implementations(run)
        self.one_mask = not (run.library or getattr(run.args, "reset_attention_mask", False))
        # Of the loss function: of a script the first step's, of a trainer that of every step.
        self._library, self._unknown = run.library, True
        self._batches = Wrappers(Batches)
        return (self,)

    # --- an iteration ---

    def data_iterators(self, iterators: list[Any], training: bool) -> list[Any]:
        if not training:
            return iterators
        # The same for the same ones: an iteration that was begun early is known by them.
        return [*self._batches.over(iterators)]

    def begin(self, step: Step) -> None:
        if not step.training:
            return
        for batches in self._batches.there:
            batches.whole = not step.plan.slices
        if not step.plan.slices:
            return
        call, config = step.call, step.call.iteration.config
        each = {
            count: functools.cache(
                functools.partial(replace(self._cut, count=count).cut, config=config)
            )
            for count in {*step.plan.slices}
        }
        cuts = Cuts([each[count] for count in step.plan.slices], call.batch[0])
        if call.shape is not None:
            lengths = cuts.get(0, 0).lengths
            parts = call.shape[0] * lengths[0] // call.batch[0]
            # Shapes of slices that differ are sent ahead of them.
            step.shape = (parts, *call.shape[1:]) if len({*lengths}) == 1 else None
        step.runner_type = functools.partial(
            SliceRunner,
            slicing=self.slicing,
            cuts=cuts,
            batches=self._batches.of_chunks,
            unknown=self._unknown,
        )

    def passes_done(self, step: Step, watchdog: Any) -> None:
        self._unknown &= self._library or not (step.training and step.plan.slices)
        require_nothing_left(self.slicing, step.rank)

    def dropped(self, step: Step) -> None:
        self.slicing.clear()

    def close(self) -> None:
        self.slicing.clear()


def _wanted(run: Run) -> Wanted | None:
    """What flags or a schedule file ask for; None: whole sequences."""
    args, file = run.args, None if run.request is None else run.request.file
    count = args.pp_slices
    packed = any(getattr(args, attribute(name), False) for name in PACKED)
    if file is not None:
        return Wanted(file.slices[0], packed, file.joined) if file.slices else None
    rest, tokens = (packed, args.pp_slice_weights == "joined"), args.pp_slice_tokens
    if tokens is not None:
        length = getattr(args, "seq_length", None)
        # Where lengths are not known yet, or differ, each microbatch has its own number.
        if length is None or getattr(args, "variable_seq_lengths", False):
            return Wanted(1, *rest, tokens)
        number = -(-length // tokens)
        return Wanted(number, *rest, tokens) if number > 1 else None
    return Wanted(count, *rest) if count is not None and count > 1 else None


def _text(run: Run) -> str:
    """What asks for slices: a flag with its value, or a file."""
    args = run.args
    if args.pp_slice_tokens is not None:
        return f"{TOKENS} {args.pp_slice_tokens}"
    if args.pp_slices is None:
        return f"--pp-schedule {args.pp_schedule} with slices"
    return f"{FLAG} {args.pp_slices}"


def _implementations(run: Run) -> Sequence[str]:
    """Of attention that may run; a trainer's model is not known yet."""
    if not run.library:
        return (run.args.transformer_impl,)
    engine = importlib.util.find_spec("transformer_engine") is not None
    return ("local", *(("transformer_engine",) if engine else ()))
