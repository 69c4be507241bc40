"""What autograd may save, and what happens to it between F and B: gradients stay bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_ext.offload.blocks import hollow
from megatron_ext.offload.device import CpuDevice, Direction, Faults
from megatron_ext.offload.sets import SetBytes, State
from megatron_ext.offload.store import ActivationStore

pytestmark = pytest.mark.timeout(60)

ROWS, HIDDEN = 12, 16
KEY = (0, 0)


def make_store(make_engine: Any, *resident: torch.Tensor, **kwargs: Any) -> ActivationStore:
    """Poisons what it frees; every copy takes a moment."""
    faults = Faults(delay=lambda way: 0.001, poison=True)
    engine = make_engine(kwargs.pop("policy", "dual"), faults=faults)
    kwargs.setdefault("min_bytes", 1)
    return ActivationStore(engine, lambda: resident, **kwargs)


def leave(store: ActivationStore, key: Any = KEY) -> None:
    """OFFLOAD and RELEASE."""
    store.offload(key)
    store.release(key)


def come_back(store: ActivationStore, key: Any = KEY) -> None:
    """PREPARE and RELOAD."""
    store.prepare(key)
    store.reload(key)


def trip(store: ActivationStore, key: Any = KEY) -> None:
    """Out and back."""
    leave(store, key)
    come_back(store, key)


def tensor(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def compare(
    make_engine: Any, function: Callable[[torch.Tensor], torch.Tensor], *shape: int, **kwargs: Any
) -> ActivationStore:
    """The gradient of ``function`` with its set on the host in between, and without."""
    expected = tensor(*(shape or (ROWS, HIDDEN)))
    function(expected).square().sum().backward()
    store = make_store(make_engine, **kwargs)
    x = tensor(*(shape or (ROWS, HIDDEN)))
    with store.saving(KEY):
        loss = function(x).square().sum()
    hollow(x)
    trip(store)
    loss.backward()
    store.finish(KEY)
    store.end_step()
    assert torch.equal(x.grad, expected.grad)
    return store


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: (x * 2).exp(),
    "transposed": lambda x: (x * 2).t().exp() * (x * 3).t(),
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
def test_views(make_engine, name, coverage):
    store = compare(make_engine, VIEWS[name], min_coverage=coverage)
    if coverage == 0:
        assert store.engine.counters.bytes_to_host > 0
        assert store.engine.counters.bytes_to_host == store.engine.counters.bytes_to_device


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
    assert store.set_bytes(KEY).device == ROWS * HIDDEN * 4
    assert store.kept["parameter"] == (HIDDEN * HIDDEN + HIDDEN) * 4
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
        ctx.seen.append(ctx.store.parameter(weight))
        ctx.seen.append(ctx.store.parameter(x))
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


@pytest.mark.parametrize("mark", ["_TE_do_not_offload", "_do_not_offload", "weight_offloading"])
def test_marked_tensors_stay(make_engine, mark):
    store = make_store(make_engine)
    h = tensor(ROWS, HIDDEN, grad=False)
    setattr(h, mark, True)
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN) * h
    assert store.kept == {"marked": ROWS * HIDDEN * 4}
    trip(store)
    y.sum().backward()
    store.finish(KEY)


def test_small_and_unwanted_tensors_stay(make_engine):
    wanted = tensor(ROWS, HIDDEN, seed=1, grad=False)
    store = make_store(make_engine, min_bytes=256, keep=lambda t: t.data_ptr() == wanted.data_ptr())
    with store.saving(KEY):
        y = (tensor(ROWS, HIDDEN) * wanted).sum(-1).exp()
    assert store.kept == {"kept on request": ROWS * HIDDEN * 4, "small": ROWS * 4}
    trip(store)
    y.sum().backward()
    store.finish(KEY)


def test_other_devices_stay(make_engine):
    """On CUDA, tensors in host memory; here it is the other way round."""
    store = make_store(make_engine)
    store.engine.device.torch_device = torch.device("meta")
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN).exp()
    assert store.kept == {"other device": ROWS * HIDDEN * 4}
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


def test_forward_only_does_nothing(make_engine):
    store = make_store(make_engine)
    with torch.no_grad(), store.saving(KEY):
        tensor(ROWS, HIDDEN).exp()
    assert store.device_sets() == 0
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
    assert saved.grad_fn._saved_result is not None and not store.kept
    with store.saving(KEY):  # The same key again.
        y = tensor(ROWS, HIDDEN).exp()
    store.offload(KEY)
    with store.saving((0, 1)):
        tensor(ROWS, HIDDEN).exp()
    store.clear()
    assert store.device_sets() == store.host_sets() == store.engine.arena.used_bytes == 0
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
    assert store.set_bytes(KEY).device == 0
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
    assert store.device_sets() == 0
    with store.saving(KEY):
        y = (tensor(ROWS, HIDDEN) * 2).exp().tanh().sum()
    assert store.set_bytes(KEY) == SetBytes(2 * nbytes, 0, 0)
    store.offload(KEY)
    slot = 2 * 1024  # 768 bytes each, padded to 512
    assert store.set_bytes(KEY).host == slot and store.state(KEY) is State.LEAVING
    assert (store.device_sets(), store.host_sets()) == (1, 1)
    store.release(KEY)
    assert store.set_bytes(KEY).device == 0
    assert (store.device_sets(), store.host_sets()) == (0, 1)
    store.prepare(KEY)
    assert store.set_bytes(KEY).device == 2 * nbytes
    assert (store.device_sets(), store.host_sets()) == (1, 1)
    store.reload(KEY)
    assert (store.device_sets(), store.host_sets()) == (1, 0)
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
    assert store.held_elsewhere_bytes == ROWS * HIDDEN * 4
    y.backward()
    store.finish(KEY)


def test_a_hollow_input_gets_its_gradient():
    x = tensor(ROWS, HIDDEN)
    pointer = x.data_ptr()
    y = x * 2 + x.exp()
    hollow(x)
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
    hollow(x)
    trip(store)
    assert store.held_elsewhere_bytes == 0
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
    """The gradient of a hollow leaf is summed from several places."""
    compare(make_engine, lambda x: x.exp() * x.t().contiguous().t() + x[:, :1] * x.sum(0))


def test_a_full_arena_keeps_sets_here(make_engine):
    store = make_store(make_engine)
    for step in range(2):
        losses = []
        for microbatch in range(1 + step):
            with store.saving((0, microbatch)):
                losses.append(tensor(ROWS, HIDDEN, seed=microbatch).exp().sum())
            leave(store, (0, microbatch))
        assert store.device_sets() == step
        for microbatch, loss in enumerate(losses):
            come_back(store, (0, microbatch))
            loss.backward()
            store.finish((0, microbatch))
        store.end_step()
    assert store.report()["refused"] == 1


def test_patient_release_waits_for_nobody(make_engine):
    engine = make_engine(faults=Faults(delay=lambda way: 0.05, poison=True))
    store = ActivationStore(engine, min_bytes=1, patient=True)
    x = tensor(ROWS, HIDDEN)
    with store.saving(KEY):
        y = x.exp().sum()
    leave(store)
    assert store.late_releases == 1 and store.device_sets() == 1
    come_back(store)  # Needed before it was gone: nothing is copied back.
    y.backward()
    store.finish(KEY)
    assert engine.counters.reloads == 0 and engine.counters.waited_releases == 0
    assert torch.equal(x.grad, x.detach().exp())
    with store.saving(KEY):
        y = x.exp().sum()
    leave(store)
    engine.synchronize()
    with store.saving((0, 1)):  # Any later call drops what is late.
        pass
    assert store.set_bytes(KEY).device == 0
    come_back(store)
    y.backward()
    store.finish(KEY)
    store.finish((0, 1))


def test_a_graph_dropped_under_a_reload(make_engine):
    """Nobody may get the memory that the copy still writes to."""
    engine = make_engine(faults=Faults(delay=lambda way: 0.03, poison=True))
    store = ActivationStore(engine, min_bytes=1)
    with store.saving(KEY):
        y = tensor(ROWS, HIDDEN).exp().sum()
    leave(store)
    come_back(store)
    del y
    gc.collect()
    assert store.set_bytes(KEY).device == ROWS * HIDDEN * 4
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
    event = device.copy(0, Direction.TO_HOST, [(torch.empty_like(block), block)], [])
    event.synchronize()
    assert event.span[1] - event.span[0] >= 0.03
    device.close()
