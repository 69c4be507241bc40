"""Host memory of MoE layers: of a rank, of a host's ranks, and what ``auto`` may take.

With stand-ins for layers and other ranks.
"""

from __future__ import annotations

import gc
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.integration import ConfigError, host_memory
from megatron_ext.integration.features.moe import host as moe_host
from megatron_ext.integration.features.moe import layer as moe_layer
from megatron_ext.integration.features.moe.choice import ChosenMoE
from megatron_ext.integration.features.moe.host import HEADROOM, HostArenas
from megatron_ext.integration.features.moe.layer import FixedPolicy, LayerStep, PipelinedMoE
from megatron_ext.moe.autotune import SearchSpace
from megatron_ext.moe.plan import LayerPlan, Strategy
from megatron_ext.offload.arena import HostArena
from megatron_ext.runtime.draws import Draws

HIDDEN, FFN, TOKENS, TOPK = 64, 128, 256, 2
ROW = 2 * HIDDEN  # of the experts' input, bf16
INSIDE = 2 * 6 * FFN
GIB = 1 << 30


class Layer(MoELayer):
    """Looks like an MoE layer and computes nothing."""

    def __init__(self, config: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.weight = config, torch.nn.Parameter(torch.zeros(1))


class Group:
    """The second rank of a pipeline, or another."""

    def __init__(self, rank: int = 1) -> None:
        self.rank, self.size = (lambda: rank), (lambda: 2)


class Policy(FixedPolicy):
    """Notes what it may choose from."""

    allowed: tuple[Strategy, ...] = ()

    def allow(self, strategies: Any) -> None:
        self.allowed = tuple(strategies)


class Job:
    """A rank with three layers in each of two model chunks, and what the other ranks answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, available: int = 100 * GIB) -> None:
        config = SimpleNamespace(
            tensor_model_parallel_size=2,
            context_parallel_size=1,
            expert_tensor_parallel_size=1,
            moe_router_topk=TOPK,
            hidden_size=HIDDEN,
            moe_ffn_hidden_size=FFN,
            gated_linear_unit=True,
            params_dtype=torch.bfloat16,
        )
        self.models = [torch.nn.ModuleList(Layer(config) for _ in range(3)) for _ in range(2)]
        self.others: list[Any] = []
        self.gathered = 0
        monkeypatch.setattr(moe_host.dist, "get_rank", lambda: 0)
        for module in (moe_host, host_memory):
            monkeypatch.setattr(module, "gather_over", self._gather)
        monkeypatch.setattr(moe_layer, "groups_of_call", lambda *given: ())
        self.collection = SimpleNamespace(pp=Group())
        monkeypatch.setattr(host_memory, "_add", lambda host, nbytes: nbytes)
        monkeypatch.setattr(host_memory, "available_host_bytes", lambda: available)

    def _gather(self, mine: Any, groups: Any) -> list[Any]:
        self.gathered += 1
        return [mine, *self.others]

    def step(self, layers: PipelinedMoE, microbatches: int, models: Any = None) -> None:
        """As Megatron's own schedule begins one."""
        done = layers._stepping(
            lambda **call: "losses",
            num_microbatches=microbatches,
            seq_length=TOKENS,
            micro_batch_size=1,
            model=models or self.models,
            pg_collection=self.collection,
        )
        assert done == "losses"

    def train(self, strategies: str, budget: int | None = None, microbatches: int = 8) -> Any:
        """The first step of a run; (memory, policy)."""
        policy = Policy(LayerPlan(2))
        layers = PipelinedMoE(policy)
        arenas = HostArenas(
            layers,
            policy,
            [Strategy(name) for name in strategies.split()],
            lambda ranks, chunks, microbatches, plan: [99, min(5, chunks * microbatches)][:ranks],
            budget,
        )
        try:
            for number in (microbatches, 1, microbatches):
                self.step(layers, number)
        finally:
            arenas.close()
        return layers.memory, policy


ROWS = TOKENS * TOPK // 2
NEEDS = {"s1": 15 * ROWS * (ROW + INSIDE), "s2": 15 * ROWS * INSIDE, "s3": 15 * ROWS * ROW}


@pytest.mark.parametrize("strategy", NEEDS)
def test_the_size_is_that_of_balanced_routing(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Three layers, five passes in flight, in one piece, allocated once and before the step."""
    memory, _ = Job(monkeypatch).train(strategy)
    arena = memory.engine.arena
    assert arena.capacity_bytes == pytest.approx(HEADROOM * NEEDS[strategy], abs=512)
    assert len(arena._regions) == 1
    assert arena.allocate(arena.capacity_bytes + 1) is None  # it does not grow
    memory.close()


def test_a_budget_is_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = Job(monkeypatch).train("s3", budget=3 * NEEDS["s3"])
    assert memory.engine.arena.capacity_bytes == 3 * NEEDS["s3"]
    memory.close()
    with pytest.raises(ConfigError) as error:
        Job(monkeypatch).train("s1", budget=NEEDS["s1"] - 1)
    text = str(error.value)
    assert f"needs {NEEDS['s1']} bytes of host memory on a rank" in text
    assert f"6 MoE layers, 5 passes in flight, {ROWS} rows a call" in text


def test_another_rank_may_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks end the run, with that rank's numbers."""
    job = Job(monkeypatch)
    job.others = [({Strategy.S3: 7 * NEEDS["s3"]}, "42 MoE layers")]
    with pytest.raises(ConfigError, match=rf"needs {7 * NEEDS['s3']} bytes .* \(42 MoE layers\)"):
        job.train("s3", budget=2 * NEEDS["s3"])


def test_ranks_and_features_of_a_host_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PipeOffload has pinned is not available; the message has all numbers and the fix."""
    offload = HostArena(torch.device("cpu"), 1 << 20)
    job = Job(monkeypatch, available=10 * GIB)

    def gather(mine: Any, groups: Any) -> list[Any]:
        if isinstance(mine[0], str):  # a host's name
            return [mine, (socket.gethostname(), 8 * GIB, 0, 10 * GIB, 0, 8 * GIB)]
        return [mine]

    monkeypatch.setattr(host_memory, "gather_over", gather)
    job.train("s3")[0].close()
    with pytest.raises(ConfigError) as error:
        job.train("s3", budget=2 * GIB)
    text = str(error.value)
    assert "--moe-memory-reuse s3 needs 10.00 GiB of pinned host memory for the 2 ranks" in text
    assert "(at most 8.00 GiB a rank) besides 0.00 GiB in use but only 9.00 GiB" in text
    assert "take s4" in text and "--moe-memory-host-budget" in text
    offload.close()


def test_auto_leaves_out_what_the_host_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the budget, or by a rank's share of its host; pinned when something is copied."""
    every = "none s4 s3 s2 s1"
    memory, policy = Job(monkeypatch).train(every)
    assert policy.allowed == tuple(map(Strategy, every.split()))
    assert memory.engine.arena.capacity_bytes == 0
    memory, policy = Job(monkeypatch).train(every, budget=NEEDS["s2"])
    assert policy.allowed == tuple(map(Strategy, ("none", "s4", "s3", "s2")))
    job = Job(monkeypatch, available=int(2 * NEEDS["s3"] / 0.9) + 2)
    monkeypatch.setattr(host_memory, "gather_over", lambda mine, groups: [mine, mine])
    memory, policy = job.train(every)
    assert policy.allowed == tuple(map(Strategy, ("none", "s4", "s3")))
    memory.close()


def test_every_model_agrees_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other ranks wait for this one, whatever others it has trained; the arena has room for the
    passes of each, one after the other: of the rank that this process is in the model's pipeline,
    which is not Megatron's."""
    job, found = Job(monkeypatch), []
    layers = PipelinedMoE(FixedPolicy(LayerPlan(2)))
    passes = lambda ranks, chunks, microbatches, plan: [3 * microbatches, microbatches]  # noqa: E731
    arenas = HostArenas(layers, FixedPolicy(LayerPlan(2)), [Strategy.S3], passes)
    one, other = job.models, Job(monkeypatch).models
    for models, rank, microbatches in ((one, 1, 4), (other, 0, 2), (one, 1, 4), (other, 0, 2)):
        job.collection.pp = Group(rank)
        job.step(layers, microbatches, models)
        assert layers.memory is not None
        found.append((job.gathered, layers.memory.engine.arena.capacity_bytes))
    each, size = found[0]
    assert found == [(each, size), *[(2 * each, pytest.approx(1.5 * size, abs=512))] * 3]
    arenas.close()
    layers.close()


def test_sets_in_flight_are_those_of_the_steps_pipeline() -> None:
    """Of the plan by which it runs, if it has one; Megatron's groups are not made here."""
    asked: list[Any] = []

    def sets(*given: Any) -> list[int]:
        asked.append(given)
        return [7, 3]

    models = [torch.nn.Linear(1, 1)] * 2
    step = LayerStep(models, Group(), (), 4, TOKENS, training=True, plan="plan")
    assert step.in_flight(3, sets) == (3, 6)
    assert step.in_flight(3, sets, 8) == (3, 6)
    assert asked == [(2, 2, 4, "plan"), (2, 2, 8, "plan")]


ALONE = Group()


class Region:
    """Experts of a layer on a rank alone, as the tuner sees them."""

    parameters = ()

    def __init__(self, dropped: float, group: Any = ALONE, keeps: int = 1) -> None:
        self._dropped, self._keeps, self.calls = dropped, keeps, 0
        self.exchange = SimpleNamespace(
            tp_size=1,
            ep_size=1,
            experts=2,
            local_experts=2,
            groups=SimpleNamespace(tp_ep=group),
        )

    def experts(self, x: torch.Tensor, counts: Any, probs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.nn.functional.dropout(x, self._dropped)
        for _ in range(self._keeps):
            x = x.tanh()
        return x


def chosen(monkeypatch: pytest.MonkeyPatch) -> tuple[ChosenMoE, Any]:
    """A policy that starts with what needs least, and a layer."""
    policy = ChosenMoE(SearchSpace.of(2), 1 << 40, lambda *given: [1, 1])
    policy._logs = True
    job = Job(monkeypatch)
    (layer, *_), _ = job.models
    policy.begin_step(LayerStep(job.models, Group(), (), 1, TOKENS, training=True))
    layer.experts = torch.nn.Identity()
    layer.config.moe_router_dtype = None
    layer.config.moe_latent_size = None
    return policy, layer


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_auto_computes_no_dropout_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dropped: float
) -> None:
    """It would end the run at a strategy that does. The generators stay as they are."""
    caplog.set_level(logging.INFO)
    policy, layer = chosen(monkeypatch)
    region, before = Region(dropped), torch.get_rng_state()
    plan = policy.begin(layer, torch.zeros(8, 1, HIDDEN), lambda: region).policy.plan_for(1)
    assert plan.strategy.recomputes == (not dropped)
    assert ("auto does not try s0, s3 and s4" in caplog.text) == bool(dropped)
    assert torch.equal(before, torch.get_rng_state())


def test_numbers_of_megatrons_generators_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of its tracker leaves the default generator as it was."""
    states = {"experts": torch.ones(16, dtype=torch.uint8), "graph-safe": torch.Generator()}
    tracker = SimpleNamespace(get_states=lambda: states)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    for draw in (
        lambda: states.update(experts=states["experts"] + 1),
        lambda: torch.rand(1, generator=states["graph-safe"]),
    ):
        draws = Draws(torch.device("cpu"))
        states.update(experts=states["experts"].clone())  # forked, and nothing drawn
        assert not draws.found()
        draw()
        assert draws.found()


def test_auto_agrees_in_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the same sizes in another model, whose other ranks have seen nothing of this."""
    policy, layer = chosen(monkeypatch)

    def tuner(group: Any) -> Any:
        region = Region(0.0, group)
        return policy.begin(layer, torch.zeros(8, 1, HIDDEN), lambda: region).policy

    group = Group()
    assert tuner(ALONE) is tuner(ALONE) is not tuner(group)
    assert len(policy.kinds()) == 2
    del group
    gc.collect()
    assert len(policy.kinds()) == 1  # a group that is destroyed is not kept


def test_auto_looks_at_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same sizes, where some have adapters with dropout, or keep more for a row."""
    policy, layer = chosen(monkeypatch)
    regions = Region(0.0), Region(0.5), Region(0.0, keeps=2), Region(0.0)

    def tuner(region: Any) -> Any:
        return policy.begin(layer, torch.zeros(8, 1, HIDDEN), lambda: region).policy

    plain, dropping, keeping, same = map(tuner, regions)
    assert plain is same is tuner(regions[0]) and len({plain, dropping, keeping}) == 3
    for one, recomputes in ((plain, True), (dropping, False), (keeping, True)):
        assert one.plan_for(1).strategy.recomputes == recomputes
    assert [region.calls for region in regions] == [2, 2, 2, 2]  # once each, at two sizes


def test_what_stays_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = PipelinedMoE(FixedPolicy(LayerPlan(2)))
    memory = layers.memory_on(torch.device("cpu"))
    job = Job(monkeypatch)
    arenas = HostArenas(layers, FixedPolicy(LayerPlan(2)), [Strategy.S3], lambda *_: [1, 1])
    for stayed in (0, 2, 5, 9):
        memory.stayed, memory.wanted_bytes = stayed, 12345
        job.step(layers, 4)
    arenas.close()
    lines = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert len(lines) == 2  # when it began, and over the run
    assert "rank 0: 2 chunks of MoE layers" in lines[0]
    assert "12345 bytes would have held all; set --moe-memory-host-budget to that" in lines[0]
    assert "over the run, rank 0: 9 chunks" in lines[1]
    layers.close()
