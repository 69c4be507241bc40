"""Statistics of an activation store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from .sets import ActivationSet


@dataclass
class Statistics:
    """Peaks since ``reset_peaks``, and sums since the store was made.

    Attributes:
        peak_device_bytes: of blocks, a set counted whole until it is finished, as in the plan.
        held_elsewhere_bytes: released by the store, but not freed before PREPARE, because somebody
            else held the storage.
        kept_bytes: saved by reference, by reason.
    """

    peak_device_sets: int = 0
    peak_device_bytes: int = 0
    peak_host_sets: int = 0
    held_elsewhere_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=Counter)

    def reset_peaks(self, sets: Collection[ActivationSet]) -> None:
        """Begin new peaks with the sets that there are."""
        self.peak_device_sets = self.peak_device_bytes = self.peak_host_sets = 0
        self.observe(sets)

    def observe(self, sets: Collection[ActivationSet]) -> None:
        """Update the peaks; ``device_bytes`` of the set that has changed is up to date."""
        # Not measured here: summing over all blocks of all sets would take milliseconds.
        nbytes = sum(record.device_bytes for record in sets)
        self.peak_device_bytes = max(self.peak_device_bytes, nbytes)
        on_device = sum(record.on_device for record in sets)
        self.peak_device_sets = max(self.peak_device_sets, on_device)
        self.peak_host_sets = max(self.peak_host_sets, sum(record.on_host for record in sets))
