"""Writes measured iterations into the directory of ``--pp-trace``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...runtime import files
from ...runtime.trace import Recorder, TraceFile
from ...schedule.effects import peak_sets
from ...schedule.io import save
from ...schedule.schedule import Schedule
from ...view.recorded import plan_file
from ..utils import map_tensors
from .offload.runtime import Offloading


class Traces:
    """This rank's file, and the plans that its iterations follow.

    Args:
        directory: None: nothing is written.
    """

    def __init__(self, directory: str | None) -> None:
        self.directory = directory
        self._file: TraceFile | None = None
        self._iterations = {False: 0, True: 0}  # of training, and forward only
        self._plans: list[Schedule] = []

    def write(
        self,
        plan: Schedule,
        rank: int,
        recorder: Recorder,
        losses: list[Any],
        offloading: Offloading | None,
        wgrad: Any,
        forward_only: bool,
    ) -> None:
        """One iteration, if it is due.

        Args:
            plan: lowered.
            rank: of this process in the pipeline.
            recorder: its times.
            losses: what the loss reported.
            offloading: of this iteration, or None.
            wgrad: which layers split their backward pass.
            forward_only: it is an evaluation.
        """
        self._iterations[forward_only] += 1
        if self.directory is None:
            return
        new = not any(plan is known for known in self._plans)
        if not (new or TraceFile.due(self._iterations[forward_only])):
            return
        if self._file is None:
            self._file = TraceFile(self.directory, f"rank{dist.get_rank()}")
        if new:
            self._plans.append(plan)
            if dist.get_rank() == 0 and not forward_only:
                path = self._file.directory / plan_file(plan.fingerprint())
                files.create(path).close()  # its own, whatever lay there
                save(plan.unlowered(), path)
        self._file.write(
            {
                "schedule": plan.name,
                "plan": plan.fingerprint(),
                "pipeline_rank": rank,
                "iteration": self._iterations[False],
                "microbatches": plan.microbatches,
                "forward_only": forward_only,
                "peak_sets": recorder.peak_sets,
                "peak_sets_planned": 0 if forward_only else peak_sets(plan.ranks)[rank],
                "zero_unix_us": recorder.zero_unix_us,
                "waited_us": recorder.waited_us,
                "wgrad": wgrad,
                "losses": map_tensors(losses, _exact),
                "offload": None if offloading is None else offloading.summary(plan, rank),
                "events": recorder.events(),
            }
        )


def _exact(tensor: torch.Tensor) -> list[str]:
    """A tensor's values as hexadecimal floats: comparable bit for bit."""
    return [float(x).hex() for x in tensor.detach().flatten().tolist()]
