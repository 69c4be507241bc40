"""Offload flags: what they mean, and the sentence for what cannot work."""

from __future__ import annotations

import random
import socket
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.schedule import Costs, check, generate, offload_pass, simulate
from megatron_ext.schedule.io import save
from megatron_ext.schedule.link import Link
from megatron_ext.schedule.planner import Knowledge
from tests.support.stand_ins import after_megatron

from .test_flags import arguments


def test_off_is_the_default() -> None:
    assert not ScheduleRequest.of("v-half").resolve(4, 2, 8).offloads


class TestWithASchedule:
    @pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("v-half", 2)])
    def test_more_chunks_than_there_are(self, name: str, chunks: int) -> None:
        choice = ScheduleRequest.of(name, offloading="3")
        virtual = chunks if chunks > 1 else None
        with pytest.raises(
            ConfigError, match=f"3 chunks cannot be offloaded, since a rank has {chunks};"
        ):
            after_megatron(arguments(virtual_pipeline_model_parallel_size=virtual), choice)

    def test_the_plan_is_the_passs(self) -> None:
        link = Link.of(4, Fraction(1, 4))
        choice = ScheduleRequest.of("v-half", offloading="full").resolve(4, 2, 8)
        wanted = offload_pass(generate("v-half", 4, 8), link, "full").schedule
        assert choice.plan(8, Knowledge(link)).ranks == wanted.ranks
        assert choice.plan(8).ranks == generate("v-half", 4, 8).ranks

    def test_measured_costs_decide_what_leaves_and_not_the_order(self) -> None:
        link = Link.of(4, Fraction(1, 2))
        costs = Costs.of(stages=[[s + 1, 2, 3] for s in range(8)])
        choice = ScheduleRequest.of("v-half", offloading="full").resolve(4, 2, 8)
        plan = choice.plan(8, Knowledge(link, costs))
        assert plan.costs == costs
        assert plan.compute().ranks == generate("v-half", 4, 8).ranks
        assert plan.ranks != choice.plan(8, Knowledge(link)).ranks

    def test_a_cap_is_of_what_stays(self) -> None:
        """interleaved holds eleven sets a rank; with offload it fits under six."""
        link = Link.of(4, Fraction(1, 4))
        offloading = "auto"
        capped = ScheduleRequest.of("interleaved", memory_cap="0.75", offloading=offloading)
        assert max(check(capped.resolve(4, 2, 16).plan(16, Knowledge(link))).peak_sets) <= 6
        assert max(check(generate("interleaved", 4, 16)).peak_sets) == 11

    def test_a_cap_that_measured_times_do_not_keep(self) -> None:
        """Training has begun then: the closest plan runs."""
        request = ScheduleRequest.of("v-zb", memory_cap="0.13", offloading="auto")
        assert request.resolve(4, 2, 16).plan(16, Knowledge(Link.of(4, Fraction(1, 4)))).has_offload

    @pytest.mark.matrix
    def test_v_cap_is_as_large_as_offload_allows(self) -> None:
        link = Link.of(8, Fraction(1, 4))
        offloading = "auto"
        request = ScheduleRequest.of("v-cap", memory_cap="0.5", offloading=offloading)
        plan = request.resolve(8, 2, 32).plan(32, Knowledge(link))
        assert max(check(plan).peak_sets) <= 8
        assert max(check(plan.compute()).peak_sets) > 8
        alone = ScheduleRequest.of("v-cap", memory_cap="0.5").resolve(8, 2, 32).plan(32)
        assert simulate(plan).makespan < simulate(alone).makespan

    def test_a_file_that_does_not(self, tmp_path: Path) -> None:
        save(generate("v-half", 4, 8), tmp_path / "x.json")
        request = ScheduleRequest.of(str(tmp_path / "x.json"), offloading="half")
        assert request.resolve(4, 2, 8).plan(8, Knowledge(Link.of(4, Fraction(1, 4)))).has_offload


class TestOnTheMachine:
    def test_too_little_host_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranks of one host are added up; another host's do not count."""
        from megatron_ext.integration.features.offload import memory

        gib, here = 1 << 30, socket.gethostname()
        others = [(here, 6 * gib, 0, 10 * gib), ("elsewhere", 100 * gib, 0, 200 * gib)]

        def gather(mine: Any, groups: Any) -> list[Any]:
            assert groups == ["of the call"]
            return [(*mine[:3], 10 * gib), *others]

        monkeypatch.setattr(memory, "gather_over", gather)
        memory.require_on_hosts(2 * gib, 0, ["of the call"])
        with pytest.raises(ConfigError) as error:
            memory.require_on_hosts(4 * gib, 0, ["of the call"])
        assert f"host {here}: offloading needs 10.00 GiB" in str(error.value)
        # What this rank's present arena gives back counts as available.
        memory.require_on_hosts(4 * gib, 2 * gib, ["of the call"])

    def test_least_bytes_of_a_set(self) -> None:
        """20 bytes per token and hidden element in 16 bits (PipeOffload, section 2), not 34."""

        from megatron_ext.integration.features.offload.memory import least_set_bytes

        config = SimpleNamespace(
            pipeline_dtype=torch.bfloat16,
            recompute_granularity=None,
            recompute_method=None,
            recompute_modules=None,
            tensor_model_parallel_size=1,
            sequence_parallel=False,
            num_attention_heads=8,
            num_query_groups=8,
            kv_channels=16,
            ffn_hidden_size=512,
            gated_linear_unit=False,
            num_moe_experts=None,
        )
        model: Any = SimpleNamespace(decoder=SimpleNamespace(layers=[None] * 3))
        assert least_set_bytes(model, config, (64, 2, 128)) == 3 * 20 * 64 * 2 * 128
        config.num_query_groups = 1  # an eighth of keys and values: 16 + 4/8
        assert least_set_bytes(model, config, (64, 2, 128)) == 3 * 64 * 2 * 128 * 33 // 2
        config.recompute_granularity = "full"
        assert least_set_bytes(model, config, (64, 2, 128)) == 2 * 64 * 2 * 128
        assert least_set_bytes(model, config, None) == 0

    def test_times_of_passes(self) -> None:
        """The first microbatch does not count, a BW is half B and half W."""
        from megatron_ext.integration.measuring import pass_seconds
        from megatron_ext.schedule.actions import Op

        seconds = pass_seconds(
            [
                (0, Op.F, 0, 9.0),
                (0, Op.F, 1, 2.0),
                (0, Op.F, 2, 1.0),
                (0, Op.BW, 1, 4.0),
                (1, Op.B, 1, 3.0),
                (1, Op.W, 1, 5.0),
            ],
            min,
        )
        assert seconds == {
            (0, Op.F): 1.0,
            (0, Op.B): 2.0,
            (0, Op.W): 2.0,
            (1, Op.B): 3.0,
            (1, Op.W): 5.0,
        }
        assert pass_seconds([(0, Op.F, 0, 9.0)]) == {(0, Op.F): 9.0}


def test_an_arena_of_the_planned_size_is_just_enough() -> None:
    """Random sets of a few sizes come and go; a byte less and one finds no place."""

    from megatron_ext.offload.arena import HostArena, arena_bytes
    from megatron_ext.offload.blocks import ALIGNMENT

    rng = random.Random(5)
    for _ in range(50):
        sizes = {key: 100 * rng.randint(1, 40) for key in range(30)}
        here: list[int] = []
        moves: list[tuple[int, int]] = []
        for key in sizes:
            here.append(key)
            moves.append((key, sizes[key]))
            while here and rng.random() < 0.45:
                gone = here.pop(rng.randrange(len(here)))
                moves.append((gone, sizes[gone]))
        needed = arena_bytes(moves)
        for nbytes, enough in ((needed, True), (needed - ALIGNMENT, False)):
            arena = HostArena(torch.device("cpu"), nbytes)
            arena.seal()
            slots: dict[int, Any] = {}
            refused = False
            for key, size in moves:
                if key in slots:
                    arena.free(slots.pop(key))
                else:
                    slots[key] = arena.allocate(size)
                    if slots[key] is None:
                        refused = True
                        break
            assert refused is not enough
            arena.close()


@pytest.mark.parametrize("kind", ["wrapped", "the user's", "not hooked"])
def test_parameters_keep_their_identity_in_backward(kind: str) -> None:
    """Without the hook a function that marks its weight marks something else."""

    from megatron_ext.integration import saved_parameters
    from megatron_ext.integration.hooks import Hooks
    from megatron_ext.integration.targets import SAVED_TENSORS
    from megatron_ext.offload.arena import HostArena
    from megatron_ext.offload.device import CpuDevice
    from megatron_ext.offload.engine import Engine
    from megatron_ext.offload.store import ActivationStore

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            weight.grad_added_to_main_grad = True
            ctx.seen = True  # written through
            return grad @ weight, grad.t() @ x

    weight = torch.nn.Parameter(torch.randn(3, 4))
    device = CpuDevice()
    store = ActivationStore(
        Engine(device, HostArena(device.torch_device, 4096)), lambda: [weight], min_bytes=1
    )
    function = saved_parameters.with_parameters(Linear) if kind == "wrapped" else Linear
    x = torch.randn(2, 4, requires_grad=True)
    with store.saving("set"):
        y = function.apply(x, weight)
    store.offload("set")
    store.release("set")
    store.prepare("set")
    store.reload("set")
    hooks, place = Hooks("any"), SAVED_TENSORS.places
    if kind == "the user's":
        hooks.apply([hook for hook in saved_parameters.hooks() if hook.target.places == place])
        assert len(hooks.bindings) == 1
    try:
        y.sum().backward()
    finally:
        hooks.revert()
    assert SAVED_TENSORS.found is torch._C._FunctionBase.saved_tensors
    assert hasattr(weight, "grad_added_to_main_grad") is (kind != "not hooked")
    assert torch.equal(weight.grad, torch.ones(2, 3).t() @ x)
    store.finish("set")
    device.close()
