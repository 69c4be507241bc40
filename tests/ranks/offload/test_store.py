"""What autograd may save, and that it comes back: gradients stay bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_ext.integration.saved_parameters import parameter_of
from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.device import Direction
from megatron_ext.offload.store import ActivationStore
from tests.support.faulty_device import Faults
from tests.support.gate import Gate

from .store_trips import (
    HIDDEN,
    KEY,
    ROWS,
    come_back,
    compare,
    device_bytes,
    device_sets,
    host_sets,
    leave,
    make_store,
    tensor,
    trip,
)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: (x * 2).exp(),
    "transposed": lambda x: (x * 2).t().exp() * (x * 3).t(),
    "permuted": lambda x: (x * 2).view(4, 3, 16).permute(2, 0, 1).exp().sum(0) * 2,
    "columns": lambda x: (x * 2)[:, 3:14] * (x * 3)[:, 2:13],
    "every second": lambda x: (x * 2)[::2, ::2] * (x * 3)[::2, ::2],
    "expanded": lambda x: (x * 2)[:, :1].expand(-1, 7) * (x * 3)[:, 1:2].expand(-1, 7),
    "expanded scalar": lambda x: (x * 2).sum().expand(5, 5) * (x * 3).sum().expand(5, 5),
    "same storage twice": lambda x: (h := x * 2)[:, :8] * h[:, 8:] + h[:, 4:12].exp(),
    "output saved": lambda x: torch.tanh(torch.sigmoid(x * 2)),
    "in place, before it is saved": lambda x: (x * 2).tanh_() * x,
    "stage input": lambda x: x * x,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 8, 2)) ** 2),
    "conjugated": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 8, 2)).conj() ** 2),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("coverage", [0.0, 0.9])
def test_views(make_engine, monkeypatch, name, coverage):
    monkeypatch.setattr("megatron_ext.offload.blocks.MIN_COVERAGE", coverage)
    store = compare(make_engine, VIEWS[name])
    if coverage == 0:
        assert store.engine.counters.bytes_to_host > 0
        assert store.engine.counters.bytes_to_host == store.engine.counters.bytes_to_device


@pytest.mark.parametrize(("columns", "travels"), [(7, False), (9, True)])
def test_memory_of_which_less_than_half_is_needed_stays(make_engine, columns, travels):
    """Two factors, columns of wider tensors, and what ``compare`` squares: their product."""
    store = compare(make_engine, lambda x: (x * 2)[:, :columns] * (x * 3)[:, :columns])
    product, factor = ROWS * columns * 4, ((ROWS - 1) * HIDDEN + columns) * 4
    assert store.engine.counters.bytes_to_host == product + 2 * factor * travels


def test_later_sets_may_differ(make_engine):
    """Lengths, dtypes, views and the number of tensors change; places on the host are the same."""
    store = make_store(make_engine)
    functions = [
        lambda x: x.exp() * x,
        lambda x: x.double().exp().float().t(),
        lambda x: (h := x * 2)[:, :8] * h[:, 8:],
        lambda x: x.exp().sin().exp(),
    ]
    for number, rows in enumerate((12, 3, 12, 7, 12, 3, 12, 7)):
        expected, x = tensor(rows, HIDDEN), tensor(rows, HIDDEN)
        function = functions[number // 2 % 4]
        function(expected).sum().backward()
        with store.saving(KEY):
            loss = function(x).sum()
        trip(store)
        loss.backward()
        store.finish(KEY)
        assert torch.equal(x.grad, expected.grad)


class ByteView(torch.autograd.Function):
    """Saves one storage under two dtypes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y, y.view(torch.int32)[:, 2:])
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        y, bits = ctx.saved_tensors
        assert torch.equal(y.view(torch.int32)[:, 2:], bits) and bits.dtype == torch.int32
        return grad * 4 * y + bits.sum()


def test_dtype_views_share_one_copy(make_engine):
    store = compare(make_engine, ByteView.apply)
    # The function's storage, and the result that the loss squares.
    assert store.engine.counters.bytes_to_host == 2 * ROWS * HIDDEN * 4


def test_a_storage_is_copied_once_and_only_its_saved_range(make_engine):
    store = make_store(make_engine)
    with store.saving(KEY):
        h = tensor(64, 256) * 2
        y = h[8:16] * h[16:24] + h[8:24:2].exp()
    del h
    store.offload(KEY)
    # Rows 8 to 24 of the one storage, and the result of exp.
    assert store.engine.counters.bytes_to_host == (16 + 8) * 256 * 4
    store.release(KEY)
    come_back(store)
    y.sum().backward()
    store.finish(KEY)


def test_parameters_and_their_views_stay(make_engine):
    """A plain Linear saves ``weight.t()``, which is no Parameter; DDP's are views of one buffer."""
    flat = torch.randn(HIDDEN * HIDDEN)
    linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
    linear.weight.data = flat.view(HIDDEN, HIDDEN)
    other = flat[:HIDDEN]
    store = make_store(make_engine, *linear.parameters())
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = (linear(x * 2) * other).sum()
    assert device_bytes(store) == ROWS * HIDDEN * 4
    assert store.statistics.kept_bytes["parameter"] == (HIDDEN * HIDDEN + HIDDEN) * 4
    trip(store)
    y.backward()
    store.finish(KEY)
    expected = tensor(ROWS, HIDDEN)
    (nn.functional.linear(expected * 2, flat.view(HIDDEN, HIDDEN)) * other).sum().backward()
    assert torch.equal(x.grad, expected.grad)


class SavesWeight(torch.autograd.Function):
    """As Megatron's linear layers: looks at attributes of the saved weight in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, store: Any, seen: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.seen = store, seen
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.seen.append(parameter_of(weight))
        ctx.seen.append(parameter_of(x))
        return grad @ weight, grad.t() @ x, None, None


def test_a_saved_parameter_can_be_recognised(make_engine):
    weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
    store, seen = make_store(make_engine, weight), []
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = SavesWeight.apply(x * 2, weight, store, seen)
    trip(store)
    y.sum().backward()
    assert seen[0] is weight
    assert torch.equal(seen[1], x * 2)
    store.finish(KEY)


def test_small_and_unwanted_tensors_stay(make_engine):
    wanted = tensor(ROWS, HIDDEN, seed=1, grad=False)
    store = make_store(make_engine, min_bytes=256, keep=lambda t: t.data_ptr() == wanted.data_ptr())
    with store.saving(KEY):
        y = (tensor(ROWS, HIDDEN) * wanted).sum(-1).exp()
    assert store.statistics.kept_bytes == {"policy": ROWS * HIDDEN * 4, "small": ROWS * 4}
    trip(store)
    y.sum().backward()
    store.finish(KEY)


@pytest.mark.parametrize("when", ["in F", "before OFFLOAD", "before RELEASE", "before B", "kept"])
def test_in_place_after_save_raises(make_engine, when):
    store = make_store(make_engine, min_bytes=1 << 20 if when == "kept" else 1)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        h = x * 2
        y = torch.sigmoid(h)
        z = y.sum()
        if when == "in F":
            y.detach().add_(1)
    said = (
        r"modified in place afterwards: shape \(12, 16\), torch.float32, .*version 0 when saved "
        "and 1 now"
    )
    if when == "before OFFLOAD":
        y.detach().add_(1)
    if when == "before RELEASE":
        store.offload(KEY)
        y.detach().add_(1)
    if when in ("before B", "kept"):
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match=said):
            z.backward()
    else:
        with pytest.raises(RuntimeError, match=said):
            leave(store) if when != "before RELEASE" else store.release(KEY)
    store.clear()
    assert store.engine.arena.used_bytes == 0


def test_writes_after_release_do_no_harm(make_engine):
    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = torch.sigmoid(x)
        z = y.sum()
    leave(store)
    with torch.no_grad():
        y.fill_(7)
    come_back(store)
    z.backward()
    s = torch.sigmoid(x.detach())
    assert torch.equal(x.grad, (1 - s) * s)
    store.finish(KEY)


def test_repeated_backward(make_engine):
    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = (x.exp() * x).sum()
    trip(store)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, retain_graph=True)
    store.finish(KEY)
    gc.collect()
    # The graph is still there, so what it needs must be.
    (third,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second) and torch.equal(first, third)


class Router(nn.Module):
    """Experts that get other numbers of rows for each microbatch, some none; nested modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        place = (h[:, 0] * 10).long() % 3
        parts = [e(h[place == n]) for n, e in enumerate(self.experts) if (place == n).any()]
        return torch.cat(parts).sum(0, keepdim=True) + x


def test_changed_shapes_and_counts(make_engine):
    model = Router()
    rows = [7, 20, 1, 13, 2]
    store = make_store(make_engine, *model.parameters())
    grads = []
    for offloaded in (False, True):
        losses = {}
        for microbatch, count in enumerate(rows):
            x = tensor(count, HIDDEN, seed=microbatch)
            if offloaded:
                with store.saving((0, microbatch)):
                    losses[microbatch] = model(x).square().mean()
                leave(store, (0, microbatch))
            else:
                losses[microbatch] = model(x).square().mean()
        for microbatch, loss in losses.items():
            if offloaded:
                come_back(store, (0, microbatch))
            loss.backward()
            if offloaded:
                store.finish((0, microbatch))
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    store.end_step()
    assert len(grads[0]) == len(grads[1]) > 8
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_inside(make_engine, reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))

    def model(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x * 2, use_reentrant=reentrant).tanh()

    store = compare(make_engine, model)
    # The checkpoint's input, tanh's result, and nothing of what is recomputed.
    assert store.engine.counters.bytes_to_host == 2 * ROWS * HIDDEN * 4


def test_discarded_outputs_stay(make_engine):
    """Megatron's output-discarding recompute empties a saved storage and fills it before B."""
    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        h = x.exp()
        y = (h * h.detach()).sum()
        h.untyped_storage().resize_(0)
    trip(store)
    assert store.engine.counters.bytes_to_host == 0
    h.untyped_storage().resize_(ROWS * HIDDEN * 4)
    h.untyped_storage().copy_(x.detach().exp().untyped_storage())
    y.backward()
    assert torch.equal(x.grad, x.detach().exp() * x.detach().exp())
    store.finish(KEY)


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
    with store.saving((0, 1)):  # another set of the same sizes gets memory while W is owed
        z = (tensor(ROWS, HIDDEN, seed=1) * 2).exp().sum()
    trip(store, (0, 1))
    z.backward()
    store.finish((0, 1))
    assert torch.equal(kept[0], (x.detach() * 2).exp())
    store.finish(KEY)
    assert torch.equal(kept[0], (x.detach() * 2).exp())


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
