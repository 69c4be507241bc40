"""Bubble and peak in Megatron's log line and TensorBoard, beside a stand-in for its logging."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Writer:
    """TensorBoard's, as far as Megatron calls it."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars.append((name, value, iteration))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's two functions with our hooks around them, a log interval of 2."""
    from megatron_ext.integration.features.telemetry import Telemetry

    printed: list[str] = []
    writer = Writer()
    training, variables = ModuleType("megatron.training"), ModuleType("global_vars")
    training.get_args = lambda: SimpleNamespace(log_interval=2)  # type: ignore[attr-defined]
    variables.get_tensorboard_writer = lambda: writer  # type: ignore[attr-defined]
    variables.get_wandb_writer = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    promised = SimpleNamespace(bubble_text="9.4 %", peak_text="3")
    args = SimpleNamespace(pp_trace=None)
    run = SimpleNamespace(request=object(), training=True, args=args)
    line: Any = Telemetry()
    line.start(run)
    line._ran = SimpleNamespace(chunks=2)
    line.promise = lambda plan: promised
    reads: list[Any] = [(0.25, 7), (0.125, 6), None]
    line._meter.read = lambda: reads.pop(0)

    def stock_print(message: str) -> None:
        printed.append(message)

    logging, printing, _ = line.hooks()
    print_rank_last = printing.make(stock_print)

    def stock_log(loss: Any, iteration: int, is_first_iteration: bool = False) -> str:
        print_rank_last("saving a checkpoint")
        if iteration % 2 == 0 or is_first_iteration:
            print_rank_last(f" [now] iteration {iteration}/ 9 | loss: 1.0 |")
            print_rank_last("(after 1 iterations) memory (MB) | allocated: 1 |")
        return "memory flag"

    made = logging.make(stock_log)
    return SimpleNamespace(training_log=made, printed=printed, writer=writer, line=line)


def test_once_in_the_line_and_as_scalars(log: SimpleNamespace) -> None:
    """The first line comes out of turn, and is no point of a curve, as Megatron has it."""
    assert log.training_log({}, 1, is_first_iteration=True) == "memory flag"
    assert log.writer.scalars == []
    assert log.training_log({}, iteration=2) == "memory flag"
    log.training_log({}, 3)
    lines = [line for line in log.printed if " iteration " in line]
    assert lines == [
        " [now] iteration 1/ 9 | loss: 1.0 | pipeline bubble: 25.0 % (plan 9.4 %) "
        "| peak activations: 3.5 microbatches (plan 3) |",
        " [now] iteration 2/ 9 | loss: 1.0 | pipeline bubble: 12.5 % (plan 9.4 %) "
        "| peak activations: 3 microbatches (plan 3) |",
    ]
    assert not any("bubble" in line for line in log.printed if line not in lines)
    assert log.writer.scalars == [
        ("pipeline bubble (%)", 12.5, 2),
        ("peak activations (microbatches)", 3, 2),
    ]
    assert log.line._measured == [(0.25, 3.5), (0.125, 3)]


def test_nothing_measured_nothing_said(log: SimpleNamespace) -> None:
    for iteration in (2, 4, 6):
        log.training_log({}, iteration)
    assert log.printed[-2] == " [now] iteration 6/ 9 | loss: 1.0 |"
    assert len(log.writer.scalars) == 4


def test_a_bubble_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks and two iterations; starts and ends of all ranks count, not each rank's own."""
    from megatron_ext.integration.features.telemetry import measured

    class Timed:
        peak_sets = 3

        def __init__(self, *extent: float) -> None:
            self.extent = lambda: extent

    other = [(6.0, 101.0, 109.0), (5.0, 200.0, 210.0)], 5
    monkeypatch.setattr(measured, "gather", lambda value, group: [value, other])
    made = measured.Meter()
    for timed in (Timed(8.0, 100.0, 110.0), Timed(5.0, 200.0, 210.0)):
        made.add(timed, None)  # type: ignore[arg-type]
    # 1 - (8 + 6) / (2 * 10) = 0.3 and 1 - (5 + 5) / (2 * 10) = 0.5
    assert made.read() == (pytest.approx(0.4), 5)
    assert made.read() is None


@pytest.mark.parametrize(("ahead", "bubble"), [(-3600.0, 0.25), (7.0, 0.25), (0.01, 0.2683)])
def test_the_bubble_of_nodes_whose_clocks_differ(
    monkeypatch: pytest.MonkeyPatch, ahead: float, bubble: float
) -> None:
    """Two ranks a node, who compute 300 of 400 ms; they leave a collective up to 8 ms apart. What
    is less than a collective can show stays as it is."""
    import torch

    from megatron_ext.integration.features.telemetry import Telemetry, clocks, measured
    from megatron_ext.runtime.trace import Recorder

    hosts, clock = "aabb", (0.0, 0.0, ahead, ahead)
    late = (0, 2, 8, 1, 0), (3, 0, 0, 0, 0), (0, 1, 0, 8, 0), (5, 5, 5, 0, 0)
    times = [[at / 1e3 + shift for at in row] for row, shift in zip(late, clock)]
    group = type("Group", (), {})()
    call = SimpleNamespace(group=group, device=torch.device("cpu"))
    args = SimpleNamespace(pp_trace=None)
    extents = []
    for host, shift, mine in zip(hosts, clock, times):
        answers = iter([list(hosts), *[[]] * 5, list(zip(hosts, times))])
        monkeypatch.setattr(clocks, "gather", lambda *_, every=answers: next(every))
        monkeypatch.setattr(clocks, "time", SimpleNamespace(time=iter(mine).__next__))
        monkeypatch.setattr(clocks, "socket", SimpleNamespace(gethostname=lambda name=host: name))
        line: Any = Telemetry()
        line.start(SimpleNamespace(request=object(), training=True, args=args))
        recorder = Recorder(True, torch.device("cpu"))
        recorder._zero, recorder._zero_unix = 100.0, 1000.0 + shift
        recorder._spans = [("F0.0", 100.0, 100.2), ("B0.0", 100.3, 100.4)]
        step = SimpleNamespace(call=call, training=True, loads=None, recorder=recorder, plan=None)
        for _ in range(2):  # The second one measures nothing.
            line.begin(step)
            line.end(step)
        extents.append(recorder.extent())
    assert measured._bubble(extents) == pytest.approx(bubble, abs=1e-4)


def test_only_the_last_iterations_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no iteration's times are asked for, which would wait for the device, before the line."""
    from megatron_ext.integration.features.telemetry import measured

    monkeypatch.setattr(measured, "gather", lambda value, group: [value])
    made, asked = measured.Meter(), []

    def extent(number: int) -> tuple[float, float, float]:
        asked.append(number)
        return 1.0, 0.0, 1.0

    for number in range(20):
        timed = SimpleNamespace(peak_sets=number, extent=lambda n=number: extent(n))
        made.add(timed, None)
    assert asked == []
    assert made.read() == (0.0, 19)
    assert asked == list(range(12, 20))


def test_the_note_of_a_new_order_is_logged_once_it_is_made_for_measured_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_ext.integration.features import profile
    from megatron_ext.schedule import Costs
    from tests.support.stand_ins import megatron_args, started

    said: list[str] = []
    monkeypatch.setattr(profile.logger, "info", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(profile.dist, "get_rank", lambda: 0)
    args = megatron_args(pp_profile_steps=2)
    one = started(profile.ProfileSteps, args=args)
    plan = SimpleNamespace(note="made for measured times")
    one.planned(plan)
    one._inputs.costs, one._inputs.reorder = Costs(), True
    one.planned(SimpleNamespace(note=""))
    assert said == []
    one.planned(plan)
    assert said == [plan.note]
