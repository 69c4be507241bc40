"""The executor on real gloo ranks, against one process that trains the same model in order."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime.executor import Executor, _find_received
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule import Action, Op, Placement, Schedule, generate, lower, simulate
from megatron_ext.schedule.generators import NAMES
from tests.support.grids import KINDS, sampled

# Every schedule on three ranks, one of each kind on others too.
PLANS = [(p, name, None) for p in (2, 3, 4) for name in NAMES]
PLANS += [(p, "interleaved", 3) for p in (2, 3, 4)]
SAMPLED = [
    (p, *plan) for p, *plan in PLANS if p == 3 or plan in (["zb-h1", None], ["v-half", None])
]


def microbatches(p: int) -> list[int]:
    """m = 1, m < p, not a multiple of p, fewer again, and twice the same."""
    return [1, p - 1, 2 * p + 1, p, p]


@pytest.fixture(scope="module")
def reference(pool):
    """Losses and gradients of one process, by (stages, m's, dtype)."""
    known = {}

    def get(stages, ms, dtype):
        key = (stages, tuple(ms), dtype)
        if key not in known:
            [known[key]] = pool.run("reference", 1, num_stages=stages, microbatches=ms, dtype=dtype)
        return known[key]

    return get


def compare(ranks, expected, name, chunks, ms):
    """Everything that ``ranks`` report, iteration by iteration."""
    p = len(ranks)
    for i, (m, right) in enumerate(zip(ms, expected)):
        where = f"iteration {i} (m={m})"
        schedule = generate(name, p, m, chunks)
        mine = [rank[i] for rank in ranks]
        grads, losses, outputs = {}, {}, {}
        for one in mine:
            assert one["mistakes"] == [], where
            assert one["left"] == (0, 0, []), where
            grads |= one["grads"]
            losses |= one["losses"]
            outputs |= one["outputs"]
        # Bytes, not numbers: equal to the last bit.
        assert losses == right["losses"], where
        assert outputs == right["losses"], f"{where}, forward only"
        assert grads.keys() == right["grads"].keys()
        wrong = [k for k in grads if grads[k] != right["grads"][k]]
        assert not wrong, f"{where}: gradients of {wrong} differ"
        promised = simulate(schedule).peak_sets
        assert [one["peak"] for one in mine] == promised, where
        assert [one["peak_alive"] for one in mine] == promised, f"{where}: memory really held"
        for rank, one in enumerate(mine):
            assert [e["action"] for e in one["events"]] == list(map(str, schedule.ranks[rank]))


@pytest.mark.parametrize(("p", "name", "chunks"), sampled(PLANS, SAMPLED))
def test_trains_as_one_process_does(pool, reference, p, name, chunks):
    ms = microbatches(p)
    ranks = pool.run("train", p, name=name, chunks=chunks, microbatches=ms)
    stages = generate(name, p, 1, chunks).placement.num_stages
    compare(ranks, reference(stages, ms, "float32"), name, chunks, ms)


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_double_precision(pool, reference, name):
    ms = [4, 3]
    ranks = pool.run("train", 3, name=name, chunks=None, microbatches=ms, dtype="float64")
    stages = generate(name, 3, 1).placement.num_stages
    compare(ranks, reference(stages, ms, "float64"), name, None, ms)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "v-zb", "interleaved"])
def test_passes_of_any_length_change_nothing(pool, reference, name):
    """Ranks run ahead of and behind the simulated order; the results stay."""
    ms = [9, 5]
    ranks = pool.run("train", 4, name=name, chunks=None, microbatches=ms, jitter=True)
    stages = generate(name, 4, 1).placement.num_stages
    compare(ranks, reference(stages, ms, "float32"), name, None, ms)


WAYS = ["edge", "pipeline", "edge,buffers"]


@pytest.mark.parametrize("varying", [False, True], ids=["fixed", "varying"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "v-half"])
def test_messages_by_the_rules_of_nccl(pool, reference, name, way, varying):
    """Matched by order, one after the other, each held back until both ends have come."""
    ms, messages = [7, 3], {"way": way, "nccl": True, "varying": varying}
    ranks = pool.run(
        "train", 4, name=name, chunks=None, microbatches=ms, jitter=way == "edge", **messages
    )
    stages = generate(name, 4, 1).placement.num_stages
    compare(ranks, reference(stages, ms, "float32"), name, None, ms)


@pytest.mark.parametrize("way", ["edge,buffers", "pipeline"])
def test_other_ways_of_messages(pool, reference, way):
    ms, varying = [7, 3], way == "pipeline"
    ranks = pool.run(
        "train", 3, name="v-zb", microbatches=ms, chunks=None, way=way, varying=varying
    )
    stages = generate("v-zb", 3, 1).placement.num_stages
    compare(ranks, reference(stages, ms, "float32"), "v-zb", None, ms)


@pytest.mark.parametrize("name", sampled(NAMES, KINDS))
def test_messages_do_not_pile_up(pool, name):
    """What the channel keeps is bounded by what is in flight, not by the number of microbatches."""
    few, many = (pool.run("sent_memory", 4, name=name, microbatches=m) for m in (8, 24))
    assert max(many) <= max(few) <= 3 * 4, (few, many)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_messages_of_varying_shapes_do_not_pile_up(pool, name):
    few, many = (
        pool.run("sent_memory", 4, name=name, microbatches=m, varying=True) for m in (8, 24)
    )
    assert max(many) <= max(few) <= 4 * 4, (few, many)


def test_what_an_input_proves_of_the_peers_receives():
    """A wrong count blocks NCCL, or holds messages too long. Receives that may be posted late are
    there only when a pass needed one of them or of those behind it."""
    plan = lower(generate("1f1b", 2, 3))
    assert [" ".join(map(str, row)) for row in plan.ranks] == [
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 BW0.0 RECV_B0.1 F0.2 SEND_F0.2 BW0.1 RECV_B0.2 "
        "BW0.2",
        "RECV_F1.0 RECV_F1.1 F1.0 BW1.0 SEND_B1.0 F1.1 BW1.1 SEND_B1.1 RECV_F1.2 F1.2 BW1.2 "
        "SEND_B1.2",
    ]
    for late, counts in ((False, [[2, 2, 3], [0, 0, 2]]), (True, [[1, 2, 3], [0, 0, 1]])):
        for rank, op in enumerate((Op.B, Op.F)):
            proven = {Action(op, rank, j): (1 - rank, n) for j, n in enumerate(counts[rank])}
            assert _find_received(plan, rank, late) == proven


def test_only_the_pass_that_needs_a_message_proves_a_late_receive():
    """Not an action of another kind that names its stage and microbatch."""
    words = "F0.0 SEND_F0.0 RECV_B0.0 S0.0 RELOAD0.0 F0.1 SEND_F0.1 BW0.0 F0.2 SEND_F0.2"
    row = [Action.parse(word) for word in words.split()]
    plan = Schedule("by-hand", Placement.loop(2), 3, (tuple(row), ()))
    for late, counts in ((False, [0, 1, 1]), (True, [0, 0, 1])):
        proven = {Action(Op.F, 1, j): (0, n) for j, n in enumerate(counts)}
        assert _find_received(plan, 1, late) == proven


def test_every_message_has_a_tag_of_its_own():
    """So that gloo delivers right data in a wrong order too."""
    plan = lower(generate("interleaved", 2, 3))
    tags = [
        Executor._tag(SimpleNamespace(microbatches=3), op, stage, j)
        for row in plan.ranks
        for received, stage, j in row
        for op, kind in ((Op.F, Op.RECV_F), (Op.B, Op.RECV_B))
        if received is kind
    ]
    assert len(tags) == len(set(tags)) == 2 * 3 * 3


def test_left_over_messages_are_an_error(pool):
    [_, second] = pool.run("leftover", 2)
    assert second == "RuntimeError: pipeline rank 1 ended with messages left over: F1.0"


def test_a_stage_that_produces_nothing_is_an_error(pool):
    [text] = pool.run("produces_nothing", 1)
    assert text == (
        "RuntimeError: F0.0 on pipeline rank 0 produced nothing for F1.0; does the stage use "
        "its input?"
    )


def test_profilers_see_passes(pool):
    first, second = pool.run("profiled", 2)
    assert first == ["PP:F0.0", "PP:B0.0", "PP:W0.0"]
    assert second == ["PP:F1.0", "PP:B1.0", "PP:W1.0"]


def test_every_action_can_be_logged(pool):
    first, second = pool.run("verbose", 2)
    actions = ["F0.0", "SEND_F0.0", "RECV_B0.0", "BW0.0"]
    assert first == [f"[megatron_ext] rank 0 {i}/4 {a}" for i, a in enumerate(actions)]
    assert [line.split()[-1] for line in second] == ["RECV_F1.0", "F1.0", "BW1.0", "SEND_B1.0"]


def test_an_abandoned_iteration_keeps_nothing():
    """A trainer may catch the error, for lack of memory, and try again at once."""
    cpu = torch.device("cpu")
    channel = SimpleNamespace(device=cpu, posts_late=False, sending_to=list)
    runner = SimpleNamespace(forward=lambda *_: 1 // 0)

    class Extension:
        def handlers(self, executor):
            self.executor = executor
            return {}

        def release(self):
            del self.executor

    plan, idle = lower(generate("1f1b", 2, 1)), Watchdog("nobody", 1)
    executor = Executor(plan, 0, runner, channel, idle, Recorder(False, cpu), Extension())
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            executor.run()
        executor.drop()
        alive = weakref.ref(executor)
        del executor
        assert alive() is None
    finally:
        gc.enable()
