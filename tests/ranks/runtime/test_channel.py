"""Messages between ranks."""

from __future__ import annotations


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


def test_many_outstanding_receives(pool):
    assert pool.run("many_receives", 4, count=300) == [0] * 4
