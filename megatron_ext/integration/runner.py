"""The model as the executor sees it: F, B and W of Megatron's model chunks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..offload.blocks import release_storage
from ..runtime.executor import BackwardPass, Extension, ForwardPass, StageRunner
from ..runtime.wgrad import WeightGradStore
from ..schedule.actions import Op
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule
from .reductions import Reductions
from .utils import device_of

_NOTHING = contextlib.nullcontext()


class Mover(Protocol):
    """What the runner needs from the code that moves activation sets to the host and back."""

    def saving(self, key: tuple[int, int]) -> AbstractContextManager[None]:
        """Around F of (chunk, microbatch): what it keeps is this set."""

    def move(self, op: Op, key: tuple[int, int]) -> None:
        """OFFLOAD, RELEASE, PREPARE or RELOAD the set."""

    def finish(self, key: tuple[int, int]) -> None:
        """The set's last pass has run."""

    def will_offload(self, key: tuple[int, int]) -> bool:
        """True if the set will be offloaded."""

    def stays(self, tensor: torch.Tensor) -> None:
        """A tensor outlives the sets that save parts of it."""

    def on_host(self) -> Sequence[tuple[int, int]]:
        """Sets that take no device memory now."""


class SetObserver(Protocol):
    """What the runner shows of each activation set, e.g. to measure it."""

    def forward(self, chunk: int, microbatch: int, output: torch.Tensor) -> None:
        """After F; ``output`` still has its autograd history."""

    def postponed(self, chunk: int, microbatch: int) -> None:
        """Between B and W."""

    def stays(self, tensor: torch.Tensor) -> None:
        """A tensor outlives the sets that save parts of it."""


@dataclass
class ActivationSet:
    """What one chunk keeps for one microbatch between its F and its W."""

    x: torch.Tensor | None
    y: torch.Tensor | None


@dataclass
class Iteration:
    """One call of the forward-backward function: what stock passes, by its own names."""

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    models: list[Any]
    config: Any
    num_microbatches: int
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


@dataclass
class Call:
    """What one call of the forward-backward function asks for.

    Attributes:
        iteration: its arguments.
        group: the pipeline.
        shape: of what travels between stages.
        batch: (tokens, samples) of a microbatch.
        groups: all in which this rank takes the same passes as others (see ``groups_of_call``).
    """

    iteration: Iteration
    group: Any
    shape: tuple[int, ...] | None
    batch: tuple[int, int]
    groups: Sequence[Any] = ()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return device_of(self.iteration.models)


class MegatronRunner(StageRunner):
    """Runs Megatron's own ``forward_step`` and ``backward_step`` for single actions.

    Args:
        placement: which stage each chunk of this rank is.
        rank: this rank in the pipeline group.
        store: where split backward passes leave their weight gradients.
        mover: of activation sets, or None if they all stay.
        observer: of activation sets, or None.

    Attributes:
        sizes: of every unit's set, in whole microbatches; empty: they are microbatches.
    """

    sizes: Sequence[float] = ()

    def __init__(
        self,
        iteration: Iteration,
        placement: Placement,
        rank: int,
        store: WeightGradStore,
        mover: Mover | None = None,
        observer: SetObserver | None = None,
    ) -> None:
        from megatron.core.pipeline_parallel import schedules

        self._it, self.placement, self._rank = iteration, placement, rank
        self._store, self._mover, self._observer = store, mover, observer
        self._schedules = schedules
        self._backward_takes_model_type = _takes_model_type(schedules.backward_step)
        self._live: dict[tuple[int, int], ActivationSet] = {}
        self._reductions = Reductions(iteration.config, iteration.models, placement.stages[rank])
        self.losses: list[Any] = []
        device = device_of(iteration.models)
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)

    def extension(self, plan: Schedule) -> Extension | None:
        """What runs the operations of ``plan`` beyond F, B, W, messages and copies."""
        return None

    def computes_loss(self, stage: int) -> bool:
        """True if a stage's F ends with the loss, not with what another stage takes."""
        return stage == self.placement.num_stages - 1

    def forward_step_func(self, chunk: int, microbatch: int) -> Callable[..., Any]:
        """The script's forward step, as F calls it."""
        found: Callable[..., Any] = self._it.forward_step_func
        return found

    def live_sets(self) -> float:
        """Activation sets on the device now, of whole microbatches."""
        if self.sizes:
            return sum(self.sizes[unit] for _, unit in self._live)
        return len(self._live) - len(self._mover.on_host() if self._mover else ())

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        assert self._mover is not None
        self._mover.move(op, (chunk, microbatch))

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        if x is not None and not self._it.forward_only:
            x.requires_grad_(True)
        with self._mover.saving((chunk, microbatch)) if self._mover else _NOTHING:
            y, num_tokens = self.forward_step(chunk, microbatch, x)
        return self.forwarded(ForwardPass(chunk, microbatch, x), y, num_tokens)

    def forward_step(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> tuple[Any, Any]:
        """Megatron's part of F: the output with its autograd history, and the tokens counted."""
        it = self._it
        result: tuple[Any, Any] = self._schedules.forward_step(
            self.forward_step_func(chunk, microbatch),
            it.data_iterators[chunk],
            it.models[chunk],
            it.num_microbatches,
            x,
            self.losses,
            it.config,
            it.cp_size,
            collect_non_loss_data=it.collect_non_loss_data,
            is_first_microbatch=self.first_microbatch(microbatch),
            current_microbatch=self.number(microbatch),
            vp_stage=self.vp_stage(chunk),
            is_last_stage=self.computes_loss(self.placement.stages[self._rank][chunk]),
        )
        return result

    def number(self, microbatch: int) -> int:
        """Megatron's number of a microbatch."""
        return microbatch

    def span(self, chunk: int, microbatch: int, tokens: int) -> tuple[int, int]:
        """What a pass runs of a microbatch of so many tokens: its first one, and that behind."""
        return 0, tokens

    def before_batch(self, chunk: int, microbatch: int) -> None:
        """Batches that are drawn from now on are those of this microbatch."""

    def of_whole(self, chunk: int, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        """What the loss function gets of [samples, tokens] losses."""
        return losses

    def reported(self, microbatch: int) -> None:
        """After the loss function: the last of ``losses`` is that of this microbatch."""

    def count(self, microbatch: int, num_tokens: Any) -> None:
        """The loss function has counted so many tokens."""
        self.num_tokens += num_tokens

    def first_microbatch(self, microbatch: int) -> Any:
        """An argument of Megatron's forward step: weights may have changed before it."""
        it = self._it
        return self._schedules.check_first_val_step(
            it.first_val_step, it.forward_only, microbatch == 0
        )

    @property
    def _virtual(self) -> bool:
        return self.placement.chunks > 1

    def vp_stage(self, chunk: int) -> int | None:
        """Megatron's name of a chunk: None where a rank has only one."""
        return chunk if self._virtual else None

    def forwarded(self, of: ForwardPass, y: torch.Tensor, num_tokens: Any) -> torch.Tensor | None:
        """After Megatron's part of F: keep the set; returns what the next stage gets."""
        chunk, microbatch, x = of
        it, key = self._it, (chunk, microbatch)
        last = self.computes_loss(self.placement.stages[self._rank][chunk])
        self.count(microbatch, num_tokens)
        if self._observer is not None and self._mover is None:
            self._observer.forward(chunk, microbatch, y)
        if not it.forward_only:
            self._live[key] = ActivationSet(x, y)
            if x is not None and self._mover is not None and self._mover.will_offload(key):
                # Its values are in the set; here it waits for its gradient only.
                release_storage(x)
        if last:
            return None
        # The alias keeps the values alive for the receiver only; the graph keeps its node.
        result: torch.Tensor = y.detach()
        if not it.forward_only:
            self._schedules.deallocate_output_tensor(y, it.config.deallocate_pipeline_outputs)
        return result

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        of = BackwardPass(chunk, microbatch, grad, split)
        with self.backpropagating(of):
            return self.backward_step(of)

    @contextlib.contextmanager
    def backpropagating(self, of: BackwardPass) -> Iterator[None]:
        """Around Megatron's part of B (``split``) or BW."""
        chunk, microbatch, _, split = of
        key = (chunk, microbatch)
        with self.syncing(chunk, self._is_last(microbatch)):
            with self._store.collect(key) if split else _NOTHING:
                yield
        if split:
            if self._observer is not None:
                self._observer.postponed(chunk, microbatch)
            # The graph is gone; what W needs is in the store, so the set lives on in there.
            self._live[key] = ActivationSet(None, None)
        else:
            self._finished(chunk, microbatch)

    def weight(self, chunk: int, microbatch: int) -> None:
        timers = self._it.config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        # As inside autograd's backward: what B kept still knows its history, and recording more
        # of it would hold memory.
        with self.syncing(chunk, self._is_last(microbatch)), torch.no_grad():
            self._store.run((chunk, microbatch))
        if timers is not None:
            timers("backward-compute").stop()
        self._finished(chunk, microbatch)

    def held(self, of: BackwardPass) -> ActivationSet:
        """What F has kept for a backward pass."""
        return self._live[of.chunk, of.microbatch]

    def check_finished(self) -> None:
        """Every activation set and weight gradient has been used.

        Raises:
            RuntimeError: something is left; training on would use wrong gradients.
        """
        if self._live or len(self._store):
            raise RuntimeError(
                f"pipeline rank {self._rank} ended an iteration with {len(self._live)} activation "
                f"sets and {len(self._store)} weight-gradient passes left over"
            )

    def backward_step(self, of: BackwardPass) -> torch.Tensor | None:
        """Megatron's part of B or BW: the gradient of the stage's input."""
        held = self.held(of)
        args = [held.x, held.y, of.grad]
        if self._backward_takes_model_type:
            from megatron.core.utils import get_model_type

            args.append(get_model_type(self._it.models[0]))
        result: torch.Tensor | None = self._schedules.backward_step(*args, self._it.config)
        return result

    def syncing(self, chunk: int, last: bool) -> Any:
        """Around what adds to gradients; they may be reduced only from the last microbatch on.

        Passes of a chunk run in microbatch order, so a parameter whose gradient comes in the last
        microbatch's B (or W, if postponed) has then got all of them.

        Args:
            last: in the last microbatch.
        """
        no_sync = self._it.config.no_sync_func
        if isinstance(no_sync, list):
            no_sync = no_sync[chunk]
        if no_sync is None or (last and self._reductions.start_of(chunk) is None):
            return _NOTHING
        return no_sync()

    def chunk_done(self, chunk: int) -> None:
        """After the last of all passes with gradients of a chunk, which may be reduced now."""
        self._reductions.done(chunk)

    def _is_last(self, microbatch: int) -> bool:
        return microbatch == self._it.num_microbatches - 1

    def _finished(self, chunk: int, microbatch: int) -> None:
        """After a set's last pass."""
        del self._live[chunk, microbatch]
        if self._mover is not None:
            self._mover.finish((chunk, microbatch))
        if self._is_last(microbatch):
            self.chunk_done(chunk)


def beneath(
    found: Callable[..., MegatronRunner] | None, kind: type[MegatronRunner], **given: Any
) -> Callable[..., MegatronRunner]:
    """Makes runners of ``kind``, and of another one that overrides it.

    Args:
        found: what makes that other one, by ``functools.partial`` of its class; None: there is
            none.
        given: arguments of ``kind``, by their names.
    """
    if found is None:
        return functools.partial(kind, **given)
    assert isinstance(found, functools.partial) and isinstance(found.func, type)
    both = type(f"{found.func.__name__}Over{kind.__name__}", (found.func, kind), {})
    return functools.partial(both, **found.keywords, **given)


def with_loss_function(
    step: Callable[..., Any], taken: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """A script's forward step with another loss function.

    Args:
        taken: that other one, given the step's output and its own loss function.
    """

    @functools.wraps(step)
    def changed(*args: Any, **kwargs: Any) -> Any:
        output, own = step(*args, **kwargs)
        return output, taken(output, own)

    return changed


@functools.cache
def _takes_model_type(backward_step: Callable[..., Any]) -> bool:
    """Whether this Megatron's ``backward_step`` wants to know; asked once, not every iteration."""
    return "model_type" in inspect.signature(backward_step).parameters
