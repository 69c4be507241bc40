"""Which layers split B and W, bit for bit as stock; when gradients are reduced; shared weights."""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.plan.activations import stage_set
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import Stage
from tests.support.case_server import Cases, case_results
from tests.support.checkouts import nightly
from tests.support.grids import sampled
from tests.support.kernels import fused_kernels
from tests.support.stand_ins import started

# What wgrad_cases.py runs; which of them must be equal says the part after the slash.
OURS = [
    "zb-h1/ce",
    "zb-h1/te-forward",
    "zb-h1/mtp",
    "zb-h1/overlap-fusion",
    "zb-h1/overlap-te-moe",
    "v-half/tp-sp-fusion",
    "v-zb/tp-sp-te-fused",
]
_MATRIX = [
    *(
        "v-half/moe",
        "v-zb/te-moe",
        "v-half/overlap",
        "zb-h1/overlap-moe",
        "zb-h1/tp-sp",
        "zb-h1/tp-fusion",
        "zb-h1/tp-sp-fusion",
    ),
    # The same layers under another schedule, or a part of what another case has.
    *(
        "zb-h1/moe",
        "zb-h1/fusion",
        "zb-h1/te",
        "zb-h1/te-moe-fused",
        "zb-h1/tp-sp-te",
        "v-zb/te",
        "zb-h1/te-fused",
        "zb-h1/overlap",
        "v-zb/overlap",
        "v-zb/overlap-moe",
        "zb-h1/te-recompute",
        "zb-h1/mtp-tied",
    ),
]


def _with(text: str) -> list[Any]:
    """The cases with ``text`` in their names, some of them in tier ``matrix``."""
    names = [case for case in [*OURS, *_MATRIX] if text in case]
    return sampled(names, [case for case in names if case in OURS])


results = case_results("megatron.cases.wgrad_cases", first=True)


def _stock(results: Cases, case: str) -> Any:
    return results["stock/" + case.partition("/")[2]]


@pytest.mark.parametrize("case", _with(""))
def test_losses_and_gradients_are_bitwise_stocks(results: Cases, case: str) -> None:
    """Overlapped reductions are compared with stock's without overlap."""
    ours, stock = results[case], _stock(results, case)
    assert ours["losses"] == stock["losses"] and any(stock["losses"])
    assert set(ours["gradients"]) == set(stock["gradients"])
    differing = [n for n, g in stock["gradients"].items() if ours["gradients"][n] != g]
    assert differing == []
    assert "forward" in case or len(stock["gradients"]) > 100


def test_every_case_is_compared(results: Cases) -> None:
    assert {name for name in results if not name.startswith(("stock", "bytes"))} == {
        *OURS,
        *_MATRIX,
    }


@pytest.mark.parametrize("tp", sampled([2, 4], [2]))
@pytest.mark.parametrize("layers", ["local", "te"])
def test_a_set_is_as_large_between_b_and_w(results: Cases, layers: str, tp: int) -> None:
    """With sequence parallelism: nothing that B has gathered waits for W. All layers of the model,
    without attention scores; with the same gradients, bit for bit."""
    line = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 64 "
        "--micro-batch-size 4 --hidden-dropout 0 --attention-dropout 0 --recompute-activations "
        f"--attention-backend unfused --tensor-model-parallel-size {tp} --sequence-parallel "
        f"--transformer-impl {'local' if layers == 'local' else 'transformer_engine'}"
    )
    job = job_of(read(line.split())[0])
    planned = stage_set(job, Stage(range(8)))
    for rank in results[f"bytes/{layers}-tp{tp}"]["extra"]:
        assert rank["equal"]
        assert rank["waiting"] == planned.bytes_b_to_w
        assert rank["before"] == pytest.approx(planned.bytes_f_to_b, rel=0.01)
        assert rank["waiting"] == pytest.approx(rank["before"], rel=0.05)


def test_some_experts_are_idle(results: Cases) -> None:
    """An expert without a token in a whole iteration has a zero gradient, and is one of many."""
    experts = {n: g for n, g in results["stock/moe"]["gradients"].items() if "experts" in n}
    assert len(experts) == 8 * 8 * 2
    assert sum(any(g) for g in experts.values()) > len(experts) // 2


@pytest.mark.parametrize("case", _with("overlap"))
def test_each_bucket_is_reduced_once_after_its_last_w(results: Cases, case: str) -> None:
    """Stock learns in the first iteration how often each gradient gets ready; from the second on
    the last W of a bucket, not the end of the iteration, starts its reduction. With several chunks
    the last W of a chunk does, always."""
    # Megatron cuts only the first pipeline rank's gradients into several buckets.
    assert max(rank["groups"] for rank in results[case]["extra"]) > 3
    for rank in results[case]["extra"]:
        assert len(rank["steps"]) == 3
        if case.startswith("v-"):
            assert all(step == [["passes"]] * rank["groups"] for step in rank["steps"])
            continue
        first, *others = rank["steps"]
        assert first == [["finalize"]] * rank["groups"]
        assert all(step == [["passes"]] * rank["groups"] for step in others)


@pytest.mark.parametrize(
    ("case", "fused"),
    [
        ("zb-h1/ce", {}),
        nightly("zb-h1/fusion", {}),
        nightly("zb-h1/te", {}),
        ("zb-h1/mtp", {}),
        nightly("v-half/moe", {"TopKRouter": 512}),
    ],
)
def test_trace_says_what_is_split(results: Cases, case: str, fused: dict[str, int]) -> None:
    total, output = 0, 0
    for text in results[case]["traces"].values():
        for line in map(json.loads, text.splitlines()):
            wgrad = line["wgrad"]
            found = dict(wgrad["fused_modules"])
            assert wgrad["fused_parameters"] == sum(found.values())
            own = found.pop("output layer", 0)
            assert found == fused
        total += sum(v for k, v in wgrad.items() if k.endswith("_parameters"))
        output += own
    assert output == 64 * 32  # on one rank
    assert total == sum(len(g) // 4 for g in results[case]["gradients"].values()) or "mtp" in case


def test_log_says_once_a_run_what_is_split(results: Cases) -> None:
    said = [line for line in results.log().splitlines() if "W passes compute" in line]
    mine = [*OURS, *_MATRIX]
    trained = [case for case in results.ran if case in mine and "forward" not in case]
    assert len(said) == len(trained)
    moe = [line for line in said if "TopKRouter (2048)" in line]
    assert len(moe) == sum("moe" in case for case in trained)
    # As TopKRouter's eight layers of 8 x 32, the output layer's 64 x 32; of a rank.
    words = [2048 // (2 if "/tp-" in case else 1) for case in trained]
    found = [int(re.findall(r"output layer \((\d+)\)", line)[0]) for line in said]
    assert sorted(found) == sorted(words)


@pytest.fixture
def toy() -> Callable[..., Any]:
    """A stage that embeds with a weight and projects with it twice, under Megatron's DDP hook; or,
    ``bare``, without one, and projects only."""
    import torch
    from megatron.core.tensor_parallel import layers

    from megatron_ext.integration import split_local as wgrad
    from megatron_ext.runtime.wgrad import WeightGradStore

    class Toy:
        def __init__(self, split: bool, fused: bool, bare: bool = False) -> None:
            self.split, self.fused, self.ready, self.store = split, fused, [], WeightGradStore()
            self.bare = bare
            self.computed = False  # the weight that projects is made of the parameter
            generator = torch.Generator().manual_seed(7)
            self.weight = torch.nn.Parameter(torch.randn(12, 8, generator=generator))
            self.linear = wgrad._split_linear(
                layers.LinearWithGradAccumulationAndAsyncCommunication, self.store
            )
            if bare:
                return
            self.weight.main_grad = torch.zeros(12, 8)
            self.weight.grad_added_to_main_grad = False
            self.weight.zero_out_wgrad = fused
            post_hook = wgrad.hooks(self.store)[1]
            made = lambda *unused: self._hook(*unused)  # noqa: E731 - a function, as Megatron's is
            hook = post_hook.make(lambda module, parameter: made)(None, self.weight)
            self.accumulator = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
            self.accumulator.register_hook(hook)

        def _hook(self, *unused: Any) -> None:
            weight = self.weight
            assert weight.grad is not None
            if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
            self.ready.append(len(self.store))

        def loss(self, microbatch: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(microbatch)
            tokens = torch.randint(12, (6, 1), generator=generator)
            weight = self.weight.detach().requires_grad_() if self.bare else self.weight
            x = torch.nn.functional.embedding(tokens, weight)
            group = types.SimpleNamespace(size=lambda: 1)
            total = 0.0
            for power in (1, 2):
                arguments = (x**power, self.weight, None, self.fused, False, False, None, 0, group)
                total = total + self.linear.apply(*arguments, *self._rest()).square().sum()
            return total

        def strided(self, microbatch: int) -> torch.Tensor:
            """Input and output gradient are parts of larger tensors, of a microbatch of one."""
            generator = torch.Generator().manual_seed(microbatch)
            x = torch.randn(6, 1, 16, generator=generator).requires_grad_(True)
            weights = torch.randn(6, 1, 24, generator=generator)
            group = types.SimpleNamespace(size=lambda: 1)
            weight = self.weight * 2 if self.computed else self.weight
            arguments = (x[..., :8], weight, None, self.fused, False, False, None, 0, group)
            return (self.linear.apply(*arguments, *self._rest()) * weights[..., 12:]).sum()

        @staticmethod
        def _rest() -> tuple[int, ...]:
            function = layers.LinearWithGradAccumulationAndAsyncCommunication.forward
            return (1,) if "gtp_remat_size" in inspect.signature(function).parameters else ()

        def backward(self, microbatch: int, postpone: bool, strided: bool = False) -> None:
            loss = self.strided(microbatch) if strided else self.loss(microbatch)
            if self.split and postpone:
                with self.store.collect(microbatch):
                    loss.backward()
            else:
                loss.backward()

    return Toy


def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its kernel, for us and for Megatron."""
    import torch
    from megatron.core.tensor_parallel import layers

    kernels = fused_kernels()
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(layers, kernels.__name__, kernels, raising=False)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_weight_that_embeds_and_projects_twice(
    toy: Callable[..., Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding's part, which B has, waits for W's: same summands in the same order, ready
    once a microbatch, also when a second B comes before the first W."""
    import torch

    apex(monkeypatch)
    ours, stock = toy(True, fused), toy(False, fused)
    for i in range(4):
        stock.backward(i, False)
    ours.backward(0, True)
    ours.backward(1, True)
    assert ours.ready == [] and ours.weight.grad is None
    ours.store.run(0)
    ours.backward(2, True)
    ours.store.run(1)
    ours.store.run(2)
    ours.backward(3, False)
    assert torch.equal(ours.weight.main_grad, stock.weight.main_grad)
    assert len(ours.ready) == len(stock.ready) == 4


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_strided_tensors(
    toy: Callable[..., Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel that knows no strides gets tensors without."""
    import torch

    apex(monkeypatch)
    ours, stock = toy(True, fused), toy(False, fused)
    for i in range(2):
        stock.backward(i, False, strided=True)
        ours.backward(i, True, strided=True)
        ours.store.run(i)
    assert torch.equal(ours.weight.main_grad, stock.weight.main_grad)
    assert ours.weight.main_grad.any()


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_grad_hook"])
def test_hooks_of_the_user_see_the_sum_of_two_uses(toy: Callable[..., Any], kind: str) -> None:
    """As stock's do."""
    import torch

    def noting(calls: list[Any]) -> Callable[[Any], None]:
        return lambda given: calls.append(getattr(given, "main_grad", given).clone())

    ours, stock = toy(True, False), toy(False, False)
    seen: dict[Any, list[Any]] = {ours: [], stock: []}
    for i in range(3):
        for one in (ours, stock):
            if i == 0:
                getattr(one.weight, f"register_{kind}")(noting(seen[one]))
                one.store.hooked = {id(one.weight): (kind,)}
            one.backward(i, True)
        assert len(ours.ready) == i + 1
        ours.store.run(i)
    assert len(seen[ours]) == 3 and all(map(torch.equal, seen[ours], seen[stock]))
    assert torch.equal(ours.weight.main_grad, stock.weight.main_grad)


def test_a_weight_that_is_computed_passes_its_gradient_on(toy: Callable[..., Any]) -> None:
    """PyTorch's parametrizations make weights of other parameters."""
    import torch

    ours, stock = toy(True, False), toy(False, False)
    for one in (ours, stock):
        one.computed = True
        one.backward(0, True, strided=True)
    ours.store.run(0)
    assert torch.equal(ours.weight.main_grad, stock.weight.main_grad)
    assert ours.weight.main_grad.any()


def test_two_uses_are_summed_first_without_data_parallelism(toy: Callable[..., Any]) -> None:
    """As autograd does, before the microbatch's gradient is added to those of others, in place."""
    import torch

    ours, stock = toy(True, False, bare=True), toy(False, False, bare=True)
    buffer = torch.full((12, 8), 1e3)
    stock.weight.grad, ours.weight.grad = buffer.clone(), buffer
    for i in range(4):
        stock.backward(i, False)
        ours.backward(i, True)
        ours.store.run(i)
    assert torch.equal(ours.weight.grad, stock.weight.grad)
    assert ours.weight.grad is buffer


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("bare", [False, True], ids=["ddp", "bare"])
def test_saved_tensor_hooks_of_the_user(
    toy: Callable[..., Any], bare: bool, checkpointed: bool
) -> None:
    """Under them autograd saves other tensors than the weight; a checkpoint hands each out once."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def forward(one: Any, i: int) -> torch.Tensor:
        if checkpointed:
            return checkpoint(one.loss, i, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            return one.loss(i)

    ours, stock = toy(True, False, bare), toy(False, False, bare)
    for i in range(3):
        forward(stock, i).backward()
        with ours.store.collect(i):
            forward(ours, i).backward()
        ours.store.run(i)
    found, wanted = (one.weight.grad if bare else one.weight.main_grad for one in (ours, stock))
    assert torch.equal(found, wanted) and found.any()
    assert len(ours.ready) == len(stock.ready) == (0 if bare else 3)


@pytest.mark.parametrize("reused", ["saved", "given"])
def test_what_is_written_in_place_between_b_and_w_is_an_error(
    toy: Callable[..., Any], reused: str
) -> None:
    """A function may reuse what it saved, or its gradient, behind the layer that needs the same:
    W would read other numbers than stock's backward pass."""
    import torch

    class Reusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            return y.mul_(grad) if reused == "saved" else grad.mul_(y)

    def loss(one: Any) -> torch.Tensor:
        x = torch.linspace(-1, 1, 96).view(12, 1, 8).requires_grad_()
        y = Reusing.apply(x)
        group = types.SimpleNamespace(size=lambda: 1)
        if reused == "saved":
            arguments = (y, one.weight, None, False, False, False, None, 0, group)
            return one.linear.apply(*arguments, *one._rest()).square().sum()
        weight = one.weight[:8].detach().requires_grad_()
        arguments = (x, weight, None, False, False, False, None, 0, group)
        return (one.linear.apply(*arguments, *one._rest()) + y).sin().sum()

    ours = toy(True, False, bare=True)
    with ours.store.collect(0):
        loss(ours).backward()
    with pytest.raises(RuntimeError, match="written in place between its B and its W"):
        ours.store.run(0)
    with ours.store.collect(1):
        ours.strided(0).backward()
    ours.store.run(1)


def test_b_and_w_are_as_precise_as_autocast_made_f(
    toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the forward pass only, as Megatron's decorators see it on a GPU."""
    import torch

    enter = torch.autocast.__init__
    monkeypatch.setattr(
        torch.autocast, "__init__", lambda self, device_type, **more: enter(self, "cpu", **more)
    )
    ours, stock = toy(True, False, bare=True), toy(False, False, bare=True)
    for i in range(2):
        losses = []
        for one in (ours, stock):
            with monkeypatch.context() as gpu, torch.autocast("cpu", dtype=torch.bfloat16):
                gpu.setattr(torch, "is_autocast_enabled", lambda device_type: True)
                gpu.setattr(torch, "get_autocast_dtype", lambda device_type: torch.bfloat16)
                losses.append(one.loss(i))
        losses[1].backward()
        with ours.store.collect(i):
            losses[0].backward()
        ours.store.run(i)
    assert torch.equal(ours.weight.grad, stock.weight.grad) and ours.weight.grad.any()


def test_every_pipeline_logs_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks gather their reports; some of them may have trained a model of another pipeline,
    and would have passed that by: the others waited for good."""
    import torch

    from megatron_ext.integration.features import split_backward
    from megatron_ext.runtime.wgrad import WeightGradStore

    class Group:
        """A pipeline."""

    asked: list[Any] = []

    def gather(report: Any, group: Any) -> list[Any]:
        asked.append(group)
        return [report]

    monkeypatch.setattr(split_backward, "gather", gather)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    feature = started(split_backward.SplitBackward, "zb-h1", store=WeightGradStore())
    groups = Group(), Group()
    for group in (*groups, *groups):
        call = types.SimpleNamespace(
            group=group, iteration=types.SimpleNamespace(models=[torch.nn.Linear(1, 1)])
        )
        feature._prepare(types.SimpleNamespace(call=call))
    assert asked == [*groups]
