"""Ours trains what stock trains, for every configuration and every schedule of the table."""

from __future__ import annotations

import functools

import pytest

from tests import configurations
from tests.configurations import CONFIGURATIONS, of_ours, of_stock
from tests.harness.equality import Trained, compare, trained


@functools.cache
def stock(name: str) -> Trained:
    """What stock trains in this configuration."""
    row = CONFIGURATIONS[name]
    return trained(row.script, *of_stock(row))


@pytest.mark.parametrize(("name", "schedule"), configurations.pairs())
def test_ours_is_stocks(name: str, schedule: str) -> None:
    """Losses, every gradient, every weight after three steps; and the activations of the plan."""
    row = CONFIGURATIONS[name]
    ours = trained(row.script, *of_ours(row, schedule))
    compare(f"{name}, {schedule}", stock(name), ours, row.tolerance)
    # Between them sets of experts may outgrow the host's arena once, and stay on the device.
    first, *_, last = ours.peaks
    assert first[0] == first[1] and last[0] == last[1], ours.peaks
