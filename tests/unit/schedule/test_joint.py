"""Joint actions: a forward and a backward pass that run as one."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    Action,
    Costs,
    Joint,
    Link,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    check,
    generate,
    lower,
    offload_pass,
    simulate,
)
from megatron_ext.schedule.actions import parse
from megatron_ext.schedule.io import from_json, load, save
from megatron_ext.view import page, svg, text, trace
from megatron_ext.view.timeline import measured, planned


def by_hand(*rows: str, m: int = 3) -> Schedule:
    """A schedule on two ranks of one stage each."""
    ranks = tuple(tuple(map(parse, row.split())) for row in rows)
    return Schedule("hand", Placement.loop(2), m, ranks)


# The backward pass of microbatch 0 runs with the forward one of 2, on rank 0.
GOOD = by_hand("F0.0 F0.1 F0.2+BW0.0 BW0.1 BW0.2", "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2")


class TestText:
    def test_there_and_back(self) -> None:
        joint = Joint(Action(Op.F, 3, 1), Action(Op.B, 4, 0))
        assert str(joint) == "F3.1+B4.0"
        assert parse("F3.1+B4.0") == joint
        assert parse("F3.1+BW4.0").parts == (Action(Op.F, 3, 1), Action(Op.BW, 4, 0))
        assert parse("F3.1") == Action(Op.F, 3, 1)

    @pytest.mark.parametrize("bad", ["B4.0+F3.1", "F3.1+W4.0", "F3.1+F4.0", "F3.1+SEND_F3.0"])
    def test_only_a_forward_and_a_backward(self, bad: str) -> None:
        with pytest.raises(ValueError, match="not a joint action"):
            parse(bad)

    @pytest.mark.parametrize("bad", ["F3.1+", "+B4.0", "F3.1+B4.0+B5.0", "F3.1 B4.0"])
    def test_anything_else_is_no_action(self, bad: str) -> None:
        with pytest.raises(ValueError, match="not an action"):
            parse(bad)

    def test_files_keep_them(self, tmp_path) -> None:
        save(GOOD, tmp_path / "s.json")
        assert load(tmp_path / "s.json").ranks == GOOD.ranks
        assert from_json(GOOD.to_json()).fingerprint() == GOOD.fingerprint()
        serial = [[part for a in row for part in a.parts] for row in GOOD.ranks]
        assert GOOD.fingerprint() != GOOD.with_ranks(serial).fingerprint()


class TestSimulation:
    def test_waits_for_both_inputs_and_takes_both_times(self) -> None:
        """BW1.0 ends at 4 on rank 1; its result lets the joint action begin."""
        run = simulate(GOOD)
        assert (run.start[0], run.end[0]) == ([0, 1, 4, 7, 10], [1, 2, 7, 9, 12])
        assert run.start[1][4] == 7  # F1.2 waits for the joint action's end

    def test_hops_count_for_both(self) -> None:
        slow = simulate(GOOD, Costs.of(1, 1, 1, "0.5"))
        assert Fraction(slow.start[0][2], slow.scale) == 5  # 1 + 0.5 + 1 + 2 + 0.5

    def test_memory_holds_both_sets(self) -> None:
        run = simulate(GOOD)
        assert run.peak_sets == [3, 1]
        assert max(sets for _, sets in run.memory_curve(0)) == 3
        assert check(GOOD).peak_sets == [3, 1]

    def test_a_circle_is_reported(self) -> None:
        """The joint action waits for a pass that waits for it."""
        rows = ("F0.0 F0.1+BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
        with pytest.raises(ScheduleError, match=r"F0.1\+BW0.0 waits for BW1.0 of rank 1"):
            check(by_hand(*rows, m=2))

    def test_its_own_forward_cannot_feed_its_backward(self) -> None:
        with pytest.raises(ScheduleError, match=r"F1.0\+BW1.0 waits for F1.0 of rank 1"):
            check(by_hand("F0.0 BW0.0", "F1.0+BW1.0", m=1))


class TestChecks:
    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("F0.0 F0.1 F0.2+BW0.0 BW0.1", "BW|B0.2 is missing"),
            ("F0.0 F0.1 F0.2+BW0.0 BW0.0 BW0.1 BW0.2", "BW0.0 appears twice, first at position 2"),
            ("F0.0 F0.1 F0.2+BW0.1 BW0.0 BW0.2", "BW0.0 comes after BW0.1"),
            ("F0.0 F0.1 F0.2+BW1.0 BW0.1 BW0.2", "BW1.0 is on the wrong rank"),
            ("F0.0 F0.2+BW0.0 F0.1 BW0.1 BW0.2", "F0.1 comes after F0.2"),
        ],
    )
    def test_faults_are_found_inside(self, row: str, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            check(by_hand(row, "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2"))

    def test_lowering_receives_before_and_sends_behind(self) -> None:
        lowered = lower(generate("dualpipev", 2, 4))
        check(lowered)
        row = [str(a) for a in lowered.ranks[0]]
        at = row.index("F0.3+BW3.1")
        assert "RECV_F3.1" not in row[at:]  # rank 1 feeds neither: F0 is first, BW3 is last
        at = row.index("F3.2+BW0.0")
        assert {"RECV_F3.2", "RECV_B0.0"} <= set(row[:at])
        assert "SEND_B3.2" not in row[:at]
        inner = [str(a) for a in lowered.ranks[1]]
        at = inner.index("F2.2+BW1.0")
        assert inner[at + 1 : at + 3] == ["SEND_F2.2", "SEND_B1.0"]

    def test_a_send_before_it_is_found(self) -> None:
        lowered = lower(GOOD)
        row = list(lowered.ranks[0])
        at = row.index(parse("F0.2+BW0.0"))
        assert str(row[at + 1]) == "SEND_F0.2"
        row[at], row[at + 1] = row[at + 1], row[at]
        with pytest.raises(ScheduleError, match=r"SEND_F0.2 stands before F0.2\+BW0.0"):
            check(lowered.with_ranks([row, *lowered.ranks[1:]]))

    @pytest.mark.parametrize("chunks", ["half", "full", "auto"])
    def test_offload(self, chunks: str) -> None:
        plan = offload_pass(generate("dualpipev", 4, 12), Link.of(4, "0.2"), chunks)
        assert sum(map(sum, plan.moved)) > 0
        assert check(lower(plan.schedule)).peak_sets == plan.peak_sets


class TestPictures:
    run = planned(simulate(generate("dualpipev", 2, 5)))

    def test_text_names_both(self) -> None:
        assert " F3+bw1-- " in text.render(self.run)
        letters = text.render(self.run, width=20)
        assert "fB" in letters or "Fb" in letters

    def test_svg_and_page_draw_two_boxes(self) -> None:
        boxes = [box for row in self.run.boxes for box in row]
        passes = sum(len(box.action.parts) for box in boxes)
        picture = svg.render(self.run)
        assert picture.count('class="box') == passes > len(boxes)
        assert picture.count("<title>F0.3+BW3.1: ") == 2
        drawn = page.render(self.run)
        assert drawn.count(',"F",0,3,"BW",3,1]') == 1

    def test_trace_has_one_event_and_both_arrows(self) -> None:
        events = trace.to_trace([self.run])["traceEvents"]
        [joint] = [e for e in events if e["name"] == "PP:F2.2+BW1.0" and e["ph"] == "X"]
        assert joint["cat"] == "F+BW"
        assert joint["args"]["forward"] == {"stage": 2, "chunk": 1, "microbatch": 2}
        assert joint["args"]["backward"] == {"stage": 1, "chunk": 0, "microbatch": 0}
        starts = [e for e in events if e["ph"] == "s" and e["name"] == "F2.2+BW1.0"]
        assert len(starts) == 2

    def test_measured_runs_are_read(self) -> None:
        schedule = generate("dualpipev", 2, 4)
        events = [
            [
                {"action": str(a), "start_us": i * 1000.0, "end_us": i * 1000.0 + 900}
                for i, a in enumerate(row)
            ]
            for row in schedule.ranks
        ]
        run = measured(schedule, events)
        assert [box.action for box in run.boxes[0]] == list(schedule.ranks[0])
        assert max(run.peak_activation) == max(simulate(schedule).peak_activation)
