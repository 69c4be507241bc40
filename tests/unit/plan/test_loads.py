"""What microbatches of different lengths cost beside one of a known length."""

from __future__ import annotations

from fractions import Fraction

from megatron_ext.plan.loads import GRAIN, Load, shares_of_loads
from megatron_ext.plan.slices import attention_share
from megatron_ext.schedule.units import SHARE, slice_costs


def test_a_whole_one_is_one() -> None:
    whole = Load.of([4096, 4096])
    assert shares_of_loads([whole], whole, 1024) == (((1, 1, 1, 1),),)


def test_attention_costs_its_square() -> None:
    """As ``slice_costs`` has it, to a part of the grain: that of the microbatch's own length."""
    whole, hidden = 4096, 512
    lengths = [512, 1024, 3000, 8192]
    found = shares_of_loads([Load.of([n]) for n in lengths], Load.of([whole]), hidden)
    share = attention_share(whole, hidden)
    for n, (row,) in zip(lengths, found):
        (unit,) = slice_costs(1, share, length=Fraction(n, whole))
        parts = unit.forward, unit.backward_input, unit.backward_weight, unit.size
        whole_ones = 1, 1 + share, 1 - share, 1
        for share_, part, all_ in zip(row, parts, whole_ones):
            assert abs(share_ - Fraction(part, SHARE) / all_) <= Fraction(1, GRAIN)


def test_packed_documents_attend_to_themselves_alone() -> None:
    whole = Load.of([8192])
    ((one,), (packed,)) = shares_of_loads([whole, Load.of([2048] * 4)], whole, 512)
    assert packed[1] < packed[0] < 1 and packed[2:] == one[2:] == (1, 1)
    assert packed[0] == Fraction(round(GRAIN * (12 * 512 + 2048) / (12 * 512 + 8192)), GRAIN)


def test_slices_add_up_and_take_equally_long() -> None:
    """Later ones attend to more."""
    whole = Load.of([8192])
    (rows,) = shares_of_loads([whole], whole, 512, [4])
    for column in zip(*rows):
        assert abs(sum(column) - 1) <= Fraction(4, SHARE)
    assert max(row[0] for row in rows) - min(row[0] for row in rows) <= Fraction(4, SHARE)
    assert [row[2] for row in rows] == sorted({row[2] for row in rows}, reverse=True)


def test_slices_of_nearly_equal_lengths_are_the_same() -> None:
    whole = Load.of([8192])
    one, other = shares_of_loads([Load.of([n]) for n in (4090, 4096)], whole, 512, [3, 3])
    assert one == other and len(one) == 3


def test_sets_count_for_no_fewer_tokens_than_they_have() -> None:
    """Else more than a cap allows would be kept; and a whole one in slices is no more than one."""
    whole = Load.of([8192])
    lengths = [190, 1342, 4096, 8191, 8192]
    for counts in (None, [3] * len(lengths), [7] * len(lengths)):
        found = shares_of_loads([Load.of([n]) for n in lengths], whole, 512, counts)
        for n, rows in zip(lengths, found):
            kept = sum(row[3] for row in rows)
            assert Fraction(n, 8192) <= kept <= Fraction(n, 8192) + Fraction(1, GRAIN)
        assert sum(row[3] for row in found[-1]) == 1


def test_the_shortest_one_takes_some_time() -> None:
    (((f, b, w, size),),) = shares_of_loads([Load.of([1])], Load.of([100_000]), 64)
    assert f == b == w == size == Fraction(1, GRAIN)
