"""Units number the slices of microbatches one after another."""

import pytest

from megatron_ext.schedule.units import Units


@pytest.mark.parametrize("slices", [1, 4, (1, 3, 2)])
def test_a_unit_is_the_slice_that_it_numbers(slices):
    units = Units.of(3, slices)
    each = (slices,) * 3 if isinstance(slices, int) else slices
    pairs = [(j, k) for j in range(3) for k in range(each[j])]
    assert units.count == len(pairs)
    assert [(units.microbatch(u), units.slice(u)) for u in range(units.count)] == pairs
    assert [units.number(j, k) for j, k in pairs] == list(range(units.count))


def test_one_slice_each_is_unsliced():
    assert Units.of(3, 1) == Units.of(3, (1, 1, 1)) == Units(3)


@pytest.mark.parametrize(
    ("slices", "message"),
    [((2, 2), "2 numbers of slices for 3 microbatches"), ((2, 0, 1), "has 0 slices")],
)
def test_wrong_slices_are_refused(slices, message):
    with pytest.raises(ValueError, match=message):
        Units.of(3, slices)
