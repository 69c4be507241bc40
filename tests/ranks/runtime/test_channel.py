"""Messages between ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_ext.runtime import communicators


def test_refuses_other_shapes_and_dtypes(pool):
    shape, transposed, dtype, pending = pool.run("wrong_messages", 1)[0]
    assert "produced (5, 8) torch.float32 but the pipeline carries (6, 8) torch.float32" in shape
    assert "produced (8, 6)" in transposed
    assert "produced (6, 8) torch.float64 but" in dtype and "--pipeline-dtype" in dtype
    assert pending == "[]"


def test_sends_do_not_block_and_are_drained(pool, tmp_path):
    first, second = pool.run("drained", 2, directory=str(tmp_path))
    assert second["got"] == first["sent"]
    assert first["pending"] == [[1], [1], []]
    assert first["waited"], "finish() was done before the receiver began"


def test_nccl_matches_by_order(pool):
    """What the stand-in is for: two receives in the wrong order get each other's message, where
    gloo looks at the tags."""
    assert pool.run("crossed", 2, nccl=False)[1] == [5.0, 6.0]
    assert pool.run("crossed", 2, nccl=True)[1] == [6.0, 5.0]


def test_a_message_waits_for_those_of_its_stream(pool):
    """A receive whose message comes last holds back the others of its communicator only."""
    assert pool.run("held_back", 3, way="pipeline")[0] == ["2 after 1"]
    assert pool.run("held_back", 3, way="edge")[0] == ["2 before 1"]


def test_the_data_of_a_varying_shape_is_posted_when_the_shape_is_known(pool):
    """``receive`` does not wait for the peer; the data is under way before it is waited for."""
    first, second = pool.run("late_shapes", 2)
    assert first == "sent" and second == [[3, 8], [2, 8], "posted without wait"]


def test_what_has_not_been_transferred(pool):
    """Where the host does not wait, the watchdog's report asks the channel."""
    first, second = pool.run("pending", 2)
    assert first == ["a message to pipeline rank 1", None]
    assert second == [None, "a message from pipeline rank 0"]


def test_buffers_are_used_again(pool):
    assert pool.run("buffered", 2) == [[2, 2], [2, 2]]


def test_many_outstanding_receives(pool):
    assert pool.run("many_receives", 4, count=300) == [0] * 4


@pytest.mark.parametrize("has", [("shutdown", "abort"), ("shutdown",), ()])
def test_communicators_end_once_and_are_aborted_at_exit(has):
    """With stand-ins for a backend, which may lack either way, and for its group."""
    calls = []

    class Ended:
        def close(self, abort=False):
            ways = {name: lambda name=name: calls.append(name) for name in has}
            communicators.end(SimpleNamespace(**ways), abort)

    class Group:
        """Can be referred to weakly."""

    kept, one, two = communicators.PerGroup(), Group(), Group()
    for group in (one, two):
        kept.get(group, "way", Ended)
    communicators.close(one)
    communicators.close(one)
    assert calls == [name for name in ("shutdown",) if name in has] and len(kept) == 1
    calls.clear()
    communicators._at_exit()
    communicators._at_exit()
    assert calls == list(reversed(has))[:1] and len(kept) == 0
