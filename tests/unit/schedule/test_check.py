"""Checker: every kind of fault is found, named and shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.schedule import (
    Action,
    CheckReport,
    Placement,
    Schedule,
    ScheduleError,
    check,
    forward_only,
    generate,
    lower,
)

Rows = list[list[Action]]


def fault(schedule: Schedule, change: Callable[[Rows], None], **options: bool) -> str:
    """The error text for ``schedule`` after ``change`` of its action lists."""
    rows = [list(row) for row in schedule.ranks]
    change(rows)
    with pytest.raises(ScheduleError) as error:
        check(schedule.with_ranks(rows), **options)
    return str(error.value)


def drop(rank: int, text: str) -> Callable[[Rows], None]:
    return lambda rows: rows[rank].remove(Action.parse(text))


def append(rank: int, text: str) -> Callable[[Rows], None]:
    return lambda rows: rows[rank].append(Action.parse(text))


def swap(rank: int, one: str, other: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        i, j = (rows[rank].index(Action.parse(text)) for text in (one, other))
        rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]

    return change


def move(rank: int, text: str, place: int) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[rank].remove(Action.parse(text))
        rows[rank].insert(place, Action.parse(text))

    return change


PLAIN = generate("1f1b", 3, 3)
SPLIT = generate("zb-h1", 3, 3)
LOWERED = lower(PLAIN)


def test_report() -> None:
    report = check(PLAIN)
    assert report == CheckReport([3, 2, 1], report.peak_activation)
    assert report.peak_activation == [3, 2, 1]
    assert check(generate("v-half", 4, 8)).peak_activation[0] == 3


@pytest.mark.parametrize(
    ("schedule", "change", "text", "cell"),
    [
        (
            PLAIN,
            drop(1, "F1.2"),
            "rank 1, position 4: F1.2 is missing; every stage needs F",
            "BW1.2",
        ),
        (
            PLAIN,
            drop(1, "BW1.2"),
            "rank 1, position 5: B1.2 is missing; every stage needs B",
            "end",
        ),
        (SPLIT, drop(2, "W2.1"), "W2.1 is missing; every B needs its W exactly once", "W2.2"),
        (
            PLAIN,
            append(1, "BW1.2"),
            "position 6: BW1.2 appears twice, first at position 5",
            "BW1.2",
        ),
        (PLAIN, append(1, "F0.2"), "F0.2 is on the wrong rank: stage 0 lies on rank 0", "F0.2"),
        (PLAIN, append(1, "F9.2"), "F9.2 names stage 9, but stages go from 0 to 2", "F9.2"),
        (PLAIN, append(1, "F1.3"), "F1.3 names microbatch 3, but they go from 0 to 2", "F1.3"),
        (PLAIN, append(1, "W1.2"), "W1.2 repeats work of BW1.2: give B and W, or one BW", "W1.2"),
        (PLAIN, append(0, "OFFLOAD0.1"), "OFFLOAD0.1 needs to know how sets travel", "OFFLOAD0.1"),
        (PLAIN, swap(0, "F0.0", "F0.1"), "position 1: F0.0 comes after F0.1; the F passes", "F0.0"),
        (PLAIN, swap(0, "BW0.0", "BW0.1"), "the B passes of one chunk must run in micro", "BW0.0"),
        (SPLIT, swap(0, "W0.0", "W0.1"), "the W passes of one chunk must run in microba", "W0.0"),
        (SPLIT, move(2, "W2.0", 0), "W2.0 stands before B2.0; W must come after", "W2.0"),
    ],
)
def test_compute_faults(
    schedule: Schedule, change: Callable[[Rows], None], text: str, cell: str
) -> None:
    message = fault(schedule, change)
    sentence, *picture = message.splitlines()
    assert text in sentence
    assert sentence.startswith("rank ")
    assert picture[0].startswith("position |")
    (marked,) = [line for line in picture if line.endswith("<-- here")]
    assert f"[{cell}]" in marked
    assert sum("[" in line for line in picture) == 1


def test_picture_shows_the_neighbourhood() -> None:
    assert fault(PLAIN, append(1, "F0.2")).splitlines()[1:] == [
        "position | 3      4      5      6",
        "rank 0   | BW0.0  BW0.1  BW0.2",
        "rank 1   | F1.2   BW1.1  BW1.2  [F0.2]  <-- here",
        "rank 2   | BW2.1  F2.2   BW2.2",
    ]
    big = fault(generate("1f1b", 32, 64), append(20, "F1.2")).splitlines()
    assert [line.split("|")[0].strip() for line in big[2:]] == [f"rank {r}" for r in range(17, 24)]
    assert len(big[1].split()) == 2 + 4


def test_order_that_cannot_progress() -> None:
    message = fault(PLAIN, swap(2, "F2.0", "BW2.0"))
    assert message.startswith("the order cannot progress: rank 2, position 0: BW2.0 waits for F2.0")
    assert len(message.splitlines()) == 4

    message = fault(SPLIT, lambda rows: rows[0].insert(1, rows[0].pop(3)))
    assert (
        "B0.0 waits for B1.0 of rank 1; ranks 0, 1 wait for each other" in message.splitlines()[0]
    )


def test_forward_only() -> None:
    schedule = forward_only(Placement.vee(2), 2)
    assert check(schedule, forward_only=True).peak_sets == [0, 0]
    with pytest.raises(ScheduleError, match=r"B0\.0 is missing"):
        check(schedule)
    text = fault(PLAIN, lambda rows: None, forward_only=True)
    assert "BW0.0 in a forward-only schedule, which holds no backward pass" in text
    assert "F3.1 is missing" in fault(schedule, drop(0, "F3.1"), forward_only=True)


def test_mixed_fused_and_split_backward_is_valid() -> None:
    rows = [list(row) for row in PLAIN.ranks]
    at = rows[1].index(Action.parse("BW1.1"))
    rows[1][at : at + 1] = [Action.parse("B1.1"), Action.parse("W1.1")]
    schedule = PLAIN.with_ranks(rows)
    check(schedule)
    check(lower(schedule))


def test_number_of_ranks() -> None:
    with pytest.raises(ScheduleError, match="2 action lists for pp=3 ranks"):
        check(PLAIN.with_ranks(PLAIN.ranks[:2]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop(0, "SEND_F0.1"), "SEND_F0.1 is missing; another rank needs what F0.1 produces"),
        (drop(1, "SEND_B1.1"), "SEND_B1.1 is missing; another rank needs what BW1.1 produces"),
        (drop(1, "RECV_F1.1"), "rank 1, position 4: RECV_F1.1 is missing; F1.1 needs it"),
        (append(2, "SEND_F2.1"), "SEND_F2.1 is not needed: no pass on another rank"),
        (append(0, "RECV_F0.1"), "RECV_F0.1 is not needed"),
        (append(0, "SEND_F0.0"), "SEND_F0.0 appears twice"),
        (append(0, "SEND_F1.0"), "SEND_F1.0 is on the wrong rank: stage 1 lies on rank 1"),
        (move(0, "SEND_F0.1", 0), "SEND_F0.1 stands before F0.1; a SEND must come after"),
        (move(1, "RECV_B1.0", 99), "RECV_B1.0 stands after BW1.0; a RECV must come before"),
        (swap(0, "SEND_F0.0", "SEND_F0.1"), "SEND_F0.1 stands before F0.1"),
        (
            move(0, "SEND_F0.1", 6),
            "RECV_F1.1 would receive SEND_F0.2 of rank 0; messages from rank 0 to rank 1 match in",
        ),
    ],
)
def test_transfer_faults(change: Callable[[Rows], None], text: str) -> None:
    sentence, *picture = fault(LOWERED, change).splitlines()
    assert text in sentence
    assert sum(line.endswith("<-- here") for line in picture) == 1


def test_transfer_within_a_rank_is_not_needed() -> None:
    schedule = lower(generate("v-half", 2, 2))
    assert "SEND_F1.0 is not needed" in fault(schedule, append(1, "SEND_F1.0"))


def test_crossing_sends_deadlock_under_rendezvous() -> None:
    """Both ranks send first: fine with buffers, stuck where a SEND blocks until its RECV."""
    rows = [
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 BW0.0 RECV_B0.1 BW0.1",
        "RECV_F1.0 F1.0 BW1.0 SEND_B1.0 RECV_F1.1 F1.1 BW1.1 SEND_B1.1",
    ]
    schedule = Schedule(
        "crossing",
        Placement.loop(2),
        2,
        tuple(tuple(Action.parse(text) for text in row.split()) for row in rows),
    )
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert str(error.value).splitlines() == [
        "deadlock: rank 0, position 3: SEND_F0.1 waits for RECV_F1.1 of rank 1; ranks 0, 1 wait "
        "for each other in a circle, if every SEND blocks until its RECV is reached",
        "rank 0 | SEND_F0.0  F0.1   [SEND_F0.1]  RECV_B0.0  BW0.0"
        "  <-- SEND_F0.1 waits for RECV_F1.1 of rank 1",
        "rank 1 | F1.0       BW1.0  [SEND_B1.0]  RECV_F1.1  F1.1"
        "  <-- SEND_B1.0 waits for RECV_B0.0 of rank 0",
    ]
    check(lower(schedule))


def test_deadlock_names_only_the_ranks_in_the_circle() -> None:
    schedule = lower(generate("1f1b", 4, 4))
    rows = [list(row) for row in schedule.ranks]
    # Ranks 2 and 3 each wait for the other's gradient or activation first.
    rows[3].remove(Action.parse("RECV_F3.1"))
    rows[3].insert(rows[3].index(Action.parse("F3.1")), Action.parse("RECV_F3.1"))
    rows[2].remove(Action.parse("RECV_B2.0"))
    rows[2].insert(rows[2].index(Action.parse("BW2.0")), Action.parse("RECV_B2.0"))
    with pytest.raises(ScheduleError, match=r"ranks (2, 3|3, 2) wait for each other in a circle"):
        check(schedule.with_ranks(rows))
