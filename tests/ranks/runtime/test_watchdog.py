"""Ranks that die, hang, are told to stop, or fail: everybody reports and nobody stays."""

from __future__ import annotations

import re
import signal
import time

import pytest

P = 3
LIMIT = 3.0
# Polls, the grace period, and processes that get a core now and then.
SLACK = 15.0
REPORT = re.compile(
    r"^\[megatron_ext\] pipeline rank (?P<rank>\d) \(global rank \d\) (?P<what>.+)\n"
    r"  it was in (?P<action>[A-Z_]+\d+\.\d+) \(action \d+ of \d+\), (?P<detail>.+)$",
    re.MULTILINE,
)
NAMED_PEER = re.compile(r"pipeline rank (\d)$")


@pytest.fixture(scope="module", autouse=True)
def early(zygote):
    """Ranks that only have to be waited for: they hang while the other tests run."""
    hung = zygote.fork(
        "iteration",
        P,
        limit_seconds=2,
        pass_seconds=[1.2, 0.05, 0.05],
        microbatches=20,
        name="1f1b",
    )
    mute = accident(zygote.fork, "broken stderr", limit_seconds=1)
    for rank in range(P):
        hung.wait_for(rank, "<iteration 1>")
    hung.kill(2, signal.SIGSTOP)
    yield {"hung": hung, "mute": mute}
    hung.end()
    mute.end()


def accident(launch, do, **kwargs):
    """Two ranks; the first has an accident in its first pass."""
    special = {"rank": 0, "pass": 1, "do": do}
    settings = {"limit_seconds": 60, "pass_seconds": 0.01, "microbatches": 2, "name": "1f1b"}
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


@pytest.mark.parametrize("p, victim", [(3, 1), (4, 3)])
def test_survivors_of_a_killed_rank_report_and_end(launch, p, victim):
    ranks = launch("iteration", p, limit_seconds=LIMIT, pass_seconds=0.05, microbatches=200)
    ranks.wait_for(victim, "<pass 15>")
    start = time.monotonic()
    ranks.kill(victim, signal.SIGKILL)
    others = [r for r in range(p) if r != victim]
    statuses = ranks.wait(LIMIT + SLACK, others)
    print(f"ended after {time.monotonic() - start:.1f} s")
    assert statuses == [1] * len(others), ranks.outputs()
    blamed = set()
    for rank in others:
        what, _, detail = report_of(ranks, rank)
        assert what.startswith("failed: ") and peer_of(detail) != rank
        blamed.add(peer_of(detail))
        assert "buffered on stdout" in ranks.output(rank)
    assert victim in blamed


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_sigterm_while_blocked_in_cpp(launch, name):
    """Rank 0 sleeps in its first pass, so rank 2 sits in gloo, where no Python handler runs."""
    ranks = launch(
        "iteration",
        P,
        limit_seconds=60,
        pass_seconds=0.01,
        microbatches=4,
        name=name,
        special={"rank": 0, "pass": 1, "do": "sleep"},
    )
    ranks.wait_for(0, "<pass 1>")
    ranks.wait_for(2, "<iteration 1>")
    time.sleep(1)
    start = time.monotonic()
    ranks.kill(2, signal.SIGTERM)
    assert ranks.wait(SLACK, [2]) == [143]
    print(f"ended after {time.monotonic() - start:.1f} s")
    what, action, detail = report_of(ranks, 2)
    assert what == "was told to stop (SIGTERM)"
    assert action == "F2.0" and detail == "waiting for a message from pipeline rank 1"
    assert "buffered on stdout" in ranks.output(2)
    # Rank 0 runs Python (a sleep): the ordinary handler, and still one report.
    ranks.kill(0, signal.SIGTERM)
    assert ranks.wait(SLACK, [0]) == [143]
    assert report_of(ranks, 0) == (what, "F0.0", "inside the model")
    # Rank 1 lost both of its neighbours.
    assert ranks.wait(SLACK, [1]) == [1]
    assert peer_of(report_of(ranks, 1)[2]) in (0, 2)


def test_an_exception_in_a_pass_is_reported_and_propagates(launch):
    """Out of the interpreter too, as from any script: receives are posted, sends under way."""
    ranks = launch(
        "iteration",
        P,
        limit_seconds=30,
        pass_seconds=0.05,
        microbatches=200,
        special={"rank": 1, "pass": 7, "do": "raise"},
        tidy_exit=True,
    )
    statuses = ranks.wait(25)
    assert statuses == [1] * P, ranks.outputs()
    what, _, detail = report_of(ranks, 1)
    assert (what, detail) == ("failed: ValueError: the model is on fire", "inside the model")
    assert "Traceback" in ranks.output(1)
    for rank in (0, 2):
        assert peer_of(report_of(ranks, rank)[2]) != rank


def test_slow_but_healthy_ranks_are_left_alone(launch):
    """Each pass is shorter than the limit, the iteration is not; nor is the pause in between,
    and then the whole job is suspended for longer than the limit."""
    limit = 2
    ranks = launch(
        "iteration",
        2,
        limit_seconds=limit,
        poll_seconds=0.1,
        pass_seconds=0.3,
        microbatches=2,
        name="zb-h1",
        special={"rank": 0, "pass": 1, "do": "slow pass"},
        iterations=2,
        idle_seconds=limit + 0.5,
    )
    ranks.wait_for(0, "<iteration 2>")
    time.sleep(0.5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            ranks.kill(rank, number)
        time.sleep(limit + 0.5 if number == signal.SIGSTOP else 0)
    assert ranks.wait(30) == [0, 0], ranks.outputs()
    for rank in (0, 1):
        assert "[megatron_ext]" not in ranks.output(rank)
        assert ranks.output(rank).count("<iteration done>") == 2


def test_sigterm_between_iterations_is_silent(launch):
    ranks = launch(
        "iteration", 2, limit_seconds=60, pass_seconds=0, microbatches=1, idle_seconds=60
    )
    for rank in (0, 1):
        ranks.wait_for(rank, "<iteration done>")
        ranks.kill(rank, signal.SIGTERM)
    assert ranks.wait(SLACK) == [143, 143]
    assert "[megatron_ext]" not in ranks.outputs()


def test_a_stopped_rank_makes_the_others_give_up(early):
    """A true hang: connections stay open and nothing comes.

    Rank 1 gets stuck behind rank 2 about a second before rank 0 gets stuck behind rank 1.
    """
    ranks = early["hung"]
    statuses = ranks.wait(3.6 + 2 + SLACK, [0, 1])
    # Every rank reports the hang itself, and not that a neighbour left.
    assert statuses == [75, 75], ranks.outputs()
    for rank, stuck_in in enumerate(("BW0.0", "BW1.0")):
        what, action, detail = report_of(ranks, rank)
        assert re.fullmatch(r"made no progress for [2-9]\.\d s \(limit 2 s\), giving up", what)
        assert action == stuck_in
        assert detail == f"waiting for a message from pipeline rank {rank + 1}"
        output = ranks.output(rank)
        assert "in _take" in output and "in _watch" in output, "stacks of all threads"
        assert "buffered on stdout" in output


def test_a_broken_stderr_does_not_keep_a_stuck_rank(early):
    assert early["mute"].wait(1 + SLACK) == [75, 75]


def test_a_handler_installed_later_is_respected(launch):
    ranks = accident(launch, "own handler")
    assert ranks.wait(10, [0]) == [0]
    assert "<handler of the training script>" in ranks.output(0)
    assert "[megatron_ext]" not in ranks.output(0)


def test_ending_a_forked_child_does_not_end_the_rank(launch):
    ranks = accident(launch, "child")
    assert ranks.wait(20) == [0, 0], ranks.outputs()
    assert "<child ended with -15>" in ranks.output(0)
    assert "[megatron_ext]" not in ranks.outputs()
