"""Gradients that are written outside of autograd: as autograd writes them, past no hook."""

from __future__ import annotations

import contextlib
import types
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def weight() -> Any:
    import torch

    return torch.nn.Parameter(torch.ones(4, 3))


def _node(weight: Any) -> Any:
    import torch

    return torch.autograd.graph.get_gradient_edge(weight).node


def test_a_trainers_own_buffer_gets_gradients_in_place(weight: Any) -> None:
    import torch

    from megatron_ext.integration.gradients import accumulate

    buffer = torch.ones(12)
    weight.grad = buffer.view(4, 3)
    accumulate(weight, torch.full((4, 3), 2.0))
    accumulate(weight, torch.full((4, 3), 4.0))
    assert buffer.tolist() == [7.0] * 12 and weight.grad.data_ptr() == buffer.data_ptr()


def test_gradients_have_the_type_that_the_weight_asks_for(weight: Any) -> None:
    """Sums over microbatches in fp32, of a weight in bf16."""
    import torch

    from megatron_ext.integration.gradients import accumulate

    narrow = torch.nn.Parameter(weight.detach().bfloat16())
    narrow.grad_dtype = torch.float32
    for _ in range(2):
        accumulate(narrow, torch.full((4, 3), 1 + 2**-7, dtype=torch.bfloat16))
    assert narrow.grad.dtype is torch.float32 and (narrow.grad == 2 + 2**-6).all()


@pytest.mark.parametrize("named", [True, False])
def test_what_finishes_gradients_gets_the_groups_of_the_call(named: bool) -> None:
    """By name, or with all other arguments, as a trainer's own function may take them."""
    from megatron_ext.integration.pipeline import finalize

    seen: list[Any] = []

    def by_name(models: Any, tokens: Any, pg_collection: Any = None) -> None:
        seen.append(pg_collection)

    def with_all(*args: Any, **more: Any) -> None:
        seen.extend(more.values())

    function = by_name if named else with_all
    config = types.SimpleNamespace(
        finalize_model_grads_func=function, calculate_per_token_loss=False
    )
    iteration: Any = types.SimpleNamespace(config=config, models=[])
    assert finalize(iteration, None, "groups", True)
    assert seen == (["groups"] if named else ["groups", True])


def test_which_hooks_are_the_users(weight: Any) -> None:
    """Not Megatron's, wrapped by us or not; a hook counts from when it is put there until it is
    removed."""
    from megatron.core.distributed import DistributedDataParallel

    from megatron_ext.integration.gradients import gradient_hook
    from megatron_ext.runtime.weight_hooks import foreign_hooks

    make, node = DistributedDataParallel._make_backward_post_hook, _node(weight)
    node.register_hook(make(types.SimpleNamespace(), weight))
    node.register_hook(gradient_hook().make(make)(types.SimpleNamespace(), weight))
    assert foreign_hooks(weight) == ()
    handles = {
        "tensor hook": weight.register_hook(print),
        "post-accumulate-grad hook": weight.register_post_accumulate_grad_hook(print),
        "hook of the gradient accumulator": node.register_hook(print),
    }
    assert foreign_hooks(weight) == tuple(handles)
    for kind, handle in handles.items():
        handle.remove()
        assert kind not in foreign_hooks(weight)
    assert foreign_hooks(weight) == ()
    before = node.register_prehook(print)
    assert foreign_hooks(weight) == ("hook of the gradient accumulator",)
    weight.requires_grad_(False)
    assert foreign_hooks(weight) == ()
    before.remove()


def test_hooks_that_are_not_called_count(weight: Any) -> None:
    """Experts in chunks ask in a backward pass of their own, in which no tensor hook is called."""
    from megatron_ext.runtime.weight_hooks import foreign_hooks, without_tensor_hooks

    calls: list[Any] = []
    weight.register_hook(calls.append)
    with without_tensor_hooks([weight]):
        weight.sum().backward()
        assert foreign_hooks(weight) == ("tensor hook",) and calls == []
    assert foreign_hooks(weight) == ("tensor hook",)
    weight.sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("moved", [False, True])
def test_saved_tensors_are_parameters_only_where_they_are_saved_as_such(
    weight: Any, moved: bool
) -> None:
    """Not what lies where a weight has been, of a model that was moved meanwhile."""
    import torch

    from megatron_ext.integration.saved_parameters import parameter_of

    before = weight.data
    if moved:
        weight.data = before.clone()
    seen: list[Any] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.extend(map(parameter_of, ctx.saved_tensors))
            return grad, grad

    with torch.autograd.graph.save_on_cpu():
        y = Product.apply(before, weight)
    y.sum().backward()
    assert seen[1] is weight and seen[0] is not weight


def test_what_is_known_of_hooks_goes_with_the_graph(weight: Any) -> None:
    """A new accumulator, in which nobody has put a hook, is asked again."""
    from megatron_ext.runtime import weight_hooks

    node = _node(weight)
    node.register_hook(print)
    assert weight_hooks.foreign_hooks(weight)
    assert id(weight) in weight_hooks._AFTER and id(weight) in weight_hooks._BEFORE
    del node
    assert id(weight) not in weight_hooks._AFTER and id(weight) not in weight_hooks._BEFORE
    assert weight_hooks.foreign_hooks(weight) == ()


@pytest.mark.parametrize("reduced", [False, True], ids=["bare", "ddp"])
@pytest.mark.parametrize("op", ["T", "G"])
def test_hooks_on_a_part_of_the_vocabulary(weight: Any, op: str, reduced: bool) -> None:
    """They see a microbatch's gradient once, and Megatron's hook what
    they have made of it; without them it is added to ``main_grad`` or in place, as before."""
    import torch

    from megatron_ext.integration.features.vocabulary.run import VocabularyRunner
    from megatron_ext.integration.gradients import gradient_hook
    from megatron_ext.schedule.vocabulary import G, T

    ready: list[Any] = []

    def ddps(self: Any, parameter: Any) -> Any:
        def hook(*unused: Any) -> None:
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
            ready.append(parameter)

        return hook

    buffer = weight.grad = torch.zeros(4, 3)
    node = _node(weight)
    if reduced:
        weight.main_grad, weight.grad = buffer, None
        node.register_hook(gradient_hook().make(ddps)(None, weight))
    runner: Any = object.__new__(VocabularyRunner)
    config = types.SimpleNamespace(gradient_accumulation_fusion=False)
    runner._it = types.SimpleNamespace(config=config, num_microbatches=9)
    runner._last_use = {id(weight): T}
    runner.syncing = lambda *unused: contextlib.nullcontext()
    x, grad = torch.ones(4, 3), torch.full((4, 4), 0.5)
    given = (x, grad) if op == "T" else torch.full((4, 3), 2.0)

    with torch.no_grad():
        runner._add(T if op == "T" else G, 0, weight, given)
        assert (buffer == 2).all()
        calls: list[Any] = []
        weight.register_hook(lambda g: calls.append(g.clone()) or g * 3 - 1)
        runner._add(T if op == "T" else G, 1, weight, given)
    assert len(calls) == 1 and (calls[0] == 2).all() and (buffer == 7).all()
    assert len(ready) == (2 if reduced else 0)


def test_tied_copies_without_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are in ``grad``, which may be a trainer's buffer."""
    import torch

    from megatron_ext.integration.features import v_placement as vee

    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    chunks = [
        types.SimpleNamespace(
            share_embeddings_and_output_weights=True,
            shared_embedding_or_output_weight=lambda weight=weight: weight,
        )
        for weight in weights
    ]
    monkeypatch.setattr(vee, "pp_rank", lambda: 0)
    vee.reduce_tied_gradients(chunks)  # frozen
    buffers = [torch.full((2, 2), value) for value in (1.0, 2.0)]
    for one, buffer in zip(weights, buffers):
        one.grad = buffer
    vee.reduce_tied_gradients(chunks)
    assert all((buffer == 3).all() for buffer in buffers)


def test_a_module_is_known_by_the_weights_that_it_has_now() -> None:
    """Of one that postpones already, where others have taken their place."""
    import torch

    from megatron_ext.integration.split_te import attach
    from megatron_ext.runtime.wgrad import WeightGradStore

    class Linear(torch.nn.Linear):
        fuse_wgrad_accumulation = use_bias = False
        wgrad_store: Any = SimpleNamespace(delay_wgrad_compute=bool, put=print, pop=print)

        def backward_dw(self) -> None: ...

    module = Linear(2, 2, bias=False)
    store = WeightGradStore()
    (ours,) = attach(module, store)
    module.load_state_dict(Linear(2, 2, bias=False).state_dict(), assign=True)
    assert attach(module, store) == []
    assert ours._weights[0] is module.weight
