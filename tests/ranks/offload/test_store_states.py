"""What happens to a set between F and W: order, errors, what is counted, who else holds it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.device import CpuDevice, Direction
from megatron_ext.offload.store import ActivationStore
from megatron_ext.prove.faulty_device import Faults
from tests.support.gate import Gate

from .store_trips import (
    HIDDEN,
    KEY,
    ROWS,
    come_back,
    compare,
    device_bytes,
    device_sets,
    host_bytes,
    host_sets,
    leave,
    make_store,
    tensor,
    trip,
)


def test_forward_only_does_nothing(make_engine):
    store = make_store(make_engine)
    with torch.no_grad(), store.saving(KEY):
        tensor(ROWS, HIDDEN).exp()
    assert device_sets(store) == 0
    with torch.no_grad(), store.saving(KEY), store.saving((0, 1)):
        pass
    store.end_step()


def test_an_exception_leaves_nothing_behind(make_engine):
    store = make_store(make_engine)
    with pytest.raises(ZeroDivisionError):
        with store.saving(KEY):
            tensor(ROWS, HIDDEN).exp()
            raise ZeroDivisionError
    saved = tensor(ROWS, HIDDEN).exp()
    assert saved.grad_fn._saved_result is not None and not store.statistics.kept_bytes
    with store.saving(KEY):  # The same key again.
        y = tensor(ROWS, HIDDEN).exp()
    store.offload(KEY)
    with store.saving((0, 1)):
        tensor(ROWS, HIDDEN).exp()
    store.clear()
    assert device_sets(store) == host_sets(store) == store.engine.arena.used_bytes == 0
    store.end_step()
    y.sum().backward()  # Nothing was released yet, so even this still works.


def test_a_released_set_that_was_cleared_cannot_be_used(make_engine):
    store = make_store(make_engine)
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN).exp()
    leave(store)
    store.clear()
    with pytest.raises(RuntimeError, match="backward needs activation set .0, 0., which is on the"):
        y.sum().backward()


def test_wrong_orders_are_named(make_engine):
    store = make_store(make_engine)
    with pytest.raises(
        RuntimeError, match=r"cannot offload activation set \(0, 0\): there is none"
    ):
        store.offload(KEY)
    with store.saving(KEY):
        with pytest.raises(RuntimeError, match="another set is being saved"):
            with store.saving((0, 1)):
                pass
        y = tensor(ROWS, HIDDEN).exp()
    with pytest.raises(RuntimeError, match="its last pass is not finished"):
        with store.saving(KEY):
            pass
    with pytest.raises(RuntimeError, match="cannot reload .* it is on the device"):
        store.reload(KEY)
    leave(store)
    with pytest.raises(RuntimeError, match="no RELOAD for it before this pass"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="cannot be finished: it is on the host"):
        store.finish(KEY)
    with pytest.raises(RuntimeError, match=r"left over: \(0, 0\) \(on the host\)"):
        store.end_step()
    store.clear()


def test_what_w_keeps_outlives_b(make_engine):
    """Split backward: W's tasks hold tensors that B got, and the graph is gone."""
    kept: list[torch.Tensor] = []

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            kept.append(ctx.saved_tensors[0].detach())
            return grad * 3

    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = Linear.apply((x * 2).exp()).sigmoid().sum()
    trip(store)
    y.backward()
    del y
    gc.collect()
    # exp's result is the linear layer's input; sigmoid's is freed inside backward, as without us.
    assert device_bytes(store) == 0
    trip_again(store)
    assert torch.equal(kept[0], (x.detach() * 2).exp())
    store.finish(KEY)
    assert torch.equal(kept[0], (x.detach() * 2).exp())


def trip_again(store: ActivationStore) -> None:
    """Another set of the same sizes gets memory while W is still owed."""
    with store.saving((0, 1)):
        y = (tensor(ROWS, HIDDEN, seed=1) * 2).exp().sum()
    trip(store, (0, 1))
    y.backward()
    store.finish((0, 1))


def test_bytes_and_sets_are_counted(make_engine):
    store = make_store(make_engine)
    nbytes = ROWS * HIDDEN * 4
    assert device_sets(store) == 0
    with store.saving(KEY):
        y = (tensor(ROWS, HIDDEN) * 2).exp().tanh().sum()
    assert (device_bytes(store), host_bytes(store)) == (2 * nbytes, 0)
    store.offload(KEY)
    slot = 2 * 1024  # 768 bytes each, padded to 512
    assert host_bytes(store) == slot and device_bytes(store) == 2 * nbytes
    assert (device_sets(store), host_sets(store)) == (1, 1)
    store.release(KEY)
    assert device_bytes(store) == 0
    assert (device_sets(store), host_sets(store)) == (0, 1)
    store.prepare(KEY)
    assert device_bytes(store) == 2 * nbytes
    assert (device_sets(store), host_sets(store)) == (1, 1)
    store.reload(KEY)
    assert (device_sets(store), host_sets(store)) == (1, 0)
    y.backward()
    store.finish(KEY)
    store.end_step()
    report = store.report()
    assert report["peak_device_bytes"] == 2 * nbytes
    assert report["peak_device_sets"] == report["peak_host_sets"] == 1
    assert report["arena_peak_bytes"] == slot == report["arena_bytes"]
    assert report["held_elsewhere_bytes"] == 0 and report["offloads"] == 1


def test_memory_that_somebody_else_holds_is_reported(make_engine):
    store = make_store(make_engine)
    with store.saving(KEY):
        h = tensor(ROWS, HIDDEN).exp()
        y = h.sum()
    trip(store)
    assert store.statistics.held_elsewhere_bytes == ROWS * HIDDEN * 4
    y.backward()
    store.finish(KEY)


def test_what_outlives_a_set_stays(make_engine):
    """A part of it that is saved is never copied; memory that nobody has named so is."""
    store = make_store(make_engine)
    kept, copied = (torch.zeros(2 * ROWS, HIDDEN) for _ in range(2))
    store.stays(kept)
    with store.saving(KEY):
        x = tensor(ROWS, HIDDEN)
        y = (x * kept[:ROWS]).sum() + (x * copied[:ROWS]).sum()
    assert store.statistics.kept_bytes["held elsewhere"] == 4 * ROWS * HIDDEN
    leave(store)
    assert store.away() == [KEY]
    come_back(store)
    assert store.away() == []
    y.backward()
    store.finish(KEY)


def test_an_input_without_storage_gets_its_gradient():
    x = tensor(ROWS, HIDDEN)
    pointer = x.data_ptr()
    y = x * 2 + x.exp()
    release_storage(x)
    assert x.shape == (ROWS, HIDDEN) and x.data_ptr() != pointer
    assert x.untyped_storage().nbytes() == 4 and x.requires_grad and x.is_leaf
    y.sum().backward()
    assert x.grad.shape == x.shape and x.grad.is_contiguous()


def test_deallocated_outputs(make_engine):
    """Megatron drops an output's values once they are sent (``deallocate_pipeline_outputs``), also
    where the last operation has saved them."""
    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = (x * 2).tanh()
    values = y.detach().clone()
    y.data = torch.empty((1,))
    release_storage(x)
    trip(store)
    assert store.statistics.held_elsewhere_bytes == 0
    grad = tensor(ROWS, HIDDEN, seed=1, grad=False)
    # Without autograd's check of the output's shape, as Megatron calls it.
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    store.finish(KEY)
    expected = tensor(ROWS, HIDDEN)
    (expected * 2).tanh().backward(grad)
    assert torch.equal((tensor(ROWS, HIDDEN) * 2).tanh(), values)
    assert torch.equal(x.grad, expected.grad)


def test_two_uses_of_a_stage_input(make_engine):
    """The gradient of a leaf without storage is summed from several places."""
    compare(make_engine, lambda x: x.exp() * x.t().contiguous().t() + x[:, :1] * x.sum(0))


def test_a_full_arena_keeps_sets_here(make_engine):
    store = make_store(make_engine)
    for step in range(2):
        losses = []
        for microbatch in range(1 + step):
            with store.saving((0, microbatch)):
                losses.append(tensor(ROWS, HIDDEN, seed=microbatch).exp().sum())
            leave(store, (0, microbatch))
        assert device_sets(store) == step
        for microbatch, loss in enumerate(losses):
            come_back(store, (0, microbatch))
            loss.backward()
            store.finish((0, microbatch))
        store.end_step()
    assert store.report()["refused"] == 1


def test_a_graph_dropped_under_a_reload(make_engine):
    """Nobody may get the memory that the copy still writes to."""
    gate = Gate(Direction.TO_DEVICE)
    engine = make_engine(faults=Faults(gate.delay, poison=True))
    store = ActivationStore(engine, min_bytes=1)
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN).exp().sum()
    leave(store)
    come_back(store)
    del y
    gc.collect()
    assert device_bytes(store) == ROWS * HIDDEN * 4
    gate.open()
    store.finish(KEY)
    assert engine.counters.bytes_to_device == ROWS * HIDDEN * 4
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN).exp().sum()
    leave(store)
    del y
    gc.collect()
    come_back(store)  # Nobody needs it any more: nothing to copy.
    store.finish(KEY)
    assert engine.counters.bytes_to_device == ROWS * HIDDEN * 4


def test_directions_are_throttled(make_engine):
    device = CpuDevice(throttle_bytes_per_second={Direction.TO_HOST: 1e6})
    block = torch.ones(30_000, dtype=torch.uint8)
    begun = device.record()
    event = device.copy(0, Direction.TO_HOST, [(torch.empty_like(block), block)], [])
    event.synchronize()
    assert device.waited(begun, event) >= 0.03
    device.close()
