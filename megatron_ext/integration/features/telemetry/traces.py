"""Measured iterations, written to the directory of ``--pp-trace``."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ....runtime import files
from ....runtime.trace import TraceFile
from ....schedule.io import save
from ....schedule.schedule import Arrangement, Schedule
from ....view.recorded import plan_file
from ...callbacks import Step


class Traces:
    """This rank's file, and the plans that its iterations follow.

    Args:
        directory: for all ranks; made if it is missing.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: TraceFile | None = None
        self._iterations = {False: 0, True: 0}  # of evaluation, and of training
        self._known: set[str] = set()  # fingerprints of plans
        self._line: dict[str, Any] | None = None

    def take(self, step: Step) -> None:
        """Take the iteration's times, if it is due."""
        self._line = None
        self._iterations[step.training] += 1
        plan, recorder = step.plan, step.recorder
        name = _name(step)
        new = name not in self._known
        # With nearly every step's own plan new ones are no reason to write.
        due = TraceFile.due(self._iterations[step.training])
        if not (due or (new and not _planned_for_lengths(step))):
            return
        if self._file is None:
            self._file = TraceFile(self._directory, f"rank{dist.get_rank()}")
        if new:
            self._known.add(name)
            if dist.get_rank() == 0 and step.training:
                path = self._file.directory / plan_file(name)
                files.create(path).close()  # its own, whatever lay there
                save(_as_run(step).unlowered(), path)
        self._line = {
            "schedule": plan.name,
            "plan": name,
            "pipeline_rank": step.rank,
            "iteration": self._iterations[True],
            "microbatches": plan.microbatches,
            **_lengths(step),
            "forward_only": not step.training,
            "peak_sets": recorder.peak_sets,
            "peak_sets_planned": _planned_sets(plan, step.rank) if step.training else 0,
            "machine": recorder.machine,
            "zero_unix_us": recorder.zero_unix_us,
            "waited_us": recorder.waited_us,
            "wgrad": step.note("wgrad"),
            "losses": [],
            "offload": step.note("offload"),
            "events": recorder.events(),
        }

    def write(self, losses: object) -> None:
        """Write the iteration that was taken, with its losses."""
        if self._line is not None:
            assert self._file is not None
            self._file.write({**self._line, "losses": exact(losses)})


def _planned_for_lengths(step: Step) -> bool:
    return step.loads is not None and bool(step.loads.units)


def _as_run(step: Step) -> Schedule:
    """The step's plan, with the numbers of the microbatches that were in its places."""
    if step.loads is None or not step.loads.free:
        return step.plan
    return replace(step.plan, arrangement=Arrangement(step.loads.order, None))


def _name(step: Step) -> str:
    """Of the plan's file: its fingerprint, or one that holds for its microbatches' lengths, too."""
    found = step.plan.fingerprint()
    if not _planned_for_lengths(step):
        return found
    what = repr((found, step.loads))
    return hashlib.sha256(what.encode()).hexdigest()[: len(found)]


def _lengths(step: Step) -> dict[str, Any]:
    """Tokens of every microbatch, and its number in every place, where they were read."""
    if step.loads is None:
        return {}
    return {"tokens": step.loads.tokens, "microbatch_order": step.loads.order}


def exact(value: Any) -> Any:
    """What a loss function returned, for JSON: a tensor by its values as hexadecimal floats, which
    compare bit for bit; an object of any other class by the name of its class."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().values() if value.is_nested else value.detach().to_dense()
        return [_hex(x) for x in dense.flatten().tolist()]
    if isinstance(value, dict):
        return {str(k): exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [exact(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def _hex(number: complex) -> str:
    return repr(number) if isinstance(number, complex) else float(number).hex()


def _planned_sets(plan: Schedule, rank: int) -> float:
    """Of whole microbatches; a whole number where they are not cut."""
    sets = plan.peak_activation()[rank] * plan.chunks
    return int(sets) if sets.denominator == 1 else float(sets)
