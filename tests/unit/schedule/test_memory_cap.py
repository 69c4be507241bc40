"""Memory caps: fractions of 1F1B's peak in whole activation sets."""

from __future__ import annotations

import pytest

from megatron_ext.schedule.memory_cap import cap_sets, parse_cap


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
