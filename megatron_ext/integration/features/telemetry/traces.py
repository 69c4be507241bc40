"""Measured iterations, written to the directory of ``--pp-trace``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ....runtime import files
from ....runtime.trace import TraceFile
from ....schedule.io import save
from ....schedule.schedule import Schedule
from ....view.recorded import plan_file
from ...callbacks import Callback, Step


class Traces(Callback):
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

    def times(self, training: bool) -> bool:
        return True

    def end(self, step: Step) -> None:
        """Take the iteration's times, if it is due."""
        self._line = None
        self._iterations[step.training] += 1
        plan, recorder = step.plan, step.recorder
        new = plan.fingerprint() not in self._known
        if not (new or TraceFile.due(self._iterations[step.training])):
            return
        if self._file is None:
            self._file = TraceFile(self._directory, f"rank{dist.get_rank()}")
        if new:
            self._known.add(plan.fingerprint())
            if dist.get_rank() == 0 and step.training:
                path = self._file.directory / plan_file(plan.fingerprint())
                files.create(path).close()  # its own, whatever lay there
                save(plan.unlowered(), path)
        self._line = {
            "schedule": plan.name,
            "plan": plan.fingerprint(),
            "pipeline_rank": step.rank,
            "iteration": self._iterations[True],
            "microbatches": plan.microbatches,
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

    def returning(self, step: Step) -> None:
        """Write the iteration with its losses."""
        if self._line is not None:
            assert self._file is not None
            self._file.write({**self._line, "losses": exact(step.losses)})


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
