"""--overlap-moe-expert-parallel-comm with our schedules: what is refused, and one chunk a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.feature import Conflict, Run
from megatron_ext.integration.features.overlap import DELAY, FLAG, Overlap, _require_plans
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.hooks import Hooks
from tests.support.stand_ins import megatron_args


def run_of(schedule: str = "v-half", library: bool = False, **changed: Any) -> Run:
    """A run that may have pairs, but for what is changed."""
    values = {
        "overlap_moe_expert_parallel_comm": True,
        "num_experts": 8,
        "expert_model_parallel_size": 2,
        "bf16": True,
    }
    args = megatron_args(**{**values, **changed})
    return Run(args, "0.0.0", library=library, request=ScheduleRequest.of(schedule))


def refusal(run: Run) -> str:
    """The sentence with which a run is refused."""
    with pytest.raises(ConfigError) as error:
        Overlap().check(run)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("rule", Overlap.conflicts, ids=lambda rule: rule.flag)
def test_conflicts(rule: Conflict) -> None:
    value = list(rule.values) or "full"
    text = refusal(run_of(**{rule.attribute: value}))
    assert text.startswith(f"{FLAG} does not support {rule.flag} ") and text.endswith(rule.reason)
    for off in (None, False, *rule.off):
        Overlap().check(run_of(**{rule.attribute: off}))
    # Without Megatron's flag there is nothing to refuse.
    plain = {rule.attribute: value, "overlap_moe_expert_parallel_comm": False}
    Overlap().check(run_of(**plain))


def test_selective_recompute_of_other_modules() -> None:
    Overlap().check(run_of(recompute_granularity="selective", recompute_modules=["core_attn"]))
    text = refusal(run_of(recompute_modules=["core_attn", "moe"]))
    assert "does not support --recompute-modules moe: the all-to-all would run again" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts": None}, "needs experts, but --num-experts is None"),
        ({"expert_model_parallel_size": 1}, "but --expert-model-parallel-size is 1"),
        ({"bf16": False}, "needs 16-bit parameters, but they have 32; add --bf16 or --fp16"),
        ({"mtp_num_layers": 2}, "but --mtp-num-layers is 2"),
    ],
)
def test_what_megatrons_plans_need(changed: dict[str, Any], message: str) -> None:
    for library in (False, True):
        assert message in refusal(run_of(library=library, **changed))
    Overlap().check(run_of(bf16=False, fp16=True, mtp_num_layers=1))


class TestDelayedWeightGradients:
    def test_w_passes_do_it(self) -> None:
        run = run_of("zb-h1", delay_wgrad_compute=True)
        Overlap().check(run)
        assert run.args.delay_wgrad_compute is False
        assert run.notices == [f"{DELAY}: the schedule's W passes do it"]

    @pytest.mark.parametrize(
        ("schedule", "library", "pairs", "message"),
        [
            ("1f1b", False, True, "weight gradients, but --pp-schedule 1f1b has none; drop"),
            ("zb-h1", False, False, f"zb-h1 does not support {DELAY} without {FLAG}"),
            ("zb-h1", True, True, "this model's delay weight gradients already"),
            ("zb-h1", True, False, f"zb-h1 does not support {DELAY} without {FLAG}"),
        ],
    )
    def test_refused(self, schedule: str, library: bool, pairs: bool, message: str) -> None:
        run = run_of(
            schedule, library, delay_wgrad_compute=True, overlap_moe_expert_parallel_comm=pairs
        )
        assert message in refusal(run)


def test_a_librarys_request_learns_it() -> None:
    for pairs in (True, False):
        run = run_of(library=True, overlap_moe_expert_parallel_comm=pairs)
        Overlap().check(run)
        assert run.request is not None and run.request.overlap is pairs


def test_only_models_and_scripts_with_plans() -> None:
    def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> None: ...

    def other_step(data: Any, model: Any) -> None: ...

    with_plans = SimpleNamespace(build_schedule_plan=None)
    _require_plans([with_plans], forward_step)
    with pytest.raises(ConfigError, match="SimpleNamespace has no plan of them"):
        _require_plans([with_plans, SimpleNamespace()], forward_step)
    with pytest.raises(ConfigError, match=r"other_step does not; drop it"):
        _require_plans([with_plans], other_step)


def test_one_chunk_a_rank() -> None:
    """Megatron's configuration alone has pairs for several chunks only."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def configuration(**changed: Any) -> Any:
        import torch

        return TransformerConfig(
            num_layers=4,
            hidden_size=16,
            num_attention_heads=2,
            num_moe_experts=4,
            add_bias_linear=False,
            expert_model_parallel_size=2,
            moe_token_dispatcher_type="alltoall",
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.bfloat16,
            bf16=True,
            overlap_moe_expert_parallel_comm=True,
            **changed,
        )

    with pytest.raises(AssertionError, match="virtual_pipeline_model_parallel_size"):
        configuration()
    hooks = Hooks("0.0.0")
    hooks.apply(Overlap().hooks())
    try:
        one = configuration()
        assert one.overlap_moe_expert_parallel_comm is True
        assert one.virtual_pipeline_model_parallel_size is None
        with pytest.raises(AssertionError, match="moe_shared_expert_overlap"):
            configuration(moe_shared_expert_overlap=True, moe_shared_expert_intermediate_size=16)
        two = configuration(virtual_pipeline_model_parallel_size=2)
        assert two.overlap_moe_expert_parallel_comm is True
    finally:
        hooks.revert()
