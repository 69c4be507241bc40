"""PipeOffload inside Megatron: activation sets are moved as the schedule says.

See docs/concepts/offload-runtime.md.

The first step is also a measurement: of the bytes of a set, and, without ``--pp-offload-time``, of
the time of passes and copies. From the second step on the plan is made for these, and the host
arena has exactly the size that the plan needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ....schedule.actions import Op
from ....schedule.effects import passes
from ....schedule.link import Link
from ....schedule.passes.check import CheckReport, check
from ....schedule.schedule import Schedule
from ... import saved_parameters
from ...callbacks import Callback, Duration, PlanInputs, Step
from ...hooks import Hook
from ...offload_request import OffloadRequest
from . import measure
from .measure import TransferSetup
from .policy import OffloadPolicy, keep_nothing
from .sets import Key, RankSets, as_config_error, least_bytes

logger = logging.getLogger(__name__)

# Until it is measured: fast enough to keep memory low, and late copies only cost the first step.
_ASSUMED = "0.25"


class Offloading(Callback):
    """Moves the activation sets of one rank in every training step (a ``Mover``).

    Args:
        request: of the flags; None if a schedule file decides everything.
        inputs: of plans; gets the link.
        trace: count bytes of the sets that stay, too.
        policy: which tensors of a set stay on the device.
    """

    def __init__(
        self,
        request: OffloadRequest | None,
        link: Link | None,
        inputs: PlanInputs,
        trace: bool = False,
        policy: OffloadPolicy = keep_nothing,
    ) -> None:
        self._request, self._inputs, self._trace, self._policy = request, inputs, trace, policy
        inputs.link = link
        self._assumed = request is not None and not request.known
        inputs.steps_to_measure = int(self._assumed)
        self._setup: TransferSetup | None = None
        self._sets: RankSets | None = None
        self._plan: tuple[Schedule, frozenset[Key]] | None = None
        self._checked: tuple[Schedule, CheckReport] | None = None
        self._saved: set[Key] = set()
        self._steps = 0

    # --- events ---

    def hooks(self) -> Sequence[Hook]:
        return saved_parameters.hooks()  # once for all models

    def before_plan(self, step: Step) -> None:
        """The first time, measure the link and agree on the transfer policy.

        Raises:
            ConfigError: the policy does not fit the machine.
        """
        if not step.training or self._setup is not None:
            return
        group, groups = step.call.group, step.call.groups
        device = step.call.device
        file_link = None
        if self._request is None:
            file_link = self._inputs.link
            assert file_link is not None
            requested: str | None = file_link.policy
        else:
            requested = self._request.policy
        with as_config_error():
            self._setup = measure.choose_transfers(
                requested, self._assumed, device, groups, file_link
            )
        if self._request is not None:
            link = self._request.link(group.size()) or Link.of(group.size(), _ASSUMED)
            self._inputs.link = self._setup.applied_to(link)

    def planned(self, plan: Schedule) -> None:
        if dist.get_rank() == 0:
            logger.info("%s", self._describe(plan))

    def begin(self, step: Step) -> None:
        """Make room for a plan that is new.

        Raises:
            ConfigError: the host lacks the memory.
        """
        if not step.training:
            return
        plan, rank = step.plan, step.rank
        self._saved.clear()
        if self._plan is None or plan is not self._plan[0]:
            self._plan = (
                plan,
                frozenset(
                    (plan.placement.chunk_of(a.stage), a.microbatch)
                    for a in passes(plan.ranks[rank])
                    if a.op is Op.OFFLOAD
                ),
            )
            if self._sets is not None:
                self._sets.fit(plan, rank, step.call.groups)
        if self._sets is None:
            assert self._setup is not None
            peaks = self._report(plan).peak_host_sets
            models, config = step.call.iteration.models, step.call.iteration.config
            self._sets = RankSets(
                self._setup,
                models,
                self._policy,
                peaks[rank] if peaks else 0,
                least_bytes(models, config, step.shape, self._policy),
                step.call.groups,
            )
        self._sets.store.reset_peaks()
        step.mover = self
        step.notes["offload"] = lambda: self._summary(plan, rank)
        step.notes["set_bytes"] = self._set_bytes
        step.notes["host_rates"] = self._rates

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

    def dropped(self, step: Step, failed: bool) -> None:
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
        return self._plan is not None and key in self._plan[1]

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

    def _set_bytes(self) -> dict[int, int]:
        """By model chunk, device bytes of a set from F to B if it is not offloaded."""
        assert self._sets is not None
        return self._sets.of_chunks(lambda footprint: footprint.device)

    def _rates(self) -> tuple[float, float] | None:
        """Bytes/s to the host and back; None if they were not measured."""
        return None if self._setup is None else self._setup.bytes_per_second()

    def _report(self, plan: Schedule) -> CheckReport:
        if self._checked is None or self._checked[0] is not plan:
            self._checked = plan, check(plan)
        return self._checked[1]

    def _summary(self, plan: Schedule, rank: int) -> dict[str, Any]:
        """Planned and measured numbers of the step, for the trace."""
        assert self._sets is not None and self._setup is not None
        peaks = self._report(plan).peak_host_sets
        return {
            **self._sets.store.report(),
            "policy": self._setup.policy.value,
            "planned_host_sets": peaks[rank] if peaks else 0,
            "planned_device_bytes": self._sets.device_bytes(plan, rank),
        }

    def _describe(self, plan: Schedule) -> str:
        """One sentence for the log: sets that are offloaded, rates and peaks."""
        link = self._inputs.link
        assert self._setup is not None and link is not None
        report = self._report(plan)
        sets = plan.pp * plan.chunks * len(plan.units)
        return (
            f"offload{', until it is measured' if self._assumed else ''}: "
            f"{sum(report.offloaded_sets)} of {sets} activation sets a step are offloaded; at "
            f"most {float(max(plan.peak_activation())):.4g} microbatches on a device, "
            f"{float(max(plan.peak_host_activation())):.4g} of a rank on the host; "
            "transfer "
            f"{self._setup.policy.value} ({self._setup.why}); one set of each stage "
            f"takes so much of its chunk's F+B+W each way "
            f"({'assumed' if self._assumed else 'known'}): --pp-offload-time {link.text}"
        )
