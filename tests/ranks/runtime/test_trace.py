"""Measured timelines: files, order, and one clock for all ranks."""

from __future__ import annotations

import json

import pytest

from megatron_ext.schedule import Action, Op, generate, simulate
from megatron_ext.view.timeline import measured

P, M = 3, 4
# Between the wall clock and the performance counter, one of which may be adjusted meanwhile.
SLACK_US = 2000


@pytest.fixture(scope="module", params=["1f1b", "v-half"])
def traced(request, pool, tmp_path_factory):
    """(schedule, results of the ranks, lines of every rank's file)"""
    directory = tmp_path_factory.mktemp("trace") / "made" / "by the first rank"
    ranks = pool.run("trace", P, name=request.param, microbatches=M, directory=str(directory))
    files = sorted(directory.iterdir())
    assert [file.name for file in files] == [f"rank{r}.jsonl" for r in range(P)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return generate(request.param, P, M), ranks, lines


def test_lines_are_written_as_the_run_goes(traced):
    """The files are read while the ranks still hold them open."""
    _, _, lines = traced
    assert [[line["iteration"] for line in rank] for rank in lines] == [[1, 2]] * P


def test_every_pass_once_in_order_with_times_that_do_not_decrease(traced):
    schedule, _, lines = traced
    for rank, (line, _) in enumerate(lines):
        events = line["events"]
        assert [e["action"] for e in events] == [str(a) for a in schedule.ranks[rank]]
        times = [t for e in events for t in (e["start_us"], e["end_us"])]
        assert times == sorted(times) and times[0] >= 0
        # A pass sleeps 10 ms, BW 20.
        assert all(e["end_us"] - e["start_us"] >= 9_900 for e in events)
        spent = sum(e["end_us"] - e["start_us"] for e in events) + line["waited_us"]
        assert line["waited_us"] >= 0 and spent <= times[-1] + SLACK_US


def test_the_ranks_lie_on_one_clock(traced):
    """With every rank's zero added, no pass starts before the one it depends on has ended."""
    _, ranks, lines = traced
    begin, end = {}, {}
    for (line, _), rank in zip(lines, ranks):
        zero = line["zero_unix_us"]
        assert rank["before"] * 1e6 - SLACK_US <= zero <= rank["after"] * 1e6
        for event in line["events"]:
            action = Action.parse(event["action"])
            kind = Op.F if action.op is Op.F else Op.W if action.op is Op.W else Op.B
            key = action._replace(op=kind)
            begin[key], end[key] = zero + event["start_us"], zero + event["end_us"]
    for op, stage, j in begin:
        before = {
            Op.F: Action(Op.F, stage - 1, j),
            Op.B: Action(Op.B, stage + 1, j),
            Op.W: Action(Op.B, stage, j),
        }[op]
        if before in end:
            assert end[before] <= begin[op, stage, j] + SLACK_US, (before, (op, stage, j))
    # The first rank slept before its zero; on its own clock that would not show.
    zeros = [line["zero_unix_us"] for line, _ in lines]
    assert zeros[0] - max(zeros[1:]) > 200_000 - SLACK_US


def test_the_timeline_can_be_drawn(traced):
    schedule, _, lines = traced
    shifted = [
        [
            {k: v if k == "action" else v + line["zero_unix_us"] for k, v in e.items()}
            for e in line["events"]
        ]
        for line, _ in lines
    ]
    timeline = measured(schedule, shifted)
    # 10 ms for every chunk's pass: at least what the simulated run takes.
    unit_ms = 10 * schedule.chunks
    assert timeline.makespan >= float(simulate(schedule).makespan) * unit_ms - 5
    assert all(box.start >= 0 for row in timeline.boxes for box in row)


def test_reset_starts_a_new_iteration(traced):
    _, ranks, _ = traced
    assert all(rank["empty"] == ([], 0.0, 0) for rank in ranks)


def test_what_tracing_costs_is_bounded():
    """All of the first iterations, then one in fifty."""
    from megatron_ext.runtime.trace import TraceFile

    due = [n for n in range(1, 1001) if TraceFile.due(n)]
    assert due[:50] == list(range(1, 51))
    assert due[50:] == list(range(100, 1001, 50))


def test_extent():
    """Compute apart from the time around it; nothing ran, nothing to say."""
    import time

    import torch

    from megatron_ext.runtime.trace import Recorder

    recorder = Recorder(True, torch.device("cpu"))
    assert recorder.extent() == (0.0, 0.0)
    for stage in (0, 1):
        with recorder.measure(Action(Op.F, stage, 0)):
            time.sleep(0.01)
        time.sleep(0.005)
    busy, whole = recorder.extent()
    assert busy >= 0.02 and whole >= busy + 0.005


def test_the_zero_is_one_moment_on_both_clocks(monkeypatch):
    """Also for a rank that loses its core between one clock and the other."""
    import torch

    from megatron_ext.runtime import trace

    class Clocks:
        """Both show the same; after most readings the core is lost for half a second."""

        now, readings = 1000.0, 0

        def time(self):
            shown = self.now
            self.readings += 1
            self.now += 1e-6 if self.readings in (7, 8) else 0.5
            return shown

        perf_counter = time

    monkeypatch.setattr(trace, "time", Clocks())
    recorder = trace.Recorder(True, torch.device("cpu"))
    with recorder.measure(Action(Op.F, 0, 0)):
        pass
    [event] = recorder.events()
    began = recorder._spans[0][1]
    assert abs(recorder.zero_unix_us + event["start_us"] - began * 1e6) < 10


@pytest.mark.gpu
def test_cuda_events_lie_on_the_wall_clock():
    """The device runs behind the host; its zero is when it gets there, not when it is asked."""
    import time

    import torch

    from megatron_ext.runtime.trace import Recorder

    device = torch.device("cuda")
    torch.cuda.synchronize()
    cycles = 300_000_000  # A tenth of a second or more, whatever the device.
    before = time.time() * 1e6
    torch.cuda._sleep(cycles)  # Work of the iteration before.
    recorder = Recorder(True, device)
    asked = time.time() * 1e6
    with recorder.measure(Action(Op.F, 0, 0)):
        torch.cuda._sleep(cycles // 4)
    [event] = recorder.events()
    after = time.time() * 1e6

    def zero() -> float:
        """A host that loses its core gives a later one, so the first of some counts."""
        return min(recorder.zero_unix_us for _ in range(5))

    busy = event["end_us"] - event["start_us"]
    assert zero() > asked and zero() - before > busy
    assert zero() + event["end_us"] < after + 1_000
    assert abs(zero() - zero()) < 1_000
