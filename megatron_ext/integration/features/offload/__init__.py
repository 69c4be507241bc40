"""``--pp-offload``: PipeOffload, activation sets on the host between forward and backward.

See docs/concepts/offload-runtime.md. The first step is also a measurement: of the bytes of a set,
and of the time of passes and copies. From the second step on the
plan is made for these, and the host arena has exactly the size that the plan needs.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ....schedule.actions import Op
from ....schedule.link import Link
from ....schedule.schedule import Schedule
from ... import saved_parameters
from ...callbacks import Callback, Duration, Step
from ...feature import Feature, Flag, Run
from ...hooks import Hook
from . import measure
from .measure import TransferSetup
from .planned import Planned
from .policy import policy_of
from .sets import Key, RankSets, as_config_error, least_bytes

logger = logging.getLogger(__name__)

# Until it is measured: fast enough to keep memory low, and late copies only cost the first step.
_ASSUMED = "0.25"


def _wanted(text: str) -> str:
    """The flag's value."""
    if text not in ("off", "half", "full", "auto") and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(
            f"must be one of off, half, full, auto, or a number of chunks, got {text!r}"
        )
    return text


class Offload(Feature):
    """On with ``--pp-offload`` or a schedule file that offloads: moves the
    activation sets of one rank in every training step (a ``Mover``)."""

    per_model = True

    flags = (
        Flag(
            "--pp-offload",
            "keep activations in host memory between forward and backward pass: of half of each "
            "rank's model chunks (rounded up), of all, (auto) as many as lower the peak without a "
            "wait, or of N chunks, those with the longest lifespan",
            "{off,half,full,auto,N}",
            _wanted,
        ),
        Flag(
            "--pp-offload-policy",
            "which tensors of an offloaded set stay on the device: all are offloaded (default), "
            "keep-attention-inputs, or your own function that returns True for tensors to keep",
            "{all,keep-attention-inputs,MODULE:FUNCTION}",
        ),
    )

    def check_flags(self, run: Run) -> None:
        policy = run.args.pp_offload_policy
        if policy is None or run.request is None:
            return
        policy_of(policy)

    def start(self, run: Run) -> Sequence[Callback]:
        request = run.request
        if request is None or not request.offloads:
            return ()
        # A schedule file decides everything.
        self._assumed = request.offload is not None
        self._inputs, self._trace = run.inputs, run.args.pp_trace is not None
        self._policy = policy_of(run.args.pp_offload_policy or "all")
        self._inputs.link = None if request.file is None else request.file.link
        self._inputs.steps_to_measure = int(self._assumed)
        self._setup: TransferSetup | None = None
        self._sets: RankSets | None = None
        self._latest: Planned | None = None
        self._now: Planned | None = None  # of the step that runs
        self._offloaded: frozenset[Key] = frozenset()  # in that step
        self._saved: set[Key] = set()
        self._steps = 0
        return (self,)

    # --- events ---

    def hooks(self) -> Sequence[Hook]:
        return saved_parameters.hooks()  # once for all models

    def before_plan(self, step: Step) -> None:
        """The first time, measure the link.

        Raises:
            ConfigError: the host lacks the memory.
        """
        if not step.training or self._setup is not None:
            return
        group = step.call.group
        with as_config_error():
            self._setup = TransferSetup.of(self._assumed, step.call.device, group)
        if self._assumed:
            self._inputs.link = Link.of(group.size(), _ASSUMED)

    def planned(self, plan: Schedule) -> None:
        if dist.get_rank() == 0:
            link = self._inputs.link
            assert link is not None
            logger.info("%s", self._of(plan).text(link, self._assumed))

    def begin(self, step: Step) -> None:
        """Make room for a plan that is new.

        Raises:
            ConfigError: the host lacks the memory.
        """
        if not step.training:
            return
        plan, rank = step.plan, step.rank
        self._saved.clear()
        planned = self._of(plan)
        if planned is not self._now:
            self._now, self._offloaded = planned, planned.offloaded(rank)
            if self._sets is not None:
                self._sets.fit(plan, rank, step.call.groups)
        if self._sets is None:
            assert self._setup is not None
            models, config = step.call.iteration.models, step.call.iteration.config
            self._sets = RankSets(
                self._setup,
                models,
                self._policy,
                planned.host_sets(rank),
                least_bytes(models, config, step.shape, self._policy),
                step.call.groups,
            )
        self._sets.store.reset_peaks()
        step.mover = self
        step.notes["offload"] = lambda: self._summary(planned, rank)

    def end(self, step: Step) -> None:
        """Adapt the arena to what the step showed.

        Raises:
            RuntimeError: a set was never finished.
        """
        if not step.training:
            return
        assert self._sets is not None
        self._sets.store.end_step()
        self._steps += 1
        if self._steps == 1 and not self._assumed:
            self._sets.fit(step.plan, step.rank, step.call.groups)
        elif self._steps > 1:
            self._sets.enlarge(step.plan, step.rank)

    def profiled(self, step: Step, durations: Sequence[Duration]) -> None:
        """Plan with measured transfer times from now on, if they were assumed so far."""
        if not self._assumed:
            return
        assert self._setup is not None and self._sets is not None
        bytes_of = self._sets.of_chunks(lambda footprint: footprint.host)
        self._inputs.link = measure.link(
            self._setup, step.plan.placement, step.rank, durations, bytes_of, step.call.groups
        )
        self._assumed = False

    def dropped(self, step: Step) -> None:
        if self._sets is not None:
            self._sets.store.clear()

    def close(self) -> None:
        if self._sets is not None:
            self._sets.close()
            self._sets = None
        elif self._setup is not None:
            self._setup.close()
        self._setup = None

    # --- for the runner ---

    def saving(self, key: Key) -> AbstractContextManager[None]:
        if not (self.will_offload(key) or self._trace or self._steps == 0):
            return nullcontext()
        return self._save(key)

    def move(self, op: Op, key: Key) -> None:
        assert self._sets is not None
        self._sets.move(op, key)

    def finish(self, key: Key) -> None:
        if key in self._saved:
            assert self._sets is not None
            self._saved.remove(key)
            self._sets.store.finish(key)

    def will_offload(self, key: Key) -> bool:
        return key in self._offloaded

    def stays(self, tensor: torch.Tensor) -> None:
        if self._sets is not None:
            self._sets.store.stays(tensor)

    def on_host(self) -> list[Any]:
        return [] if self._sets is None else self._sets.store.away()

    # --- the rest ---

    @contextmanager
    def _save(self, key: Key) -> Iterator[None]:
        assert self._sets is not None
        with self._sets.saving(key):
            yield
        self._saved.add(key)

    def _of(self, plan: Schedule) -> Planned:
        if self._latest is None or self._latest.plan is not plan:
            self._latest = Planned(plan)
        return self._latest

    def _summary(self, planned: Planned, rank: int) -> dict[str, Any]:
        """Planned and measured numbers of the step, for the trace."""
        assert self._sets is not None
        return {
            **self._sets.store.report(),
            "planned_host_sets": planned.host_sets(rank),
            "planned_device_bytes": self._sets.device_bytes(planned.plan, rank),
        }
