"""Transformer Engine's linear modules as B and W: with stand-ins, and against its real source.

The stand-ins run everywhere. What they are taken to do is checked against Transformer Engine's own
Python files where there are any: an installed ``transformer_engine``, or unpacked wheels given in
MEGATRON_EXT_TE_SOURCE (the wheel is plain Python; ``pip download --no-deps transformer-engine``).
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import os
import queue
import re
import types
import weakref
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def te() -> Any:
    """The stand-ins."""
    from tests.megatron.cases import fake_te

    return fake_te


@pytest.fixture(scope="module")
def checks() -> Any:
    """Checks that need torch."""
    from tests.megatron.cases import te_checks

    return te_checks


def _input(microbatch: int, *shape: int) -> Any:
    import torch

    x = torch.randn(shape, generator=torch.Generator().manual_seed(microbatch))
    return x.requires_grad_(True)


def _dense(module: Any, microbatch: int) -> Any:
    y = module(_input(microbatch, 6, 8))
    if isinstance(y, tuple):
        # As Megatron does it where the bias is added later: autograd meets it before the linear.
        y = y[0].square() + y[1]
    return y.square().sum()


def _experts(module: Any, microbatch: int) -> Any:
    splits = ([2, 0, 4], [0, 0, 6], [3, 3, 0], [1, 2, 3])
    y = module(_input(microbatch, 6, 8), splits[microbatch])
    if isinstance(y, tuple):
        y = y[0].square() + sum(y[1])
    return y.square().sum()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "in-w", "in-b", "outside"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_linear(te: Any, checks: Any, kind: str, bias: str, fused: bool) -> None:
    module = getattr(te, kind)(
        8, 5, bias=bias != "none", return_bias=bias == "outside", fused=fused
    )
    module.early_bias = bias == "in-b"
    checks.split_equals_fused(module, _dense)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "in-w", "outside"])
def test_grouped_with_idle_experts(te: Any, checks: Any, bias: str, fused: bool) -> None:
    module = te.GroupedLinear(3, 8, 5, bias != "none", return_bias=bias == "outside", fused=fused)
    checks.split_equals_fused(module, _experts)


def _tensor_hook(parameter: Any, see: Any) -> Any:
    return parameter.register_hook(lambda grad: see(grad.clone()) or grad * 3)


def _post_accumulate_hook(parameter: Any, see: Any) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: see(p.grad.clone()))


def _accumulator_hook(parameter: Any, see: Any) -> Any:
    """It runs behind Megatron's, which takes the gradient."""
    import torch

    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return node.register_hook(lambda *_: see(parameter.main_grad.clone()))


def _accumulator_prehook(parameter: Any, see: Any) -> Any:
    import torch

    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return node.register_prehook(lambda grads: see(grads[0].clone()))


@pytest.mark.parametrize(
    "hook", [_tensor_hook, _post_accumulate_hook, _accumulator_hook, _accumulator_prehook]
)
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["LayerNormLinear", "GroupedLinear"])
def test_hooks_of_the_user(te: Any, checks: Any, kind: str, name: str, hook: Any) -> None:
    """Also of a bias, whose gradient W would compute, and of one of many experts."""
    if kind == "GroupedLinear":
        checks.hooks_see_gradients(te.GroupedLinear(3, 8, 5), _experts, hook, f"{name}2")
    else:
        checks.hooks_see_gradients(te.LayerNormLinear(8, 5), _dense, hook, name)


def test_used_twice_and_recomputed(te: Any, checks: Any) -> None:
    """Two pieces of work a microbatch are summed first, count once; recomputing changes nothing."""
    import torch
    from torch.utils.checkpoint import checkpoint

    module = torch.nn.ModuleList([te.Linear(8, 8), te.LayerNormLinear(8, 8)])

    def run(module: Any, microbatch: int) -> Any:
        x = _input(microbatch, 6, 8)
        y = module[0](checkpoint(module[1], module[0](x), use_reentrant=True))
        return y.square().sum()

    checks.split_equals_fused(module, run)


def test_without_ddp_hooks_gradients_add_up(te: Any) -> None:
    import copy

    import torch

    from megatron_ext.integration import split_te as wgrad_te
    from megatron_ext.runtime.wgrad import WeightGradStore

    fused = te.GroupedLinear(2, 8, 5)
    split, store = copy.deepcopy(fused), WeightGradStore()
    wgrad_te.attach(split, store)
    for i in range(3):
        fused(_input(i, 6, 8), [2, 4]).square().sum().backward()
        with store.collect(i):
            split(_input(i, 6, 8), [2, 4]).square().sum().backward()
    for i in range(3):
        store.run(i)
    for a, b in zip(fused.parameters(), split.parameters()):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("number", [0, 1, None], ids=["first", "second", "every"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_frozen_at_first(te: Any, checks: Any, fused: bool, number: int | None, name: str) -> None:
    """Experts of which some are frozen when the schedule begins, trained later, and then frozen
    again: each microbatch's gradients are those of one pass."""
    from megatron_ext.runtime.wgrad import WeightGradStore

    store, module = WeightGradStore(), te.GroupedLinear(2, 8, 5, fused=fused)
    chunks = [checks.Chunk(module, split, store) for split in (False, True)]
    names = [f"{name}{i}" for i in (range(2) if number is None else [number])]

    def freeze(frozen: bool) -> None:
        for chunk in chunks:
            for one in names:
                chunk.module.get_parameter(one).requires_grad_(not frozen)

    freeze(True)
    for one in chunks[1:]:  # as the first step finds the model
        one.module.wgrad_store.detach(store)
        checks.wgrad_te.attach(one.module, store)
    for microbatch in range(6):
        if microbatch in (2, 4):
            freeze(microbatch == 4)
        for chunk in chunks:
            y = chunk.module(_input(microbatch, 6, 8), [2, 4])
            chunk.backward(microbatch, y.square().sum(), True)
        store.run(microbatch)
    stock, ours = (chunk.gradients() for chunk in chunks)
    assert chunks[0].ready == chunks[1].ready
    for one in stock:
        assert ours[one].equal(stock[one]), one
    assert all(stock[one].any() for one in names)
    assert all(p.grad is None for p in chunks[1].module.parameters())


def test_forward_only_and_a_backward_of_someone_else(te: Any) -> None:
    """Nothing is postponed but in B, and detaching gives the module's own store back."""
    import torch

    from megatron_ext.integration import split_te as wgrad_te
    from megatron_ext.runtime.wgrad import WeightGradStore

    module, store = te.Linear(8, 5), WeightGradStore()
    own = module.wgrad_store
    (ours,) = wgrad_te.attach(module, store)
    assert wgrad_te.attach(module, store) == []
    with torch.no_grad():
        module(_input(0, 6, 8))
    module(_input(0, 6, 8)).sum().backward()
    assert module.weight.grad is not None and len(store) == 0
    ours.detach(store)
    assert module.wgrad_store is own


def test_experts_that_are_gone_are_not_kept(te: Any) -> None:
    """A trainer may build and delete models all through a run."""
    from megatron_ext.integration.features.moe.experts import ExpertGradients

    gradients, experts = ExpertGradients(None, lambda: False), te.Linear(8, 5)
    gradients.attach(experts)
    alive = weakref.ref(experts)
    del experts
    gc.collect()
    assert alive() is None
    gradients.close()


def test_under_several_schedules(te: Any) -> None:
    """Two functions of one model: each has the module split, also when the other has gone."""
    from megatron_ext.integration.split_te import attach
    from megatron_ext.runtime.wgrad import WeightGradStore

    module, early, late = te.Linear(8, 5), WeightGradStore(), WeightGradStore()
    own = module.wgrad_store

    def postpones(store: WeightGradStore) -> bool:
        module.weight.grad = None
        with store.collect(0):
            module(_input(0, 6, 8)).sum().backward()
        before = module.weight.grad
        store.run(0)
        assert module.weight.grad.any()
        return before is None

    attached = [(ours, store) for store in (early, late) for ours in attach(module, store)]
    assert len(attached) == 2 and module.wgrad_store is attached[0][0]
    assert all(map(postpones, (early, late, early)))
    attached[0][0].detach(early)
    assert postpones(late) and not postpones(early)
    attached[1][0].detach(late)
    assert module.wgrad_store is own


def test_a_failed_backward_leaves_gradients_as_they_were(te: Any) -> None:
    from megatron_ext.integration import split_te as wgrad_te
    from megatron_ext.runtime.wgrad import WeightGradStore

    module, store = te.GroupedLinear(2, 8, 5), WeightGradStore()
    wgrad_te.attach(module, store)
    with pytest.raises(ZeroDivisionError):
        with store.collect(0):
            module(_input(0, 6, 8), [3, 3]).sum().backward()
            raise ZeroDivisionError
    assert module.weight0.grad is None and len(store) == 0


def test_a_failed_w_leaves_gradients_as_they_were(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may lie in a buffer of the trainer's, who tries again."""
    import torch

    from megatron_ext.integration import split_te as wgrad_te
    from megatron_ext.runtime.wgrad import WeightGradStore

    module, store = te.GroupedLinear(2, 8, 5), WeightGradStore()
    wgrad_te.attach(module, store)
    grad = module.weight0.grad = torch.ones_like(module.weight0)
    with store.collect(0):
        module(_input(0, 6, 8), [3, 3]).sum().backward()
    monkeypatch.setattr(module.wgrad_store, "_backward_dw", lambda module: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.run(0)
    assert module.weight0.grad is grad


def test_what_cannot_split_is_left_alone(te: Any) -> None:
    import torch

    from megatron_ext.integration import split_te as wgrad_te

    good = te.Linear(8, 8)
    delayed, overlapping, parts, shell, gathered = (te.Linear(8, 8) for _ in range(5))
    delayed.wgrad_store = te.Store(delay=True)
    overlapping.ub_overlap_ag_dgrad = True
    parts.weight_names = ["a", "b"]
    gathered.weight.is_distributed_weight = True

    class LayerNormMLP(te.Linear):
        pass

    owner = torch.nn.Sequential(shell)
    owner._with_fused_impl = True
    kinds = [good, delayed, overlapping, parts, gathered, owner, LayerNormMLP(8, 8)]
    model = torch.nn.ModuleList(kinds)
    assert list(wgrad_te.splittable(model)) == [good]
    plain = torch.nn.Linear(8, 8)
    assert list(wgrad_te.splittable(plain)) == []


def test_report_counts_split_and_fused_parameters(te: Any) -> None:
    import torch

    from megatron_ext.integration.features.split_backward.report import wgrad_report

    overlapping = te.Linear(8, 8, bias=False)
    overlapping.ub_bulk_wgrad = True
    model = torch.nn.ModuleList(
        [te.LayerNormLinear(8, 16), overlapping, torch.nn.Linear(8, 8), torch.nn.Embedding(10, 8)]
    )
    report = wgrad_report([model, torch.nn.ModuleList([te.GroupedLinear(2, 8, 8)])])
    assert (report.split, report.fused) == (128 + 2 * 64, 64 + 64)
    assert report.kept == 16 + 8 + 8 + 8 + 80 + 2 * 8
    assert report.fused_modules == {"Linear": 128}
    assert report.share == pytest.approx(2 / 3)
    assert report.costs(1, 1, 1) == pytest.approx((1, 4 / 3, 2 / 3))
    assert "66.7 %" in report.text("zb-h1") and "--pp-cost 1,1.33,0.667" in report.text("zb-h1")
    assert report.as_dict()["split_parameters"] == 256
    model[0].bias.register_hook(lambda grad: grad)
    hooked = wgrad_report([model], hooked=[id(model[0].bias)])
    assert hooked.fused_modules == {"Linear": 128, "LayerNormLinear with hooks": 128}


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_parameters_that_take_the_place_of_others(te: Any, kind: str) -> None:
    """Adapters put them there, or ``load_state_dict(assign=True)``, after the first step."""
    import torch

    from megatron_ext.integration.split_te import attach
    from megatron_ext.runtime.wgrad import WeightGradStore

    run = _dense if kind == "Linear" else _experts
    found = []
    for split in (False, True):
        torch.manual_seed(1)
        module = te.Linear(8, 5) if kind == "Linear" else te.GroupedLinear(3, 8, 5)
        store = WeightGradStore()
        if split:
            attach(module, store)
        for name, parameter in [*module.named_parameters()]:
            setattr(module, name, torch.nn.Parameter(2 * parameter.detach()))
        for microbatch in (2, 3):
            with store.collect(microbatch) if split else contextlib.nullcontext():
                run(module, microbatch).backward()
        for microbatch in (2, 3) if split else ():
            store.run(microbatch)
        found.append({name: p.grad for name, p in module.named_parameters()})
    stock, ours = found
    assert all(torch.equal(ours[name], stock[name]) and stock[name].any() for name in stock)


def test_report_counts_frozen_matrices(te: Any) -> None:
    """Their W passes are empty, which an order for equal costs does not know."""
    import torch

    from megatron_ext.integration.features.split_backward.report import wgrad_report

    layers = [te.Linear(8, 8, bias=False) for _ in range(4)]
    for layer in layers[1:]:
        layer.weight.requires_grad_(False)
    report = wgrad_report([torch.nn.ModuleList(layers)])
    assert (report.split, report.fused, report.frozen) == (64, 0, 3 * 64)
    assert report.costs(1, 1, 1) == pytest.approx((1, 1, 1 / 4))
    assert "75 % of the matrices are frozen" in report.text("zb-h1")
    assert report.text("zb-h1").endswith("so plan with --pp-cost 1,1,0.25")
    layers[0].weight.requires_grad_(False)
    assert wgrad_report([torch.nn.ModuleList(layers)]).text("zb-h1").endswith("without W passes")


# --- Transformer Engine's real source ------------------------------------------------------------


def _sources() -> list[Path]:
    """Directories that hold ``transformer_engine/pytorch/module``."""
    given = os.environ.get("MEGATRON_EXT_TE_SOURCE", "")
    roots = [Path(part) for part in given.split(os.pathsep) if part]
    spec = importlib.util.find_spec("transformer_engine")
    if spec is not None and spec.submodule_search_locations:
        roots += [Path(part).parent for part in spec.submodule_search_locations]
    return [r for r in roots if (r / "transformer_engine/pytorch/module/base.py").is_file()]


@pytest.fixture(params=_sources() or [None], ids=lambda p: p.parent.name if p else "none")
def source(request: pytest.FixtureRequest) -> dict[str, ast.Module]:
    """The modules with linear layers, parsed."""
    if request.param is None:
        pytest.skip(
            "needs Transformer Engine's Python files: pip download --no-deps transformer-engine, "
            "unzip the wheel into DIR, MEGATRON_EXT_TE_SOURCE=DIR"
        )
    folder = request.param / "transformer_engine" / "pytorch" / "module"
    names = ("_common", "base", "linear", "layernorm_linear", "grouped_linear", "layernorm_mlp")
    return {name: ast.parse((folder / f"{name}.py").read_text()) for name in names}


def test_functions_that_save_weights_are_known(source: dict[str, ast.Module]) -> None:
    """Offload wraps the backward of each of them; they read what forward saved from ``ctx``."""
    from megatron_ext.integration.targets import TE_FUNCTIONS

    for target in TE_FUNCTIONS:
        module, _, name = target.places[0].partition(":")
        short = module.rsplit(".", 1)[1]
        if short not in source:
            continue
        text = ast.dump(_class(source[short], name))
        assert "'Function'" in text and "name='backward'" in text
        # Called by its global name, so that rebinding it is enough.
        calls = ast.dump(source[short])
        assert f"Attribute(value=Name(id='{name}', ctx=Load()), attr='apply'" in calls
    asks = re.compile(r"(ctx|bwd_args)\.is_first_microbatch(?! =)")  # in backward it is changed
    lines = [line for tree in source.values() for line in ast.unparse(tree).splitlines()]
    asking = [line for line in lines if asks.search(line)]
    assert asking and all("accumulate_" in s or s.endswith("is not None:") for s in asking)


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found


def _is_store(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "wgrad_store") or (
        isinstance(node, ast.Name) and node.id == "wgrad_store"
    )


def test_source_asks_a_store_only_what_ours_answers(source: dict[str, ast.Module]) -> None:
    from megatron_ext.integration.split_te import SplitStore

    asked, of_context = set(), set()
    for tree in source.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_store(node.value):
                asked.add(node.attr)
            context = node.value if isinstance(node, ast.Attribute) else None
            if getattr(context, "attr", "") == "context" and _is_store(context.value):
                of_context.add(node.attr)
    assert {"delay_wgrad_compute", "put", "pop"} <= asked
    assert asked - {"context"} <= set(vars(SplitStore))
    assert of_context <= set(dir(queue.Queue))


def test_source_stores_are_set_up_as_expected(source: dict[str, ast.Module]) -> None:
    """Each class makes its store in its constructor, off unless asked, under the name we replace;
    each postpones one piece of work a backward pass; backward_dw is where we look for it."""
    classes = (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear"))
    for file, name in (*classes, ("grouped_linear", "GroupedLinear")):
        cls = _class(source[file], name)
        (init,) = [n for n in cls.body if getattr(n, "name", "") == "__init__"]
        arguments = [a.arg for a in (*init.args.args, *init.args.kwonlyargs)]
        assert "delay_wgrad_compute" in arguments
        targets = {
            ast.unparse(t) for n in ast.walk(init) if isinstance(n, ast.Assign) for t in n.targets
        }
        assert {"self.wgrad_store", "self.use_bias"} <= targets
        fuse = "self.fuse_wgrad_accumulation"
        assert fuse in {ast.unparse(n) for n in ast.walk(cls) if isinstance(n, ast.Attribute)}
        if name != "GroupedLinear":
            text = ast.unparse(cls)
            assert "self.weight_names" in text and "self.bias_names" in text
        puts = [
            n
            for n in ast.walk(source[file])
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr == "put"
            and _is_store(n.func.value)
        ]
        # The newest grouped linear has two backward functions with one call each.
        assert len(puts) in ((1, 2) if name == "GroupedLinear" else (1,))
        assert all(len(call.args) == 2 for call in puts)
        for call in puts:  # (input, output gradient): what chunks of one batch are joined by
            tensors = [ast.unparse(one) for one in call.args[0].elts]
            assert "dy" in tensors[1] or "grad_output" in tensors[1]
    for file, name in (
        ("base", "TransformerEngineBaseModule"),
        ("grouped_linear", "GroupedLinear"),
    ):
        assert "backward_dw" in {getattr(n, "name", "") for n in _class(source[file], name).body}


@pytest.mark.parametrize(
    ("file", "name", "total"),
    [
        ("linear", "Linear", "inputmat_total"),
        ("layernorm_linear", "LayerNormLinear", "ln_out_total"),
    ],
)
def test_source_leaves_gathered_tensors_while_it_reduces(
    source: dict[str, ast.Module], file: str, name: str, total: str
) -> None:
    """What we shard is (input, output gradient), gathered along the first dimension; the input
    gradient's reduction begins before they are left in the store and is awaited after."""
    calls = [node for node in ast.walk(source[file]) if isinstance(node, ast.Call)]
    (put,) = [c for c in calls if ast.unparse(c.func).endswith("wgrad_store.put")]
    assert ast.unparse(put.args[0]) == f"[{total}, grad_output]"
    gathers = [ast.unparse(c.func) for c in calls if c.lineno < put.lineno]
    assert "gather_along_first_dim" in gathers
    started = [
        c.lineno
        for c in calls
        if ast.unparse(c.func) in ("reduce_scatter_along_first_dim", "allreduce")
        and any(k.arg == "async_op" and ast.unparse(k.value) == "True" for k in c.keywords)
    ]
    awaited = [c.lineno for c in calls if ast.unparse(c.func) == "dgrad_work.wait"]
    assert len(started) == 2 and max(started) < put.lineno < max(awaited)
    own = {ast.unparse(n) for n in ast.walk(_class(source[file], name))}
    assert {"self.parallel_mode", "self.sequence_parallel", "self.tp_size"} <= own
    assert "self.tp_group" in {ast.unparse(n) for n in ast.walk(source["base"])}


def _compiled(cls: ast.ClassDef, names: list[str], space: dict[str, Any]) -> dict[str, Any]:
    """The given methods of a class, compiled alone; their imports come from ``space``."""
    body = [n for n in cls.body if getattr(n, "name", "") in names]
    module = ast.Module(body=body, type_ignores=[])
    found: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(module), f"<{cls.name}>", "exec"), space, found)
    return found


def _space() -> dict[str, Any]:
    import torch

    @contextlib.contextmanager
    def no_range(*unused: Any) -> Any:
        yield

    nvtx = types.SimpleNamespace(range=no_range)
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(nvtx=nvtx), Tensor=torch.Tensor)

    def noop_cat(tensors: list[Any], *unused: Any) -> Any:
        assert len(tensors) == 1
        return tensors[0]

    return {"torch": fake, "get_nvtx_range_context": no_range, "noop_cat": noop_cat}


_METHODS = ["need_backward_dw", "backward_dw", "_trigger_wgrad_accumulation_and_reduce_hooks"]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "in-w", "in-b", "outside"])
def test_source_backward_dw_of_linear(
    te: Any, checks: Any, source: dict[str, ast.Module], bias: str, fused: bool
) -> None:
    """The stand-in with the real ``backward_dw`` in place of its own."""
    methods = _compiled(_class(source["base"], "TransformerEngineBaseModule"), _METHODS, _space())
    real = type("Real", (te.Linear,), methods)
    real.bias_names = ["bias"] if bias != "none" else []
    real._get_weight_tensors = lambda self: [self.weight]
    real.wgrad_accumulation_and_reduce_hooks = []
    module = real(8, 5, bias=bias != "none", return_bias=bias == "outside", fused=fused)
    module.early_bias = bias == "in-b"
    if "(wgrad, grad_bias_, _, _)" in ast.unparse(source["base"]):
        module.more_results = (None, None)
    checks.split_equals_fused(module, _dense)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("bias", ["none", "in-w", "outside"])
def test_source_backward_dw_of_grouped_linear(
    te: Any, checks: Any, source: dict[str, ast.Module], bias: str, fused: bool
) -> None:
    space = _space()
    methods = _compiled(_class(source["grouped_linear"], "GroupedLinear"), _METHODS, space)
    base = _compiled(_class(source["base"], "TransformerEngineBaseModule"), _METHODS, space)
    real = type("Real", (te.GroupedLinear,), {**base, **methods})
    real._get_weight_tensors = lambda self: self._all("weight")
    real.single_grouped_weight = real.use_grouped_tensor = False
    real.wgrad_accumulation_and_reduce_hooks = []
    module = real(3, 8, 5, bias != "none", return_bias=bias == "outside", fused=fused)
    checks.split_equals_fused(module, _experts)


def test_source_store_and_ours_mean_the_same(source: dict[str, ast.Module]) -> None:
    """The real store, run alone: first in, first out; pop gives (result, tensors)."""
    space: dict[str, Any] = {"queue": queue, "torch": _space()["torch"]}
    tree = ast.Module(body=[_class(source["_common"], "WeightGradStore")], type_ignores=[])
    exec(compile(tree, "<store>", "exec"), space)
    store = space["WeightGradStore"](True)
    assert store.delay_wgrad_compute() and not space["WeightGradStore"]().delay_wgrad_compute()
    for i in range(3):
        store.put([i], lambda x: (x + 10, None))
    assert [store.pop() for _ in range(3)] == [((i + 10, None), [i]) for i in range(3)]
    assert hasattr(store.context, "empty")
