"""Real schedules, all ranks in one process: sets leave and come back, gradients stay bit for bit.

The offload actions are placed by a rule of three lines here (the schedule pass has better ones), so
that any schedule with postponed W passes exercises the store.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from megatron_ext.offload.blocks import release_storage
from megatron_ext.offload.store import ActivationStore
from megatron_ext.prove.faulty_device import Faults
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.generators import generate
from megatron_ext.schedule.simulate import simulate

HIDDEN = 8
MOVES = (Op.OFFLOAD, Op.RELEASE, Op.PREPARE, Op.RELOAD)


class Layer(torch.autograd.Function):
    """``tanh(x @ weight.T)``; W is postponed inside a B pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: Any) -> torch.Tensor:
        y = torch.tanh(x @ weight.t())
        ctx.save_for_backward(x, y, weight)
        ctx.stage = stage
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y, weight = ctx.saved_tensors
        grad = grad * (1 - y * y)
        ctx.stage.postpone(lambda: grad.t() @ x)
        return grad @ weight.detach(), None, None


class Stage:
    """Two layers with one weight, and where their weight gradients go."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator))
        self.wgrad = WeightGradStore()
        self.total = torch.zeros(HIDDEN, HIDDEN)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return Layer.apply(Layer.apply(x, self.weight, self), self.weight, self)

    def postpone(self, gradient: Any) -> None:
        """W now, or when ``wgrad`` says."""

        def task() -> None:
            self.total += gradient()

        self.wgrad.put(self.weight, task) if self.wgrad.collecting else task()


def _with_moves(row: tuple[Action, ...]) -> list[Action]:
    """OFFLOAD after F, RELEASE after the next pass, PREPARE and RELOAD one pass ahead of B; only
    where at least three passes lie between F and B."""
    backward = {a[1:]: i for i, a in enumerate(row) if a.op in (Op.B, Op.BW)}
    after: dict[int, list[Action]] = defaultdict(list)
    for i, (op, stage, microbatch) in enumerate(row):
        if op is Op.F and backward[stage, microbatch] - i > 3:
            for move, at in zip(MOVES, (i, i + 1, *[backward[stage, microbatch] - 2] * 2)):
                after[at].append(Action(move, stage, microbatch))
    return [a for i, action in enumerate(row) for a in (action, *after[i])]


def _run(schedule: Any, stores: list[ActivationStore] | None) -> dict[str, torch.Tensor]:
    """All ranks' actions in the order of their simulated starts."""
    stages = [Stage(number) for number in range(schedule.placement.num_stages)]
    simulated = simulate(schedule)
    queue = []
    for rank, row in enumerate(schedule.ranks):
        full, starts = (row if stores is None else _with_moves(row)), iter(simulated.start[rank])
        now = 0
        for position, action in enumerate(full):
            now = next(starts) if action.is_compute else now
            queue.append((now, rank, position, action))
    sent: dict[Any, Any] = {}
    live: dict[Any, Any] = {}
    for _, rank, _, (op, stage, microbatch) in sorted(queue):
        key = (schedule.placement.chunk_of(stage), microbatch)
        store = stores[rank] if stores is not None else None
        here = (stage, microbatch)
        if op is Op.F:
            generator = torch.Generator().manual_seed(microbatch)
            x = sent.pop((Op.F, *here), None)
            x = torch.randn(4, HIDDEN, generator=generator) if x is None else x
            x.requires_grad_(True)
            if store is None:
                y = stages[stage](x)
            else:
                with store.saving(key):
                    y = stages[stage](x)
            live[here] = x, y
            # Handed over without a copy, so neighbours on one rank save the same storage.
            sent[Op.F, stage + 1, microbatch] = y.detach()
            y.data = torch.empty((1,))
        elif op in (Op.B, Op.BW):
            x, y = live.pop(here)
            grad = sent.pop((Op.B, *here), None)
            grad = torch.ones(4, HIDDEN) if grad is None else grad
            run = torch.autograd.Variable._execution_engine.run_backward
            if op is Op.B:
                with stages[stage].wgrad.collect(key):
                    run(
                        (y,),
                        (grad,),
                        False,
                        False,
                        (),
                        allow_unreachable=True,
                        accumulate_grad=True,
                    )
            else:
                run((y,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            sent[Op.B, stage - 1, microbatch] = x.grad
            if store is not None and op is Op.BW:
                store.finish(key)
        elif op is Op.W:
            stages[stage].wgrad.run(key)
            if store is not None:
                store.finish(key)
        else:
            if op is Op.OFFLOAD:
                release_storage(live[here][0])
            getattr(store, op.value.lower())(key)
    grads = {f"weight {stage}": s.total for stage, s in enumerate(stages)}
    return grads | {f"input {m}": sent[Op.B, -1, m] for m in range(schedule.microbatches)}


def _planned(row: tuple[Action, ...]) -> tuple[int, int]:
    """Most sets of a rank on the device and on the host, from its list of actions."""
    here = away = most_here = most_away = 0
    steps = {Op.F: (1, 0), Op.W: (-1, 0), Op.BW: (-1, 0), Op.OFFLOAD: (0, 1)}
    steps |= {Op.RELEASE: (-1, 0), Op.PREPARE: (1, 0), Op.RELOAD: (0, -1)}
    for action in _with_moves(row):
        device, host = steps.get(action.op, (0, 0))
        here, away = here + device, away + host
        most_here, most_away = max(most_here, here), max(most_away, away)
    return most_here, most_away


NAMES = [
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "v-min",
    "v-half",
    "v-zb",
    "gis",
    "po",
]


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_exact_and_counted(make_engine, name):
    schedule = generate(name, 4, 8)
    expected = _run(schedule, None)
    delays = random.Random(name)
    stores = []
    for _ in schedule.ranks:
        faults = Faults(lambda way: delays.choice([0, 0, 1e-3]), poison=True)
        stores.append(ActivationStore(make_engine("dual", faults=faults), min_bytes=1))
    capacities = set()
    for _ in range(3):
        got = _run(schedule, stores)
        assert all(torch.equal(got[name], grad) for name, grad in expected.items())
        for store in stores:
            store.end_step()
        capacities.add(tuple(store.engine.arena.capacity_bytes for store in stores))
    assert len(capacities) == 1
    for store, row in zip(stores, schedule.ranks):
        report = store.report()
        assert (report["peak_device_sets"], report["peak_host_sets"]) == _planned(row)
        assert report["refused"] == 0 and store.engine.arena.used_bytes == 0
    assert any(store.engine.counters.offloads for store in stores)
