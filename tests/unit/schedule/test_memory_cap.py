"""Memory caps: fractions of 1F1B's peak in whole activation sets."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_ext.schedule import Costs, ScheduleSpec, select
from megatron_ext.schedule.memory_cap import ShareCap, cap_sets, parse_cap
from megatron_ext.schedule.placement import Placement


@pytest.mark.parametrize(
    ("cap", "pp", "chunks", "sets"),
    [
        ("0.5", 8, 2, 8),
        ("0.3333333", 6, 1, 2),  # within 1e-6 of 2
        ("0.333333", 6, 1, 1),  # not within it
        ("1/3", 6, 1, 2),
        ("0.50000001", 8, 2, 8),
        ("0.99", 8, 2, 15),
        ("1.5", 4, 2, 12),
    ],
)
def test_whole_sets(cap, pp, chunks, sets):
    assert cap_sets(parse_cap(cap), pp, chunks) == sets


@pytest.mark.parametrize("text", ["", "0", "-0.5", "nan", "inf", "40GiB", "1/0", "half"])
def test_no_fraction(text):
    with pytest.raises(ValueError, match="such as 0.5, got"):
        parse_cap(text)


def test_less_than_one_set():
    message = "0.1 is 0.8 of 1F1B's 8 activation sets at pp=4, chunks=2; give at least 0.125"
    with pytest.raises(ValueError, match=message):
        cap_sets(parse_cap("0.1"), 4, 2)


def test_sets_that_grow_make_fewer_fit():
    """v-cap takes as many sets as keep the cap in bytes; auto leaves out what does not keep it."""
    placement = Placement.vee(4)
    plain, grown = ShareCap(Fraction(3, 4)), ShareCap(Fraction(3, 4), Fraction(8, 5))
    assert plain.sets(placement, True) == 6 and grown.sets(placement, True) == 3
    assert grown.sets(placement, False) == 6
    few, many = (select(ScheduleSpec("v-cap", 4, 8, cap=cap)).schedule for cap in (grown, plain))
    assert plain.needed(few) < plain.needed(many)
    assert grown.fits(few) and not grown.fits(many)
    auto = select(ScheduleSpec("auto", 4, 8, cap=ShareCap(Fraction(1), Fraction(8, 5)))).schedule
    assert "too large: " in auto.note and "zb-h1 (" in auto.note
    with pytest.raises(ValueError, match="less than one activation set"):
        select(ScheduleSpec("v-cap", 4, 8, cap=ShareCap(Fraction(1, 3), Fraction(3))))
    with pytest.raises(ValueError, match=r"takes 3 times its bytes between B and W; give at least"):
        ShareCap(Fraction(1, 4), Fraction(3)).sets(placement, True)


def test_a_cap_in_bytes_is_kept_by_what_is_made_again() -> None:
    """The request that stands for the answer gives the same order, though its cap is in sets."""
    costs = Costs.of(1, "1.2", "0.8", "0.05")
    found = select(
        ScheduleSpec("v-cap", 4, 8, costs=costs, cap=ShareCap(Fraction(1), Fraction(8, 5)))
    )
    assert found.spec.cap == ShareCap(Fraction(5, 8))
    assert select(found.spec).schedule.ranks == found.schedule.ranks
