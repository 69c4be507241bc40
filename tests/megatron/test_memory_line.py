"""Bytes in the log after the second step on GPUs: measured beside planned. No GPU is needed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_ext.integration.features.telemetry import (  # noqa: E402
    Telemetry,
    measured,
)
from megatron_ext.plan.flags import job_of, read  # noqa: E402
from megatron_ext.plan.layout import even_split  # noqa: E402
from megatron_ext.plan.model import PlanError  # noqa: E402
from megatron_ext.runtime import communicators, edges  # noqa: E402
from megatron_ext.schedule import generate  # noqa: E402

GIB = 1 << 30
PLAN = generate("1f1b", 2, 4, 1)
FLAGS = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --bf16"
FLAGS += " --micro-batch-size 1 --vocab-size 32000 --pipeline-model-parallel-size 2"
JOB = job_of(read(FLAGS.split())[0])


class Group:
    """A pipeline."""


GROUP = Group()


def _step(device: str = "cuda", training: bool = True, group: Group = GROUP) -> Any:
    call = SimpleNamespace(device=torch.device(device), group=group)
    recorder = SimpleNamespace(peak_sets=2)
    return SimpleNamespace(training=training, call=call, recorder=recorder, plan=PLAN)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """What is logged for the steps it is called with; rank 1 has twice as much allocated."""

    def gather(mine: measured.Held, _: Any) -> list[measured.Held]:
        return [mine, mine._replace(sets=1, allocated=2 * mine.allocated)]

    monkeypatch.setattr(measured, "gather", gather)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(measured, "taken", lambda device: GIB // 4)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(logging.getLogger("megatron_ext"), "propagate", True)

    def call(request: Any, *steps: Any) -> list[str]:
        args = SimpleNamespace(pp_trace=None)
        run = SimpleNamespace(request=request, training=False, args=args)
        (line,) = Telemetry().start(run)  # type: ignore[arg-type]
        caplog.clear()
        with caplog.at_level(logging.INFO):
            for step in steps:
                line.end(step)
        return [record.getMessage() for record in caplog.records]

    return call


def test_once_after_the_second_training_step(said: Any) -> None:
    request = SimpleNamespace(job=JOB, splits=lambda stages: even_split(4, stages))
    planned = measured.planned_bytes(SimpleNamespace(request=request), PLAN)  # type: ignore[arg-type]
    assert planned is not None and len(planned) == 2 and min(planned) > 0
    steps = [_step(), _step(training=False), _step(), _step()]
    assert said(request, steps[0], steps[1]) == []
    assert said(request, *steps) == [
        "memory after step 2, pipeline rank 1, which has most: 1 activation sets (plan 1), peak "
        f"allocated 6GiB (plan {measured.size_text(planned[1])}), communicators of messages "
        "256MiB beside"
    ]


def test_a_model_that_cannot_be_planned(said: Any) -> None:
    """And on the CPU there is nothing to say."""
    unknown = SimpleNamespace(job=None, splits=lambda stages: even_split(4, stages))
    assert "peak allocated 6GiB, comm" in said(unknown, _step(), _step())[0]

    def refused(stages: int) -> Any:
        raise PlanError("3 layers do not fit")

    broken = SimpleNamespace(job=JOB, splits=refused)
    assert "peak allocated 6GiB, comm" in said(broken, _step(), _step())[0]
    assert said(unknown, _step("cpu"), _step("cpu")) == []


def test_communicators_are_counted_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory of the device before the first and after the last one is connected."""
    device, free = torch.device("cuda", 7), [10 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 * GIB))

    def take(one: Any, edge: Any, *_: Any) -> Any:
        free[0] -= GIB // 8
        return edges.Line(None, 0)

    monkeypatch.setattr(edges.Edges, "_line", take)
    monkeypatch.setattr(edges.Edges, "_warm_up", lambda *_: None)
    monkeypatch.setattr(edges.dist, "get_backend", lambda group: "nccl")

    class Group:
        def rank(self) -> int:
            return 1

    group = Group()
    made = edges.Edges(group, "passes", device)  # type: ignore[arg-type]
    made.connect([(0, 1), (1, 0), (1, 2), (2, 3)])
    assert communicators.taken(device) == 3 * GIB // 8
    made.connect([(0, 1)])
    assert communicators.taken(device) == 3 * GIB // 8
    assert communicators.taken(torch.device("cpu")) == 0


def test_pipelines_count_their_own_steps(said: Any) -> None:
    """Ranks of one may be in another one, too, and all of a pipeline gather in one step."""
    first, second = _step(), _step(group=Group())
    unknown = SimpleNamespace(job=None)
    assert said(unknown, first, second) == []
    assert len(said(unknown, first, second, second)) == 1
