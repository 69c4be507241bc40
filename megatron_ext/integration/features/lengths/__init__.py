"""``--pp-microbatch-costs lengths``: every step is planned for the lengths of its microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ....plan.lengths import FLAG, LENGTHS, wanted
from ....plan.loads import Load, rising, shares_of_loads
from ....runtime.watchdog import Watchdog
from ...callbacks import Callback, Loads, Step
from ...errors import ConfigError
from ...feature import Feature, Flag, Run
from ...utils import Wrappers, gather_over
from .queue import Ahead
from .read import Sequences, asked, sequences_of
from .replicas import LossFunctions

_WHOLE = f"{FLAG} {LENGTHS}"
_REORDER = "--pp-reorder-microbatches"


class Lengths(Feature):
    """On with ``--pp-microbatch-costs lengths``: reads the lengths of each training step, and sends
    them to the pipeline."""

    flags = (
        Flag(
            FLAG,
            "equal (default), or lengths: read the lengths of a training step's microbatches ahead "
            "on the first stage, send them to all stages, and run an order for them; for data of "
            "varying length, and packed documents",
            choices=("equal", LENGTHS),
        ),
        Flag(
            _REORDER,
            f"with {_WHOLE}: let the microbatches of a step run in another order, short "
            "ones at both ends; losses come back in the order given",
            switch=True,
        ),
    )
    per_model = True

    def check_flags(self, run: Run) -> None:
        if wanted(run.args) and run.request is not None and run.request.file is not None:
            raise ConfigError(f"{_WHOLE} makes orders, and a file has one; name a schedule")

    def start(self, run: Run) -> Sequence[Callback]:
        if not wanted(run.args) or run.pipeline is None:
            return ()
        self._run, self._free = run, bool(run.args.pp_reorder_microbatches)
        self._queues = Wrappers(Ahead)
        self._loss_functions = LossFunctions()
        return (self,)

    # --- a step ---

    def data_iterators(self, iterators: list[Any], training: bool) -> list[Any]:
        return [*self._queues.over(iterators)] if training else iterators

    def before_plan(self, step: Step) -> None:
        if not step.training:
            return
        count = step.call.iteration.num_microbatches
        loads, ranks = _agreed(self._read(step), step)
        self._keep_replicas_apart(step, ranks)
        units = self._units(loads, step)
        order: Sequence[int] = range(count)
        in_bytes = self._run.request is not None and self._run.request.cap_bytes is not None
        longer = in_bytes and sum(row[-1] for row in units[0]) > 1
        if len({*units}) == 1 and len(units[0]) == self._usual and not longer:
            units = ()  # the plan for equal microbatches, which keeps a cap for whole ones
        elif self._free:
            # One plan for all steps with these lengths, however they come.
            order = rising(units)
            units = tuple(units[j] for j in order)
        step.loads = Loads(tuple(load.tokens for load in loads), units, tuple(order), self._free)

    def begin(self, step: Step) -> None:
        if step.training:
            assert step.loads is not None
            for queue in self._queues.there:
                queue.begin(step.loads.order)

    def passes_done(self, step: Step, watchdog: Watchdog) -> None:
        if not step.training:
            return
        for queue in self._queues.there:
            queue.end()
        assert step.loads is not None
        given, order = [*step.losses], step.loads.order
        if len(given) == len(order):
            for place, number in enumerate(order):
                step.losses[number] = given[place]

    def dropped(self, step: Step) -> None:
        for queue in self._queues.there:
            queue.drop()

    def close(self) -> None:
        self._queues = Wrappers(Ahead)

    def _read(self, step: Step) -> list[Load] | str | None:
        """The loads, on ranks of the first stage with data; what is wrong; None on others."""
        queue, count = self._queues.of_chunks[0], step.call.iteration.num_microbatches
        if step.rank != 0 or queue is None:
            return None
        try:
            found = [self._sequences(one) for one in queue.peek(count)]
        except ConfigError as error:
            return str(error)
        length, samples = step.call.batch
        fixed = step.call.shape is not None
        return [_load(one, (length,) * samples if fixed else None) for one in found]

    def _keep_replicas_apart(self, step: Step, ranks: Sequence[int]) -> None:
        """Other ranks than these may have other slices, or another order, in this step."""
        iteration, tokens = step.call.iteration, self._run.args.pp_slice_tokens
        cut = tokens is not None and step.call.shape is None
        if (self._free or cut) and len(ranks) < dist.get_world_size():
            iteration.forward_step_func = self._loss_functions.checked(
                iteration.forward_step_func, ranks
            )

    @functools.cached_property
    def _sequences(self) -> Callable[[Any], Sequences]:
        function = self._run.lengths_of
        return sequences_of if function is None else functools.partial(asked, function)

    def _units(self, loads: Sequence[Load], step: Step) -> tuple[Any, ...]:
        """Shares of each microbatch's units."""
        args, request = self._run.args, self._run.request
        assert request is not None
        tokens = args.seq_length * args.micro_batch_size
        if step.call.shape is None and request.cap_bytes is None:
            tokens = max(load.tokens for load in loads)
        whole, counts = Load(tokens, tokens * args.seq_length), None
        if self._run.slices_of is not None:
            usual = None if step.call.shape is None else step.call.batch[0]
            counts = [self._run.slices_of(usual or load.length) for load in loads]
        return shares_of_loads(loads, whole, args.hidden_size, counts)

    @property
    def _usual(self) -> int:
        """Slices of a microbatch in the plan for equal ones."""
        request = self._run.request
        return 1 if request is None or request.cut is None else len(request.cut.ends)


def _load(found: Sequences, fixed: Sequence[int] | None) -> Load:
    """Of one microbatch.

    Args:
        fixed: lengths to which its sequences are padded, where messages are of one shape.
    """
    if fixed is None:
        return Load.of(found.lengths)
    whole = Load.of(fixed)
    return Load(whole.tokens, Load.of(found.lengths).squares) if found.packed else whole


def _agreed(mine: list[Load] | str | None, step: Step) -> tuple[list[Load], list[int]]:
    """The loads of a step, and the ranks that have them. Ranks that run a call together follow one
    plan, also pipelines that share experts: of each microbatch the largest counts, for which the
    others wait.

    Raises:
        ConfigError: on all of these ranks: a rank could not read them, or none has data.
    """
    every = gather_over((dist.get_rank(), mine), step.call.groups)
    for _, one in every:
        if isinstance(one, str):
            raise ConfigError(one)
    known = [one for _, one in every if one is not None]
    if not known:
        raise ConfigError("orders by lengths need a data iterator on the first stage; none has one")
    loads = [functools.reduce(Load.most, column) for column in zip(*known)]
    return loads, [rank for rank, _ in every]
