"""A plan that offloads: its sets, and what the log says of it."""

from __future__ import annotations

import functools

from ....schedule.actions import Op
from ....schedule.effects import passes
from ....schedule.link import Link
from ....schedule.passes.check import CheckReport, check
from ....schedule.schedule import Schedule
from .sets import Key


class Planned:
    """A plan, checked at the first use of what the check says."""

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan

    @functools.cached_property
    def _report(self) -> CheckReport:
        return check(self.plan)

    def offloaded(self, rank: int) -> frozenset[Key]:
        """The sets of a rank that are offloaded."""
        chunk_of = self.plan.placement.chunk_of
        row = passes(self.plan.ranks[rank])
        return frozenset((chunk_of(a.stage), a.microbatch) for a in row if a.op is Op.OFFLOAD)

    def host_sets(self, rank: int) -> int:
        """Most sets of a rank on the host at once."""
        peaks = self._report.peak_host_sets
        return peaks[rank] if peaks else 0

    def text(self, link: Link, assumed: bool) -> str:
        """One sentence for the log: sets that are offloaded, rates and peaks.

        Args:
            assumed: the link's times are not known yet.
        """
        plan = self.plan
        sets = plan.pp * plan.chunks * len(plan.units)
        return (
            f"offload{', until it is measured' if assumed else ''}: "
            f"{sum(self._report.offloaded_sets)} of {sets} activation sets a step are offloaded; "
            f"at most {float(max(plan.peak_activation())):.4g} microbatches on a device, "
            f"{float(max(plan.peak_host_activation())):.4g} of a rank on the host; "
            f"one set of each stage takes so much of its chunk's F+B+W each way "
            f"({'assumed' if assumed else 'known'}): {link.text}"
        )
