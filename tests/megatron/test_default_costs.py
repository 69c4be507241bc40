"""The order that training makes by default: for the model's FLOPs."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from megatron_ext.integration import ConfigError
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.schedule import model as module
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.plan.estimate import flop_costs
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import even_split
from megatron_ext.schedule import Costs, generate
from megatron_ext.schedule.io import save
from tests.support.stand_ins import after_megatron, before_megatron

from .test_flags import arguments

MODEL = {
    **{"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "bf16": True},
    **{"vocab_size": 131072, "add_bias_linear": True, "expert_model_parallel_size": 1},
    **{"rank": 0, "untie_embeddings_and_output_weights": True},
}
LINE = (
    "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 "
    "--vocab-size 131072 --untie-embeddings-and-output-weights --micro-batch-size 2 "
    "--global-batch-size 32 --world-size 8 --pipeline-model-parallel-size 4"
)


def run_of(schedule: str, cost: str | None = None, **changed: Any) -> Run:
    """A run whose arguments Megatron has validated."""
    args = arguments(pp_schedule=schedule, pp_cost=cost, **{**MODEL, **changed})
    cap = changed.get("pp_memory_cap")
    request = before_megatron(args, ScheduleRequest.of(schedule, cost, cap))
    chunks = 2 if request.vee else 1
    args.virtual_pipeline_model_parallel_size = chunks
    run = Run(args, "0.0.0", schedule=after_megatron(args, request))
    run.chunks = chunks
    return run


def plan_of(run: Run) -> Any:
    assert run.schedule is not None
    return run.schedule.plan(8)


def test_it_is_for_flops() -> None:
    costs = flop_costs(job_of(read(LINE.split())[0]), even_split(16, 8))
    assert plan_of(run_of("v-zb")).ranks == generate("v-zb", 4, 8, costs=costs).ranks


def test_given_costs_take_its_place() -> None:
    """``1,1,1`` is the order for equal costs; a schedule file has its own."""
    run = run_of("v-zb", "1,1,1")
    assert plan_of(run).fingerprint() == generate("v-zb", 4, 8).fingerprint()
    assert plan_of(run_of("v-zb")).fingerprint() != plan_of(run).fingerprint()


def test_a_file_keeps_its_order(tmp_path: Any) -> None:
    made = generate("zb-h1", 4, 8)
    save(made, tmp_path / "x.json")
    run = run_of(str(tmp_path / "x.json"))
    assert plan_of(run).fingerprint() == made.fingerprint()


def test_a_file_for_other_microbatches_is_refused(tmp_path: Any) -> None:
    """Training would run microbatches of other costs than the file is made for."""
    costs = Costs().with_units([(n, n, n, n) for n in (1, 2, 1, 2, 1, 2, 1, 2)])
    save(generate("v-half", 4, 8, costs=costs, effort=0), tmp_path / "x.json")
    with pytest.raises(ConfigError, match="training takes whole microbatches of equal costs"):
        ScheduleRequest.of(str(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hidden_size": None}, "plan needs --hidden-size too"),
        ({"enable_hyper_connections": True}, "not modelled: --enable-hyper-connections"),
        ({"heterogeneous_layers_config_path": "x"}, "not modelled: --heterogeneous"),
    ],
)
def test_a_model_that_cannot_be_described_has_equal_costs(
    caplog: pytest.LogCaptureFixture, changed: dict[str, Any], why: str
) -> None:
    with caplog.at_level(logging.INFO):
        run = run_of("zb-h1", **changed)
    assert plan_of(run).costs == Costs()
    assert plan_of(run).fingerprint() == generate("zb-h1", 4, 8).fingerprint()
    assert re.search(rf"equal costs: .*{why}", caplog.text)


def test_such_a_model_takes_no_cap_in_bytes() -> None:
    with pytest.raises(ConfigError, match="not modelled: --heterogeneous.*; give a fraction"):
        run_of("auto", pp_memory_cap="4GiB", heterogeneous_layers_config_path="x")


def test_a_librarys_order_is_for_its_layers_and_first_ranks_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = torch.nn.Linear(1, 1)
    layers = [([3], [False]), *[([4], [False])] * 2, ([5], [True])]
    monkeypatch.setattr(module, "gather", lambda mine, group: layers)
    monkeypatch.setattr(module, "gather_over", lambda mine, groups: [(4096, 2), *[(512, 1)] * 3])
    run = run_of("zb-h1", rank=3)
    run.models = [own]
    module.describe_model(run)
    assert run.request is not None and run.request.job is not None
    assert (run.request.job.seq_length, run.request.job.micro_batch_size) == (4096, 2)
    assert run.request.splits is not None
    split = run.request.splits(4)
    assert (split.counts, split.predicts) == ((3, 4, 4, 5), 3)
