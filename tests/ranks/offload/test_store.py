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
from megatron_ext.offload.blocks import form_of, release_storage

from .store_trips import (
    HIDDEN,
    KEY,
    ROWS,
    come_back,
    compare,
    device_bytes,
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


@pytest.mark.parametrize(
    "tensor, dense",
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 1, 4).transpose(0, 2), True),
        (torch.empty(()), True),
        (torch.empty(3, 4)[1:], False),  # not from the start
        (torch.empty(3, 4)[:2], True),
        (torch.empty(3, 4)[:, :3], False),
        (torch.empty(3, 1).expand(3, 4), False),
        (torch.empty(9).as_strided((3, 3), (1, 1)), False),
        (torch.empty(9).as_strided((2, 3), (3, 2)), False),
    ],
)
def test_only_memory_without_gaps_is_copied_as_it_is(tensor, dense):
    form = form_of(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset())
    assert form.dense is dense
    assert form is form_of(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset()
    )


def test_later_sets_may_differ(make_engine):
    """Lengths, dtypes, views and the number of tensors change; places on the host are the same."""
    store = make_store(make_engine, policy="single")
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


def test_tensors_over_places_are_kept_for_equal_sets(make_engine, monkeypatch):
    monkeypatch.setattr("megatron_ext.offload.arena._KEPT_VIEWS", 4)
    arena = make_engine(arena_bytes=4096).arena
    slot = arena.allocate(2048)
    forms = (form_of((8, 4), (1, 8), torch.float32), form_of((16,), (1,), torch.uint8))
    first = slot.views(forms)
    assert [view.stride() for view in first] == [(1, 8), (1,)]
    assert first[1].data_ptr() - first[0].data_ptr() == 512
    arena.free(slot)
    assert arena.allocate(2048).views(forms) is first
    other = arena.allocate(2048).views(forms)
    assert other is not first and other[0].data_ptr() == first[0].data_ptr() + 2048
    assert slot.views(forms) is first  # Four views are within the bound.
    for length in range(1, 5):
        slot.views((form_of((length,), (1,), torch.uint8),))
    assert slot.views(forms) is not first  # Not without bound.


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


def test_a_stages_input_is_no_parameter(make_engine):
    """Saved by the chunk's first layer, whose weight gradient needs its values from the set."""
    weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
    store, seen = make_store(make_engine, weight), []
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = SavesWeight.apply(x, weight, store, seen)
    release_storage(x)
    trip(store)
    y.sum().backward()
    assert seen[0] is weight
    assert torch.equal(seen[1], tensor(ROWS, HIDDEN))
    store.finish(KEY)


@pytest.mark.parametrize("mark", ["_TE_do_not_offload", "_do_not_offload", "weight_offloading"])
def test_marked_tensors_stay(make_engine, mark):
    store = make_store(make_engine)
    h = tensor(ROWS, HIDDEN, grad=False)
    setattr(h, mark, True)
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN) * h
    assert store.statistics.kept_bytes == {"marked": ROWS * HIDDEN * 4}
    trip(store)
    y.sum().backward()
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


def test_other_devices_stay(make_engine):
    """On CUDA, tensors in host memory; here it is the other way round."""
    store = make_store(make_engine, device_type="meta")
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN).exp()
    assert store.statistics.kept_bytes == {"other device": ROWS * HIDDEN * 4}
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


class WritesIntoSaved(torch.autograd.Function):
    """The last that needs what it saved may do that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.mul_(grad)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("away", [False, True])
def test_a_backward_pass_writes_what_another_one_reads(make_engine, rows, away):
    """A storage that is copied as it is saved, and one of which several parts are."""
    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        h = torch.sigmoid(x)
        y = WritesIntoSaved.apply(h[rows:]).sum()
    if away:
        trip(store)
    with pytest.raises(RuntimeError, match=r"in activation set \(0, 0\) was modified in place"):
        y.backward()
    store.clear()


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


def test_double_backward(make_engine):
    store = make_store(make_engine)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = x.exp().sum()
    trip(store)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, x.detach().exp())
    store.finish(KEY)


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
