"""Bubble and peak in Megatron's log line, with a stand-in for its logging."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's two functions with our hooks around them, a log interval of 2."""
    from megatron_ext.integration.features.telemetry import Telemetry

    printed: list[str] = []
    training = ModuleType("megatron.training")
    training.get_args = lambda: SimpleNamespace(log_interval=2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.training", training)
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

    logging, printing = line.hooks()
    print_rank_last = printing.make(stock_print)

    def stock_log(loss: Any, iteration: int, is_first_iteration: bool = False) -> str:
        print_rank_last("saving a checkpoint")
        if iteration % 2 == 0 or is_first_iteration:
            print_rank_last(f" [now] iteration {iteration}/ 9 | loss: 1.0 |")
            print_rank_last("(after 1 iterations) memory (MB) | allocated: 1 |")
        return "memory flag"

    made = logging.make(stock_log)
    return SimpleNamespace(training_log=made, printed=printed)


def test_once_in_the_line(log: SimpleNamespace) -> None:
    assert log.training_log({}, 1, is_first_iteration=True) == "memory flag"
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


def test_nothing_measured_nothing_said(log: SimpleNamespace) -> None:
    for iteration in (2, 4, 6):
        log.training_log({}, iteration)
    assert log.printed[-2] == " [now] iteration 6/ 9 | loss: 1.0 |"


def test_a_bubble_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks and two iterations; the longest extent counts, not each rank's own."""
    from megatron_ext.integration.features.telemetry import measured

    class Timed:
        peak_sets = 3

        def __init__(self, *extent: float) -> None:
            self.extent = lambda: extent

    other = [(6.0, 8.0), (5.0, 10.0)], 5
    monkeypatch.setattr(measured, "gather", lambda value, group: [value, other])
    made = measured.Meter()
    for timed in (Timed(8.0, 10.0), Timed(5.0, 10.0)):
        made.add(timed, None)  # type: ignore[arg-type]
    # 1 - (8 + 6) / (2 * 10) = 0.3 and 1 - (5 + 5) / (2 * 10) = 0.5
    assert made.read() == (pytest.approx(0.4), 5)
    assert made.read() is None


def test_only_the_last_iterations_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no iteration's times are asked for, which would wait for the device, before the line."""
    from megatron_ext.integration.features.telemetry import measured

    monkeypatch.setattr(measured, "gather", lambda value, group: [value])
    made, asked = measured.Meter(), []

    def extent(number: int) -> tuple[float, float]:
        asked.append(number)
        return 1.0, 1.0

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
