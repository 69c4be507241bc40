"""F and B of slices, one loss a microbatch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ....runtime.draws import Draws
from ....runtime.executor import BackwardPass
from ....schedule.units import Unit
from ...errors import ConfigError
from ...runner import MegatronRunner, with_loss_function
from ...support import CAUSAL, LINEAR, SUMS, require
from ...utils import device_of, unwrapped
from . import carry
from .state import Cuts, Slicing

_ROUNDING = 0.02  # of a sum of losses of 1, in bfloat16


def require_nothing_left(slicing: Slicing, rank: int) -> None:
    """Raises:
    RuntimeError: something is held for slices that will not come.
    """
    if slicing.left:
        raise RuntimeError(
            f"pipeline rank {rank} ended an iteration with what {slicing.left} modules keep for "
            "slices left over"
        )


class Batches:
    """A data iterator that gives what a microbatch's first slice has drawn to all of its slices.

    Args:
        source: Megatron's iterator of one model chunk.

    Attributes:
        whole: no microbatch of the step is cut.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.whole = False
        self._drawn: list[Any] = []
        self._place, self._first = 0, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.whole:
            return next(self.source)
        if self._first:
            self._drawn, self._first = [], False
        if self._place == len(self._drawn):
            self._drawn.append(next(self.source))
        self._place += 1
        batch = self._drawn[self._place - 1]
        # A shallow copy: what a script takes out of a batch stays in it for the next slice.
        return dict(batch) if isinstance(batch, dict) else batch

    def begin(self, unit: Unit) -> None:
        """The next draws are those of a slice. Until the first slice draws, what was drawn stays:
        a pass that is run again may get its batch from elsewhere, and the next slice not."""
        self._place, self._first = 0, not unit.slice


class SliceRunner(MegatronRunner):
    """F, B and W of slices: a unit stands in the place of a microbatch."""

    def __init__(
        self,
        *args: Any,
        slicing: Slicing,
        cuts: Cuts,
        batches: Any,
        unknown: bool = False,
        **more: Any,
    ) -> None:
        self._slicing, self._cuts, self._batches = slicing, cuts, batches
        self._unknown = unknown
        self._reported: list[tuple[int, Any]] = []  # (slice, of the loss function) of a microbatch
        super().__init__(*args, **more)  # may make what asks for spans

    def forward_step_func(self, chunk: int, microbatch: int) -> Callable[..., Any]:
        found = super().forward_step_func(chunk, microbatch)
        # Not of the first slice, for which the data set may draw.
        if self._unknown and _unit(microbatch).slice == 1:
            self._slicing.draws = Draws(device_of(self._it.models), python=True)
        last = self.computes_loss(self.placement.stages[self._rank][chunk])
        # Once a step: the loss function may have been chosen by the step.
        checks = self._unknown and last and not microbatch
        return with_loss_function(found, _linear) if checks else found

    def forward_step(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> tuple[Any, Any]:
        unit, before = _unit(microbatch), len(self.losses)
        self.before_batch(chunk, microbatch)
        counting = self._mover or self._observer
        self._slicing.stays = None if counting is None else counting.stays
        with self._slicing.at(self._cuts, chunk, unit, first=True):
            found = super().forward_step(chunk, microbatch, x)
            _require_attention(self._it.models[chunk], self._slicing.calls(carry.KEYS))
        if len(self.losses) > before:
            self.reported(unit)
        return found

    def before_batch(self, chunk: int, microbatch: int) -> None:
        batches = self._batches[chunk]
        if batches is not None:
            batches.begin(_unit(microbatch))

    def span(self, chunk: int, microbatch: int, tokens: int) -> tuple[int, int]:
        unit = _unit(microbatch)
        ends = self._cuts.of(unit.microbatch, tokens).ends
        return (ends[unit.slice - 1] if unit.slice else 0), ends[unit.slice]

    def of_whole(self, chunk: int, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        unit = _unit(microbatch)
        tokens = self._cuts.get(chunk, unit.microbatch).ends[-1]
        begin, end = self.span(chunk, unit, tokens)
        return torch.nn.functional.pad(losses, (begin, tokens - end))

    def reported(self, microbatch: int) -> None:
        unit, parts = _unit(microbatch), self._reported
        parts.append((unit.slice, self.losses.pop()))
        last = self.placement.chunk_of(self.placement.num_stages - 1)
        if len(parts) == len(self._cuts.get(last, unit.microbatch).ends):
            # From first to last, whether losses come in F or in B.
            every = (part for _, part in sorted(parts, key=lambda one: one[0]))
            self.losses.append(functools.reduce(added, every))
            parts.clear()

    def count(self, microbatch: int, num_tokens: Any) -> None:
        # Every slice's loss function counts the tokens of the whole microbatch.
        if not _unit(microbatch).slice:
            super().count(microbatch, num_tokens)

    def live_sets(self) -> float:
        if self.sizes:
            return super().live_sets()
        away = {*self._mover.on_host()} if self._mover else ()
        held = (key for key in self._live if key not in away)
        return sum(self._cuts.share(chunk, _unit(unit)) for chunk, unit in held)

    def number(self, microbatch: int) -> int:
        return _unit(microbatch).microbatch

    @contextlib.contextmanager
    def backpropagating(self, of: BackwardPass) -> Iterator[None]:
        unit = _unit(of.microbatch)
        with self._slicing.at(self._cuts, of.chunk, unit, first=False), super().backpropagating(of):
            yield
        if not unit.slice:
            self._slicing.ended(of.chunk, unit.microbatch)

    def weight(self, chunk: int, microbatch: int) -> None:
        unit = _unit(microbatch)
        cut = self._cuts.get(chunk, unit.microbatch)
        if not cut.joined:
            super().weight(chunk, unit)
            return
        # Those of its microbatch; W is named after the first one, whose B was the last.
        every = [Unit(unit + k, unit.microbatch, k) for k in range(len(cut.ends))]
        self._store.join([(chunk, one) for one in every])
        super().weight(chunk, unit)
        for one in every[1:]:
            self._finished(chunk, one)

    def _is_last(self, microbatch: int) -> bool:
        unit = _unit(microbatch)
        return unit.microbatch == self._it.num_microbatches - 1 and not unit.slice


def _linear(output: torch.Tensor, loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer's loss function, which must give 0 for losses of 0, which all tokens outside of a
    slice have, and for a whole sequence the sum of what it gives for its parts.

    Raises:
        ConfigError: it does not, so that sums over slices would be another loss.
    """
    ones = torch.ones_like(output)
    half = ones.clone()
    half[..., ::2] = 0  # alternating, since masks may leave out a whole part
    with torch.no_grad():
        (loss, *_, none), (whole, *_, some), *parts = (
            loss_function(losses.clone()) for losses in (0 * ones, ones, half, ones - half)
        )
    require(LINEAR, not bool(loss != 0), found=f"for losses of 0 it gives {float(loss):g}")
    halves, whole = [float(part) for part, *_ in parts], float(whole)
    found = f"of two halves it gives {halves[0]:g} and {halves[1]:g}, of both {whole:g}"
    require(LINEAR, math.isclose(sum(halves), whole, rel_tol=_ROUNDING), found=found)
    _require_sums(none, some)
    return loss_function


def _require_sums(none: Any, some: Any) -> None:
    """What is reported of losses of 0, and of 1, must be what ``added`` adds right.

    Raises:
        ConfigError: slices would add a number that is no sum of losses, or keep one that is.
    """
    for name, value in none.items() if isinstance(none, dict) else ():
        if not isinstance(value, torch.Tensor | float | int):
            continue
        found, other = (torch.as_tensor(of).reshape(-1) for of in (value, some[name]))
        pair = isinstance(value, torch.Tensor) and len(found) == 2
        wrong = found[: 1 if pair else None].any() or (pair and found[1] != other[1])
        require(SUMS, not wrong, name=name)


def _require_attention(model: Any, attentions: int) -> None:
    """Every layer that attends has met the hook: else its slices would attend to themselves only.

    Raises:
        ConfigError: some have not, or the model is of another kind.
    """
    layers = getattr(getattr(unwrapped(model), "decoder", None), "layers", None)
    kinds = [type(getattr(layer, "self_attention", None)).__name__ for layer in layers or ()]
    expected = sum(kind not in ("NoneType", "IdentityOp") for kind in kinds)
    names = ", ".join(dict.fromkeys(kinds)) or "none"
    found = f"{attentions} of {expected} layers have it ({names})"
    require(CAUSAL, layers is not None and attentions >= expected, found=found)


def _unit(number: int) -> Unit:
    assert isinstance(number, Unit), number
    return number


def added(one: Any, other: Any) -> Any:
    """What a script reports of two slices of a microbatch: sums; (sum, tokens) pairs keep the
    tokens, which each counts for the whole.

    Raises:
        ConfigError: another form than those of Megatron's scripts.
    """
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {name: _added(one[name], other[name]) for name in one}
    kind = type(one).__name__
    raise ConfigError(f"slices need reports by name in a dictionary, but the loss reported {kind}")


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, torch.Tensor) and one.numel() == 2:
        pair = one.reshape(-1).clone()
        pair[0] += other.reshape(-1)[0]
        return pair.view_as(one)
    return one + other
