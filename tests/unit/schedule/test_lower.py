"""Lowering: which transfers, where, how many ahead."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    NAMES,
    Action,
    Costs,
    Op,
    Placement,
    Schedule,
    check,
    forward_only,
    generate,
    lower,
)
from tests.support.grids import sampled

UNEVEN = Costs.of(1, "0.98", "0.74", "0.05")


def posted_ahead(schedule: Schedule) -> tuple[int, Fraction]:
    """Most receives outstanding on a rank (posted, not yet consumed), and the share of receives
    of the middle half of the microbatches with at least one pass between them and their consumer.
    """
    most = ahead = total = 0
    m = schedule.microbatches
    for row in schedule.ranks:
        open_at: dict[tuple[bool, int, int], int] = {}
        passes = 0
        for op, stage, j in row:
            key = (op in (Op.F, Op.RECV_F), stage, j)
            if op in (Op.RECV_F, Op.RECV_B):
                open_at[key] = passes
                most = max(most, len(open_at))
            elif op in (Op.F, Op.B, Op.BW, Op.W):
                if op is not Op.W and key in open_at:
                    posted = open_at.pop(key)
                    if m // 4 <= j < m * 3 // 4:
                        total += 1
                        ahead += passes > posted
                passes += 1
        assert not open_at
    return most, Fraction(ahead, max(total, 1))


def test_small_case() -> None:
    rows = [" ".join(map(str, row)) for row in lower(generate("1f1b", 2, 2)).ranks]
    assert rows == [
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 BW0.0 RECV_B0.1 BW0.1",
        "RECV_F1.0 RECV_F1.1 F1.0 BW1.0 SEND_B1.0 F1.1 BW1.1 SEND_B1.1",
    ]


def test_edges_are_between_ranks_of_successive_stages() -> None:
    """A communicator each; where the V turns there is none."""
    ring = {(0, 1), (1, 2), (2, 0)}
    assert Placement.loop(3, 2).edges == ring | {(b, a) for a, b in ring}
    assert Placement.vee(3).edges == {(0, 1), (1, 2), (1, 0), (2, 1)}


def test_v_turn_and_ends_need_no_transfer() -> None:
    lowered = lower(generate("v-zb", 3, 4))
    actions = {action for _, _, action in lowered.actions()}
    assert Action(Op.SEND_F, 2, 0) not in actions  # stages 2 and 3 both lie on rank 2
    assert Action(Op.SEND_B, 3, 0) not in actions
    assert Action(Op.SEND_F, 5, 0) not in actions
    assert sum(not a.is_compute for a in actions) == 4 * 2 * 2 * (5 - 1)


@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_order_of_passes(name: str) -> None:
    schedule = generate(name, 4, 6)
    schedule = replace(schedule, costs=UNEVEN)
    lowered = lower(schedule)
    assert lowered.compute().ranks == schedule.ranks
    assert (lowered.is_lowered, lowered.costs) == (True, UNEVEN)
    assert lower(lowered).ranks == lowered.ranks


@pytest.mark.parametrize("name", NAMES)
def test_scaling_all_costs_changes_nothing(name: str) -> None:
    schedule = generate(name, 5, 12)
    for factor in (Fraction(1, 1000), Fraction(7), Fraction(33, 10)):
        f, b, w, hop = (Fraction(x) * factor for x in ("1", "0.98", "0.74", "0.05"))
        scaled, plain = (replace(schedule, costs=c) for c in (Costs.of(f, b, w, hop), UNEVEN))
        assert lower(scaled).ranks == lower(plain).ranks


def test_valid_for_any_costs() -> None:
    heavy_ends = Costs.of(hop="0.1", stages=[[2, 2, 1], *[[1, 1, 1]] * 6, [3, "2.5", 2]])
    for name in ("v-half", "v-zb", "interleaved"):
        schedule = generate(name, 4, 11)
        for costs in (heavy_ends, Costs.of(1, 5, "0.2", 3), Costs.of("0.1", 1, 4, "0.01")):
            check(lower(replace(schedule, costs=costs)))


RUNS = [(2, 8), (4, 3), (5, 16), (8, 32), (16, 33), (24, 48)]


@pytest.mark.parametrize(("pp", "m"), sampled(RUNS, RUNS[:4]))
@pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["equal", "uneven"])
@pytest.mark.parametrize(
    ("name", "bound"), [("1f1b", 2), ("zb-h1", 2), ("v-half", 3), ("v-zb", 4), ("interleaved", 4)]
)
def test_few_receives_are_outstanding(name: str, bound: int, costs: Costs, pp: int, m: int) -> None:
    """The bounds are measured. Interleaved: the outputs of one chunk's group wait for the next
    chunk's turn, as in Megatron's own schedule; at most max(4, p/2)."""
    most, _ = posted_ahead(lower(replace(generate(name, pp, m), costs=costs)))
    assert most <= (max(bound, pp // 2) if name == "interleaved" else bound)


@pytest.mark.parametrize(
    ("name", "share"), [("zb-h1", "0.9"), ("v-half", "0.95"), ("v-zb", "0.95"), ("1f1b", "0.49")]
)
def test_receives_are_posted_ahead(name: str, share: str) -> None:
    """1F1B's neighbours feed each other at the same moment, so only one of each two can be."""
    for pp in (4, 8):
        for costs in (Costs(), UNEVEN):
            schedule = replace(generate(name, pp, 8 * pp), costs=costs)
            _, ahead = posted_ahead(lower(schedule))
            assert ahead >= Fraction(share)


@pytest.mark.parametrize(
    "placement", [Placement.loop(4), Placement.loop(4, 2), Placement.vee(8)], ids=str
)
def test_forward_only_receives_stay_few_with_a_slow_last_stage(placement: Placement) -> None:
    rows = [[1, 1, 1]] * (placement.num_stages - 1) + [[5, 5, 5]]
    schedule = lower(replace(forward_only(placement, 40), costs=Costs.of(stages=rows)))
    check(schedule, forward_only=True)
    assert posted_ahead(schedule)[0] <= 3


def test_other_placements() -> None:
    """A placement that is neither loop nor V: stages 0 1 | 2 3 on two ranks."""
    placement = Placement([[0, 1], [2, 3]])
    check(lower(forward_only(placement, 5)), forward_only=True)
