"""The order that training makes by default: for an estimate, on the first rank's device."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.integration import ConfigError
from megatron_ext.integration.feature import Run
from megatron_ext.integration.features.schedule import estimate as module
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.plan.estimate import Estimate
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import even_split
from megatron_ext.schedule import Costs, generate
from megatron_ext.schedule.io import save
from tests.support.checkouts import nightly
from tests.support.stand_ins import after_megatron, before_megatron

from .test_flags import arguments

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
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


def estimated(device: str) -> Estimate:
    """What ``plan`` makes of the same flags."""
    return Estimate(job_of(read(LINE.split())[0]), lambda stages: even_split(16, stages), device)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device that a rank finds."""
    return lambda name: monkeypatch.setattr(module, "device_name", lambda index=None: name)


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


def test_it_is_the_planners_estimate(on: Any, caplog: pytest.LogCaptureFixture) -> None:
    on(H100)
    run = run_of("v-zb")
    costs = estimated(H100).costs(8)
    assert plan_of(run).costs == costs
    assert plan_of(run).ranks == generate("v-zb", 4, 8, costs=costs).ranks
    with caplog.at_level(logging.INFO):
        module.settle(run, H100)
    said = [text for text in caplog.messages if text.startswith("the order")]
    assert said == [f"the order is made for {estimated(H100).text(8)}"]


def test_given_costs_take_its_place(on: Any) -> None:
    """``1,1,1`` is the order for equal costs; a schedule file and a profile have their own."""
    on(H100)
    run = run_of("v-zb", "1,1,1")
    assert run.request is not None and run.request.estimate is None
    assert plan_of(run).fingerprint() == generate("v-zb", 4, 8).fingerprint()
    assert plan_of(run_of("v-zb")).fingerprint() != plan_of(run).fingerprint()


def test_a_file_keeps_its_order(on: Any, tmp_path: Any) -> None:
    on(H100)
    made = generate("zb-h1", 4, 8)
    save(made, tmp_path / "x.json")
    run = run_of(str(tmp_path / "x.json"))
    assert run.request is not None and run.request.estimate is None
    assert plan_of(run).fingerprint() == made.fingerprint()


def test_a_file_for_other_microbatches_is_refused(tmp_path: Any) -> None:
    """Training would run microbatches of other costs than the file is made for."""
    costs = Costs().with_units([(n, n, n, n) for n in (1, 2, 1, 2, 1, 2, 1, 2)])
    save(generate("v-half", 4, 8, costs=costs, effort=0), tmp_path / "x.json")
    with pytest.raises(ConfigError, match="training takes whole microbatches of equal costs"):
        ScheduleRequest.of(str(tmp_path / "x.json"))


def test_ranks_on_other_devices_follow_the_first(on: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Their own estimates would give them other orders."""
    runs = {}
    for rank, name in enumerate((H100, A100, "CPU")):
        on(name)
        runs[name] = run_of("v-zb", rank=rank)
    assert len({plan_of(run).fingerprint() for run in runs.values()}) > 1
    for name, run in runs.items():
        on(name)
        module.settle(run, H100)
    assert {plan_of(run).fingerprint() for run in runs.values()} == {
        plan_of(runs[H100]).fingerprint()
    }
    assert plan_of(runs["CPU"]).costs == estimated(H100).costs(8)
    last = f"rank 2 has a 'CPU', but the order is made for the first rank's '{H100}'"
    assert last in caplog.messages[-1]


def test_the_tokenizers_vocabulary_counts(on: Any) -> None:
    """Megatron builds the tokenizer after it has validated its arguments."""
    on(H100)
    run = run_of("v-zb", vocab_size=None)
    assumed = plan_of(run).costs
    former = run.schedule
    module.settle(run, H100)
    assert run.schedule is former, "nothing is known that was not known before"
    run.args.padded_vocab_size = 131072  # type: ignore[attr-defined]
    module.settle(run, H100)
    assert plan_of(run).costs == estimated(H100).costs(8) != assumed


def test_what_auto_has_chosen_stays(on: Any) -> None:
    """It decides with the estimate; later only the order is made anew, under the same cap."""
    on(H100)
    run = run_of("auto")
    assert run.request is not None and run.request.decided is not None
    assert run.request.decided.costs.stages is not None
    name = run.request.name
    run.args.padded_vocab_size = 10 * 131072  # type: ignore[attr-defined]
    module.settle(run, A100)
    assert run.request.name == plan_of(run).name == name
    big = estimated(A100).with_vocabulary(10 * 131072)
    assert plan_of(run).costs == big.costs(plan_of(run).placement.num_stages)


@pytest.mark.parametrize("schedule", ["auto", nightly("v-cap")])
def test_a_cap_in_bytes_is_kept_when_the_order_is_made_anew(on: Any, schedule: str) -> None:
    on(H100)
    run = run_of(schedule, pp_memory_cap="60GiB")
    assert run.request is not None
    cap = module.capped(run.request, run.request.estimate.job).cap  # type: ignore[union-attr, arg-type]
    assert cap is not None and cap.fits(plan_of(run))
    module.settle(run, A100)
    assert cap.fits(plan_of(run))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hidden_size": None}, "plan needs --hidden-size too"),
        ({"enable_hyper_connections": True}, "not modelled: --enable-hyper-connections"),
        ({"heterogeneous_layers_config_path": "x"}, "layers of different sizes are not modelled"),
        ({"num_layers": 18}, "18"),
    ],
)
def test_a_model_that_cannot_be_described_has_equal_costs(
    on: Any, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], why: str
) -> None:
    on(H100)
    run = run_of("zb-h1", **changed)
    assert plan_of(run).costs == Costs()
    assert plan_of(run).fingerprint() == generate("zb-h1", 4, 8).fingerprint()
    with caplog.at_level(logging.INFO):
        module.settle(run, H100)
    assert re.search(rf"equal costs \(the model cannot be estimated: .*{why}", caplog.text)


def test_such_a_model_takes_no_cap_in_bytes(on: Any) -> None:
    with pytest.raises(ConfigError, match="layers of different sizes .* as a fraction"):
        run_of("auto", pp_memory_cap="4GiB", heterogeneous_layers_config_path="x")


def test_a_librarys_order_is_for_its_first_ranks_device_and_sizes(
    monkeypatch: pytest.MonkeyPatch, on: Any
) -> None:
    own = torch.nn.Linear(1, 1)
    own.config = SimpleNamespace(variable_seq_lengths=False)  # type: ignore[assignment]
    layers = [([3], [False]), *[([4], [False])] * 2, ([5], [True])]
    sizes = [(H100, (4096, 2)), *[(A100, (512, 1))] * 3]
    on(A100)
    monkeypatch.setattr(module, "gather", lambda mine, group: layers)
    monkeypatch.setattr(module, "gather_over", lambda mine, groups: sizes)
    monkeypatch.setattr(module, "placed_models", lambda: torch.nn.Linear)
    run = run_of("zb-h1", rank=3)
    run.models = [own]
    module.estimate_model(run)
    assert run.request is not None and run.request.estimate is not None
    estimate = run.request.estimate
    assert estimate.job is not None and estimate.device == H100
    assert (estimate.job.seq_length, estimate.job.micro_batch_size) == (4096, 2)
    split = estimate.splits(4)
    assert split is not None and (split.counts, split.predicts) == ((3, 4, 4, 5), 3)
