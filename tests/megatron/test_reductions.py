"""When the reduction of a chunk's gradients starts: replicas may follow other orders of passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration.runner import MegatronRunner
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Placement


class Chunk(torch.nn.Linear):
    """One that Megatron's data parallelism wraps, as far as its reductions go."""

    def __init__(self, started: list[int], number: int, overlap: bool) -> None:
        super().__init__(1, 1)
        self._started, self._number = started, number
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=overlap)

    def start_grad_sync(self, *unused: Any) -> None:
        """Megatron's."""
        self._started.append(self._number)


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
