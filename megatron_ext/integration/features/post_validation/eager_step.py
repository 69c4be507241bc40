"""One optimizer step before it is known to be right, and its exact undoing (ZB, section 4).

Megatron's ``ChainedOptimizer.step`` reduces found-inf flags and squared gradient norms over all
pipeline ranks before any of them may step. Here its own code runs with those reductions confined
to one pipeline stage; the sums travel along the pipeline. A step that turns out wrong is undone by
copies, bit for bit, and done again by Megatron's code with its own reductions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...rules import Rule
from ...utils import gather

# Sums along the pipeline and Megatron's reduction round differently. Where the difference could
# decide whether gradients are clipped, Megatron's is asked.
_ROUNDING = 1e-5

PIPELINES = Rule(
    "--pp-post-validation needs gradient statistics that are reduced over whole pipelines",
    "they are reduced over ranks {members}, and the pipelines of a stage's ranks are {line}",
    "drop it",
)

_FOUND, _SQUARES, _ZEROS = range(3)
_FIELDS = 3


class StageGroups:
    """For each optimizer of the chain, the ranks of this stage that its statistics are summed over.

    Making it is collective over the job.

    Raises:
        ConfigError: the groups do not lie along pipelines.
    """

    def __init__(self, optimizers: Sequence[Any], pipeline: Any) -> None:
        peers = dist.get_process_group_ranks(pipeline)
        mine = pipeline.rank(), [_name(optimizer) for optimizer in optimizers]
        reduced = [
            dist.get_process_group_ranks(optimizer.get_grad_stats_parallel_group())
            for optimizer in optimizers
        ]
        every = gather((*mine, reduced, peers))
        stages = [entry[0] for entry in every]
        for position, _, ranks, line in every:
            for members in ranks:
                here = [r for r in members if stages[r] == position]
                along = sorted(peer for r in here for peer in every[r][3])
                PIPELINES.require(along == sorted(members), members=members, line=line)
        wanted = {
            tuple(r for r in members if stages[r] == position)
            for position, _, ranks, _ in every
            for members in ranks
        }
        wanted |= {tuple(r for r, s in enumerate(stages) if s == stage) for stage in set(stages)}
        made: dict[tuple[int, ...], Any] = {
            ranks: dist.new_group(list(ranks)) for ranks in sorted(wanted)
        }
        self.groups = [
            made[tuple(r for r in members if stages[r] == mine[0])] for members in reduced
        ]
        self.stage = made[tuple(r for r, s in enumerate(stages) if s == mine[0])]
        # Ranks may lack an optimizer that others have, e.g. the one of experts.
        self.names = sorted({name for entry in every for name in _numbered(entry[1])})
        self.mine = _numbered(mine[1])

    @property
    def size(self) -> int:
        """Numbers that travel along the pipeline."""
        return max(len(self.names), 1) * _FIELDS

    def place(self, optimizer: int) -> int:
        """Where the numbers of this rank's ``optimizer`` start."""
        return self.names.index(self.mine[optimizer]) * _FIELDS


class EagerStep:
    """One step of Megatron's chained optimizer.

    Args:
        device: where their statistics are reduced.
    """

    def __init__(self, optimizer: Any, groups: StageGroups, device: torch.device) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._parts: list[Any] = optimizer.chained_optimizers
        self._config = optimizer.config
        self._device = device
        self._scalers = [
            (scaler, dict(vars(scaler)))
            for part in self._parts
            if (scaler := getattr(part, "grad_scaler", None)) is not None
        ]
        self._copies: Copies | None = None

    @torch.no_grad()
    def statistics(self) -> torch.Tensor:
        """Prepare the gradients; this stage's part of what all ranks have to know, in float64."""
        numbers = torch.zeros(self._groups.size, dtype=torch.float64)
        with self._confined():
            for index, part in enumerate(self._parts):
                at = self._groups.place(index)
                numbers[at + _FOUND] = float(part.prepare_grads())
                if not numbers[at + _FOUND]:
                    norm = float(part.get_grad_norm())
                    numbers[at + _SQUARES] = norm**2 if math.isfinite(norm) else math.inf
                    if self._config.log_num_zeros_in_grad:
                        numbers[at + _ZEROS] = float(part.count_zeros())
        # The same numbers on all ranks of the stage, whichever copy of a parameter they have:
        # what is decided by them has to be decided alike.
        numbers = numbers.to(self._device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._groups.stage)
        return numbers

    def combine(self, mine: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """The statistics of two sets of ranks together."""
        if before is None:
            return mine
        both = mine + before
        found = slice(_FOUND, None, _FIELDS)
        both[found] = torch.maximum(mine[found], before[found])
        return both

    def is_plain(self, numbers: torch.Tensor) -> bool:
        """True if by these statistics gradients are neither refused nor clipped."""
        values = numbers.tolist()
        if any(values[_FOUND::_FIELDS]):
            return False
        norm = math.sqrt(sum(values[_SQUARES::_FIELDS])) * (1 + _ROUNDING)
        limits = [getattr(self._config, "grad_norm_skip_threshold", math.inf)]
        if self._config.clip_grad > 0:
            limits.append(self._config.clip_grad - 2e-6)
        return math.isfinite(norm) and all(norm <= limit for limit in limits)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters; what they were is kept."""
        self._copies = Copies(self._parts)
        with self._confined():
            self._optimizer.step_with_ready_grads()

    @torch.no_grad()
    def accept(self, numbers: torch.Tensor) -> tuple[bool, Any, int | None]:
        """It was right; what ``ChainedOptimizer.step`` returns.

        The gradient norm is Megatron's to the last bit, for the log: all ranks are at the same
        point now, where it reduces other things for the log as well.

        Raises:
            RuntimeError: it is another one than the step was validated by.
        """
        self._copies = None
        values = numbers.tolist()
        zeros = round(sum(values[_ZEROS::_FIELDS]))
        norm = self._optimizer.get_grad_norm()
        travelled = math.sqrt(sum(values[_SQUARES::_FIELDS]))
        if not math.isclose(norm, travelled, rel_tol=100 * _ROUNDING, abs_tol=1e-30):
            raise RuntimeError(
                f"a step was validated by the gradient norm {travelled}, but it is {float(norm)}; "
                "drop --pp-post-validation and please report this"
            )
        return True, norm, zeros if self._config.log_num_zeros_in_grad else None

    @torch.no_grad()
    def redo(self, step: Any, numbers: torch.Tensor) -> tuple[bool, Any, Any]:
        """It was wrong: as if it had never happened, and then Megatron's own ``step``.

        The gradients are prepared already; to do that again would unscale them twice.
        """
        stepped = self._copies is not None
        if self._copies is not None:
            self._copies.restore()
            self._copies = None
        values = numbers.tolist()
        flags = [values[self._groups.place(i) + _FOUND] > 0 for i in range(len(self._parts))]
        found = any(values[_FOUND::_FIELDS])

        def prepared() -> bool:
            for scaler, before in self._scalers:
                vars(scaler).update(before)
            for part, flag in zip(self._parts, flags):
                if getattr(part, "grad_scaler", None) is not None:
                    part.found_inf.fill_(float(flag))
                    part.grad_scaler.update(flag)
            return found

        self._optimizer.prepare_grads = prepared
        try:
            result: tuple[bool, Any, Any] = step(self._optimizer)
        finally:
            del self._optimizer.prepare_grads
        if stepped and not result[0]:
            self._old_parameters_into_model()
        return result

    def _old_parameters_into_model(self) -> None:
        """The model's own parameters follow the optimizer's, as after a step."""
        for part in self._parts:
            if not getattr(part, "is_stub_optimizer", False):
                if hasattr(part, "_copy_main_params_to_model_params"):
                    part._copy_main_params_to_model_params()
                if hasattr(part, "ddp_config") and not part.ddp_config.overlap_param_gather:
                    for chunk in part.model_chunks:
                        chunk.start_param_sync(force_sync=True)

    @contextlib.contextmanager
    def _confined(self) -> Iterator[None]:
        """Megatron's code reduces statistics over the stage only, and times nothing: a timer may
        have a barrier, at which ranks of other stages are not."""
        configs = [self._config, *(part.config for part in self._parts)]
        timers = [config.timers for config in configs]
        for config in configs:
            config.timers = None
        for part, group in zip(self._parts, self._groups.groups):
            part.get_grad_stats_parallel_group = lambda group=group: group
        try:
            yield
        finally:
            for part in self._parts:
                del part.get_grad_stats_parallel_group
            for config, kept in zip(configs, timers):
                config.timers = kept


class Copies:
    """What the members of a chain had before their step: parameters, state and settings.

    Args:
        parts: optimizers, each with ``optimizer``, torch's or Apex's.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        owners = [part.optimizer for part in parts if part.optimizer is not None]
        self._tensors: list[torch.Tensor] = []
        self._others: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for owner in owners:
            for group in owner.param_groups:
                self._keep({k: v for k, v in group.items() if k != "params"}, group)
                for parameter in group["params"]:
                    self._tensors.append(parameter.data)
                    if parameter in owner.state:
                        self._keep(owner.state[parameter], owner.state[parameter])
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        _copy(self._copies, self._tensors)

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        _copy(self._tensors, self._copies)
        for holder, before in self._others:
            holder.update(before)

    def _keep(self, values: dict[Any, Any], holder: dict[Any, Any]) -> None:
        for value in values.values():
            if isinstance(value, torch.Tensor):
                self._tensors.append(value)
        self._others.append((holder, dict(values)))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def _name(optimizer: Any) -> str:
    """Dense or experts, by which the optimizers of two ranks correspond."""
    groups = getattr(optimizer, "param_groups", ())
    return "experts" if any(g.get("is_expert_parallel") for g in groups) else "dense"


def _numbered(names: Sequence[str]) -> list[str]:
    return [f"{name} {names[:i].count(name)}" for i, name in enumerate(names)]
