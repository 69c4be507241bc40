"""Ranks that die, hang or fail: everybody reports and nobody stays.

No clock decides here: a watchdog's time stands still until the test lets it go.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime import watchdog
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import generate, lower

P = 3
CPU = torch.device("cpu")
REPORT = re.compile(
    r"^\[megatron_ext\] pipeline rank (?P<rank>\d) \(global rank \d\) (?P<what>.+)\n"
    r"  it was in (?P<action>[A-Z_]+\d+\.\d+) \(action \d+ of \d+\), (?P<detail>.+)$",
    re.MULTILINE,
)
NAMED_PEER = re.compile(r"pipeline rank (\d)$")


def accident(launch, do, **kwargs):
    """Two ranks; the first has an accident in its first pass."""
    special = {"rank": 0, "pass": 1, "do": do}
    settings = {"pass_seconds": 0.01, "microbatches": 2, "name": "1f1b"}
    return launch("iteration", 2, special=special, **{**settings, **kwargs})


def report_of(ranks, rank):
    """The one report that ``rank`` has written, as (what, action, detail)."""
    text = ranks.output(rank)
    found = list(REPORT.finditer(text))
    assert len(found) == text.count("[megatron_ext]") == 1, ranks.outputs()
    assert int(found[0]["rank"]) == rank
    return found[0]["what"], found[0]["action"], found[0]["detail"]


def peer_of(detail):
    """The rank that a report blames."""
    match = NAMED_PEER.search(detail)
    assert match, f"no peer in {detail!r}"
    return int(match[1])


def test_what_the_device_waits_for(capsys):
    """Where the host goes on (NCCL), it is not where the rank hangs."""
    device = Watchdog("pipeline rank 1", 60)
    device.pending = lambda: "the device has not ended F1.0"
    with pytest.raises(RuntimeError), device.armed("for other ranks behind its passes"):
        raise RuntimeError("a collective timed out")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "  the device has not ended F1.0"


def test_the_process_watchdog_may_be_closed_at_any_time(monkeypatch):
    monkeypatch.setattr(watchdog, "_process", None)
    watchdog.close_process_watchdog()
    process = watchdog.process_watchdog()
    assert watchdog.process_watchdog() is process
    with process.armed("for nothing"):
        thread = process._thread
        assert thread.is_alive()
    watchdog.close_process_watchdog()
    assert not thread.is_alive()


def test_the_executor_asks_recorder_and_channel():
    """The first action that has not ended; on CUDA only."""
    recorder = Recorder(False, CPU)
    done, running = (SimpleNamespace(query=lambda ended=ended: ended) for ended in (True, False))
    recorder._cuda, recorder._spans = True, [("F1.0", done, done), ("B1.0", running, running)]
    channel = SimpleNamespace(
        device=torch.device("cuda"), posts_late=False, pending=lambda: "a message from rank 0"
    )
    watchdog = Watchdog("nobody", 60)
    Executor(lower(generate("1f1b", 2, 1)), 1, None, channel, watchdog, recorder)
    assert watchdog.pending() == (
        "the device has not ended B1.0; a message from rank 0 has not been transferred"
    )


@pytest.mark.parametrize("p, victim", [(3, 1), (4, 3)])
def test_survivors_of_a_killed_rank_report_and_end(launch, p, victim):
    special = {"rank": victim, "pass": 15, "do": "kill"}
    ranks = launch("iteration", p, pass_seconds=0.01, microbatches=20, special=special)
    others = [r for r in range(p) if r != victim]
    statuses = ranks.wait(others)
    assert statuses == [1] * len(others), ranks.outputs()
    blamed = set()
    for rank in others:
        what, _, detail = report_of(ranks, rank)
        assert what.startswith("failed: ") and peer_of(detail) != rank
        blamed.add(peer_of(detail))
        assert "buffered on stdout" in ranks.output(rank)
    assert victim in blamed


def test_an_exception_in_a_pass_is_reported_and_propagates(launch):
    """Out of the interpreter too, as from any script: receives are posted, sends under way."""
    ranks = launch(
        "iteration",
        P,
        pass_seconds=0.05,
        microbatches=200,
        special={"rank": 1, "pass": 7, "do": "raise"},
        tidy_exit=True,
    )
    statuses = ranks.wait()
    assert statuses == [1] * P, ranks.outputs()
    what, _, detail = report_of(ranks, 1)
    assert (what, detail) == ("failed: ValueError: the model is on fire", "inside the model")
    assert "Traceback" in ranks.output(1)
    for rank in (0, 2):
        assert peer_of(report_of(ranks, rank)[2]) != rank


def test_slow_but_healthy_ranks_are_left_alone(launch):
    """Each pass is shorter than the limit, the iteration is not; nor is the pause in between,
    and in one pass the whole job is suspended for longer than the limit."""
    ranks = launch(
        "iteration",
        2,
        limit_seconds=0.4,
        in_passes=True,
        pass_seconds=0.06,
        microbatches=4,
        name="zb-h1",
        special={"rank": 0, "pass": 1, "do": "slow pass"},
        iterations=2,
        idle_seconds=0.5,
    )
    assert ranks.wait() == [0, 0], ranks.outputs()
    for rank in (0, 1):
        assert "[megatron_ext]" not in ranks.output(rank)
        assert ranks.output(rank).count("<iteration done>") == 2


def test_a_stopped_rank_makes_the_others_give_up(launch):
    """A true hang: connections stay open and nothing comes.

    Rank 1 is stuck behind rank 2, which is stopped, and rank 0 behind rank 1; it gives up when
    rank 1 has and before that leaves.
    """
    special = {"rank": 2, "pass": 1, "do": "stop"}
    ranks = launch("iteration", P, pass_seconds=0.01, microbatches=20, name="1f1b", special=special)
    for rank in (1, 0):
        ranks.wait_for(rank, f"<BW{rank}.0 for a message from pipeline rank {rank + 1}>")
    for rank in (1, 0):
        ranks.tell(f"clock {rank}")
        ranks.wait_for(rank, "<pause of 2 s>")
    ranks.tell("leave")
    # Every rank reports the hang itself, and not that a neighbour left.
    assert ranks.wait([0, 1]) == [75, 75], ranks.outputs()
    for rank in (0, 1):
        what, action, detail = report_of(ranks, rank)
        assert re.fullmatch(r"made no progress for \d+\.\d s \(limit 0\.4 s\), giving up", what)
        assert action == f"BW{rank}.0"
        assert detail == f"waiting for a message from pipeline rank {rank + 1}"
        output = ranks.output(rank)
        assert "in take" in output and "in _watch" in output, "stacks of all threads"
        assert "buffered on stdout" in output


def test_a_broken_stderr_does_not_keep_a_stuck_rank(launch):
    ranks = accident(launch, "broken stderr")
    ranks.wait_for(0, "<stderr is broken>")
    ranks.tell("clock 0")
    ranks.tell("leave")
    assert ranks.wait([0]) == [75]
    assert "[megatron_ext]" not in ranks.output(0)


def test_a_rank_that_has_given_up_does_not_end_as_if_well(launch):
    """What it waited for comes in the pause before it leaves."""
    ranks = accident(launch, "late", microbatches=1)
    ranks.wait_for(0, "<pass 1>")
    ranks.tell("clock 0")
    ranks.wait_for(0, "<pause of 2 s>")
    ranks.tell("go on")
    ranks.wait_for(0, "<pass 2>")
    ranks.tell("leave")
    assert ranks.wait([0]) == [75], ranks.outputs()
    assert "done>" not in ranks.output(0)
