"""When the reduction of a chunk's gradients starts: replicas may follow other orders of passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.runner import MegatronRunner
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Placement


class Group:
    """Megatron's group of buckets, as far as the start and the end of their reduction go."""

    def __init__(self, started: list[int], number: int, config: Any) -> None:
        self._started, self._number, self._config = started, number, config
        self.is_first_batch, self.on_its_way = True, False
        self.of_all_ranks: list[bool] = []

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Nothing where a first one is on its way, which several instances do not know."""
        if self.is_first_batch and self.on_its_way:
            return
        self._started.append(self._number)
        self.of_all_ranks.append(force_all_reduce)
        self.on_its_way = self._config.num_distributed_optimizer_instances == 1

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """At the end of an iteration."""
        if self.is_first_batch:
            self.start_grad_sync(force_all_reduce)
        self.on_its_way = False


class Chunk(torch.nn.Linear):
    """One that Megatron's data parallelism wraps, as far as its reductions go."""

    def __init__(self, started: list[int], number: int, overlap: bool) -> None:
        super().__init__(1, 1)
        self.ddp_config = SimpleNamespace(
            overlap_grad_reduce=overlap, num_distributed_optimizer_instances=1
        )
        self.bucket_groups = [Group(started, number, self.ddp_config)]
        self.expert_parallel_bucket_groups = list[Group]()
        self.force_all_reduce = False

    def start_grad_sync(self, *unused: Any) -> None:
        """Megatron's."""
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            group.start_grad_sync()


def runner_of(
    placement: Placement, rank: int, explicit: bool, overlap: bool = True
) -> tuple[MegatronRunner, list[int]]:
    """A runner of one iteration, and the chunks whose reductions have started."""
    started: list[int] = []
    models = [Chunk(started, number, overlap) for number in range(placement.chunks)]
    config = SimpleNamespace(
        no_sync_func=[lambda: "no sync"] * len(models),
        grad_sync_func=[model.start_grad_sync for model in models] if explicit else None,
    )
    iteration: Any = SimpleNamespace(models=models, config=config)
    return MegatronRunner(iteration, placement, rank, WeightGradStore()), started


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    ("placement", "rank", "order"),
    [
        (Placement.vee(3), 0, [1, 0]),
        (Placement.vee(3), 2, [1, 0]),
        (Placement.loop(2, 3), 1, [2, 1, 0]),
    ],
)
def test_later_stages_go_first_whichever_chunk_is_done_first(
    placement: Placement, rank: int, order: list[int], explicit: bool
) -> None:
    """As in stock. Under --overlap-grad-reduce two replicas with 6 and 7 microbatches of v-half on
    3 ranks added gradients of other chunks."""
    for done in (order, order[::-1]):
        runner, started = runner_of(placement, rank, explicit)
        assert all(runner.syncing(chunk, last=True) == "no sync" for chunk in order)
        for chunk in done:
            runner.chunk_done(chunk)
        assert started == order


def test_a_trainer_may_hold_reductions_back_itself() -> None:
    """Over several calls that add to the same gradients: the first would be reduced again."""
    runner, started = runner_of(Placement.vee(2), 0, explicit=False)
    runner._it.config.no_sync_func = None
    assert runner.syncing(0, last=True) != "no sync"
    for chunk in (1, 0):
        runner.chunk_done(chunk)
    assert started == []


def test_hooks_of_parameters_start_them_elsewhere() -> None:
    for placement, overlap in ((Placement.loop(2, 1), True), (Placement.vee(2), False)):
        runner, started = runner_of(placement, 0, explicit=False, overlap=overlap)
        assert runner.syncing(0, last=True) != "no sync" == runner.syncing(0, last=False)
        for chunk in range(placement.chunks):
            runner.chunk_done(chunk)
        assert started == []


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("placement", [Placement.loop(2, 1), Placement.vee(2)])
def test_every_reduction_starts_once(
    placement: Placement, explicit: bool, first: bool, instances: int
) -> None:
    """With several instances of the distributed optimizer Megatron started that of a first batch
    again at the end, and gradients were reduced twice."""
    runner, started = runner_of(placement, 0, explicit)
    groups = [model.bucket_groups[0] for model in runner._it.models]
    for model, group in zip(runner._it.models, groups):
        model.ddp_config.num_distributed_optimizer_instances = instances
        group.is_first_batch = first
    for chunk in reversed(range(placement.chunks)):
        runner.chunk_done(chunk)
    if not explicit and placement.chunks == 1:
        return  # hooks of parameters have
    for group in groups:
        group.finish_grad_sync()
    assert sorted(started) == [*range(placement.chunks)]


@pytest.mark.parametrize("explicit", [True, False])
def test_gradients_that_are_saved_are_reduced_on_every_rank(explicit: bool) -> None:
    """--save-wgrads-interval wrote what single replicas had, where reductions overlap passes."""
    runner, _ = runner_of(Placement.vee(2), 0, explicit)
    for number, model in enumerate(runner._it.models):
        model.force_all_reduce = bool(number)
    for chunk in (1, 0):
        runner.chunk_done(chunk)
    found = [model.bucket_groups[0].of_all_ranks for model in runner._it.models]
    assert found == [[False], [True]]
