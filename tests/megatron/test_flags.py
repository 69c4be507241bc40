"""Every wrong combination of flags: one sentence with the numbers, the rule and the fix."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.schedule.validate import fails_late
from megatron_ext.integration.flags import GROUP, add_arguments, defaults, parsed, wanted
from megatron_ext.integration.utils import full_batch
from megatron_ext.schedule import Costs, Schedule, generate, simulate
from megatron_ext.schedule.io import save
from tests.support.schedules import made
from tests.support.stand_ins import after_megatron, before_megatron, megatron_args, started


def arguments(**changed: Any) -> SimpleNamespace:
    """Megatron's arguments of a small run, before its own validation."""
    values: dict[str, Any] = {
        "pp_schedule": "as given",
        "pipeline_model_parallel_size": 4,
        "num_layers": 16,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_model_parallel_layout": None,
        "virtual_pipeline_model_parallel_size": None,
        "cuda_graph_impl": "none",
        "fp8_recipe": "delayed",
        "overlap_p2p_comm": True,
        "micro_batch_size": 2,
        "data_parallel_size": 2,
        "global_batch_size": 32,
        "rampup_batch_size": None,
        "world_size": 8,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    return megatron_args(**{**values, **changed})


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({"num_layers": 8, "mtp_num_layers": 1}, "Et|t|t|t|t|t|t|tmL"),
        (
            {
                "num_layers": 14,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            "Et|tt|tt|tt|tt|tt|tt|tL",
        ),
        (
            {"num_layers": 9, "decoder_first_pipeline_num_layers": 3},
            None,  # 6 layers on 7 stages
        ),
        (
            {"num_layers": 9, "decoder_first_pipeline_num_layers": 2},
            "Ett|t|t|t|t|t|t|tL",
        ),
        (
            {
                "num_layers": 8,
                "decoder_first_pipeline_num_layers": 0,
                "decoder_last_pipeline_num_layers": 2,
            },
            "E|t|t|t|t|t|t|ttL",
        ),
        (
            {"num_layers": 16, "pipeline_model_parallel_layout": "E|t|(tt|)*2t*3|(tt|)*2t*4L"},
            "E|t|(tt|)*2t*3|(tt|)*2t*4L",
        ),
        ({"num_layers": 16, "pipeline_model_parallel_layout": "Et*8|t*8L"}, None),
        (
            {
                "num_layers": 8,
                "mtp_num_layers": 1,
                "pipeline_model_parallel_layout": "Et|t|t|t|t|t|tm|tL",
            },
            None,
        ),
        ({"num_layers": 8, "pipeline_model_parallel_layout": "Ex|t"}, None),
    ],
)
def test_layers_of_the_v(flags: dict[str, Any], layout: str | None) -> None:
    args = arguments(**flags)
    if layout is None:
        with pytest.raises(ConfigError, match=r"stages|layout"):
            before_megatron(args, ScheduleRequest.of("v-half"))
        return
    before_megatron(args, ScheduleRequest.of("v-half"))
    assert args.pipeline_model_parallel_layout == layout
    assert args.decoder_first_pipeline_num_layers is None
    assert not args.account_for_loss_in_pipeline_split


def test_no_inference_under_v() -> None:
    from megatron_ext.integration.features.v_placement import VPlacement

    hooks = started(VPlacement).hooks()
    (hook,) = (one for one in hooks if one.target.places[0].endswith("GPTModel.forward"))
    forward = hook.make(lambda self, x, **kwargs: x)
    assert forward(None, 3, inference_context=None) == 3
    with pytest.raises(ConfigError, match="cannot generate text under --pp-schedule"):
        forward(None, 3, inference_context=object())


def test_layout_of_one_stage_a_rank_suits_plain_schedules() -> None:
    before_megatron(
        arguments(pipeline_model_parallel_layout="Et|t|t|t*13L"), ScheduleRequest.of("zb-h1")
    )


@pytest.mark.parametrize("steps", ["0:768 250B:1536", "0:768,250B:1536", "1T:1.536K, 0:768"])
def test_the_largest_of_a_schedule_of_batch_sizes(steps: str) -> None:
    """In all forms that Megatron reads."""
    assert full_batch(arguments(step_batch_size_schedule=steps)) == 1536


def test_a_schedule_of_batch_sizes_that_is_none() -> None:
    for steps in ("768", "0:many", " "):
        with pytest.raises(ConfigError, match="THRESHOLD:SIZE"):
            full_batch(arguments(step_batch_size_schedule=steps))


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        ("v-cap", {"memory_cap": "0.2"}, "takes a memory cap from 2"),
        ("v-cap", {"memory_cap": "much"}, "got 'much'"),
        ("v-half", {"memory_cap": "0.5"}, "takes no memory cap"),
        ("v-half", {"cost": "1,2"}, "F,B,W"),
        ("v-half", {"cost": "1,0,1"}, "must be > 0"),
    ],
)
def test_options_that_do_not_fit(schedule: str, options: dict[str, Any], text: str) -> None:
    args = arguments(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError) as error:
        after_megatron(args, ScheduleRequest.of(schedule, **options))
    assert text in str(error.value)


def test_cap_and_costs_shape_the_plan() -> None:
    request = ScheduleRequest.of("v-cap", cost="1,1.2,0.8,0.05", memory_cap="0.8")
    choice = request.resolve(4, 2, 8)
    plan = choice.plan(8)
    assert max(simulate(plan).peak_sets) <= 6  # 0.8 of 8 sets, rounded down
    assert plan.costs == Costs.of(1, "1.2", "0.8", "0.05")
    assert choice.plan(8) is plan


def test_v_asks_megatron_for_two_chunks() -> None:
    args = arguments(overlap_p2p_comm=False)
    before_megatron(args, ScheduleRequest.of("v-half"))
    assert args.pipeline_model_parallel_layout == "Ett|tt|tt|tt|tt|tt|tt|ttL"
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.overlap_p2p_comm
    args.virtual_pipeline_model_parallel_size = 2
    assert after_megatron(args, ScheduleRequest.of("v-half")).placement.chunks == 2


class TestAuto:
    """Decided before Megatron builds the model: pp 4, 8 microbatches."""

    def decided(self, options: dict[str, Any], **changed: Any) -> tuple[ScheduleRequest, Any]:
        args = arguments(**changed)
        request = before_megatron(args, ScheduleRequest.of("auto", **options))
        return request.resolve(4, None, 8), args

    @pytest.mark.parametrize("cap", [None, "1", "0.75", "0.5"])
    def test_is_what_the_command_line_chooses(self, cap: str | None) -> None:
        choice, args = self.decided({"memory_cap": cap, "cost": "1,1.1,0.8,0.05"})
        costs, sets = Costs.of(1, "1.1", "0.8", "0.05"), int(8 * float(cap or 1))
        expected = made("auto", 4, 8, 2, costs, memory_cap=sets)
        assert (choice.name, choice.note) == (expected.name, expected.note)
        assert choice.placement.is_vee() == expected.placement.is_vee()
        text = args.pipeline_model_parallel_layout
        chunks = text.count("|") // 4 + 1 if text else args.num_virtual_stages_per_pipeline_rank
        assert (chunks or 1) == expected.chunks
        assert choice.plan(8).ranks == expected.ranks
        # Ramp-up and the like: the family, and so the placement, stay.
        for m in (1, 3, 4, 6):
            plan = choice.plan(m)
            assert (plan.name, plan.placement) == (expected.name, expected.placement)
            assert max(simulate(plan).peak_activation) <= sets / 2

    def test_layers_that_do_not_split_in_two(self) -> None:
        choice, args = self.decided({}, num_layers=12)
        assert choice.name == "zb-h1"
        assert args.num_virtual_stages_per_pipeline_rank is None
        assert "of 1f1b, zb-h1, zb-h2 that fit in 4 microbatches" in choice.about
        assert choice.about.endswith("only these suit this model's layers and flags")
        with pytest.raises(
            ConfigError,
            match="none of 1f1b, zb-h1, zb-h2 .* cap of 2 micro.*4 .1f1b.; raise --pp-memory-cap",
        ):
            self.decided({"memory_cap": "0.5"}, num_layers=12)

    def test_features_that_exclude_the_v(self) -> None:
        assert self.decided({}, decoder_first_pipeline_num_layers=2)[0].name == "zb-h1"

    def test_virtual_stages_of_the_user(self) -> None:
        for flags in (
            {"num_virtual_stages_per_pipeline_rank": 4},
            {"num_layers_per_virtual_pipeline_stage": 1},
        ):
            choice, _ = self.decided({}, **flags)
            assert choice.name == "interleaved-zb"
            assert choice.plan(8).chunks == 4
        choice, _ = self.decided({"memory_cap": "0.875"}, num_virtual_stages_per_pipeline_rank=2)
        assert choice.name in ("gis", "gis-h", "po")
        assert max(simulate(choice.plan(8)).peak_sets) <= 7


class TestCheapRecompute:
    """--pp-cheap-recompute asks Megatron for its part, or says what excludes it."""

    def modules(self, **changed: Any) -> list[str]:
        """The modules that Megatron is asked to recompute."""
        from megatron_ext.integration.features.recompute import ask_megatron

        args = arguments(rank=0, **changed)
        ask_megatron(args)
        assert args.recompute_granularity == "selective"
        found: list[str] = args.recompute_modules
        ask_megatron(args)
        assert args.recompute_modules == found
        return found

    def test_alone(self) -> None:
        assert self.modules() == ["layernorm"]
        assert self.modules(num_experts=8) == ["layernorm"]
        assert self.modules(num_experts=8, moe_grouped_gemm=True) == ["layernorm", "moe_act"]
        assert self.modules(num_experts=None, moe_grouped_gemm=True) == ["layernorm"]

    def test_beside_what_the_user_recomputes(self) -> None:
        selective = {"recompute_granularity": "selective"}
        assert self.modules(**selective) == ["core_attn", "layernorm"]
        assert self.modules(recompute_activations=True) == ["core_attn", "layernorm"]
        mine = ["mlp", "layernorm"]
        assert self.modules(**selective, recompute_modules=mine) == ["mlp", "layernorm"]
        assert self.modules(**selective, recompute_modules=[]) == ["layernorm"]
        assert mine == ["mlp", "layernorm"]
        experts = {"num_experts": 8, "moe_grouped_gemm": True}
        assert self.modules(**experts, recompute_modules=["moe"]) == ["moe", "layernorm"]

    def test_fp8_with_another_recipe(self) -> None:
        assert self.modules(fp8="hybrid", fp8_recipe="blockwise") == ["layernorm"]

    def test_says_what_transformer_engine_keeps(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.modules(transformer_impl="local")
        assert not caplog.records
        self.modules(transformer_impl="transformer_engine")
        assert "keeps the norm's output" in caplog.text

    def test_is_a_switch(self) -> None:
        assert defaults({"pp_cheap_recompute": True}) == {"pp_cheap_recompute": "True"}
        assert defaults({"pp_cheap_recompute": False}) == {}
        with pytest.raises(ConfigError, match="True or False, but got 'no'"):
            defaults({"pp_cheap_recompute": "no"})


class TestFile:
    def write(self, folder: Path, schedule: Schedule) -> str:
        path = folder / "schedule.json"
        save(schedule, path)
        return str(path)

    def test_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read schedule file"):
            ScheduleRequest.of(str(tmp_path / "none.json"))

    def test_not_json(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text("{")
        with pytest.raises(ConfigError, match="is not JSON"):
            ScheduleRequest.of(str(path))

    def test_invalid_order(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, generate("v-half", 4, 8))
        data = json.loads(Path(path).read_text())
        data["ranks"][2].pop()
        Path(path).write_text(json.dumps(data))
        with pytest.raises(ConfigError) as error:
            ScheduleRequest.of(path)
        # Here the checker's grid around the fault follows the sentence.
        assert "--pp-schedule: " in str(error.value).splitlines()[0]

    def test_lowered_and_interleaved_files_are_accepted(self, tmp_path: Path) -> None:
        from megatron_ext.schedule import lower

        schedule = generate("interleaved", 4, 8, 3)
        request = ScheduleRequest.of(self.write(tmp_path, lower(schedule)))
        args = arguments()
        request = before_megatron(args, request)
        assert args.num_virtual_stages_per_pipeline_rank == 3
        args.virtual_pipeline_model_parallel_size = 3
        choice = after_megatron(args, request)
        assert choice.placement.chunks == 3
        assert choice.plan(8).ranks == schedule.ranks


def test_flags_are_in_their_own_group_and_off_by_default() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    ours = ["schedule", "memory_cap", "cost", "p2p", "trace"]
    ours += ["cheap_recompute", "slices", "slice_weights", "profile_steps"]
    ours += ["slice_tokens", "microbatch_costs", "reorder_microbatches"]
    ours += ["vocab_parallel"]
    ours += ["offload", "offload_policy"]
    moe = ["moe_pipeline_chunks", "moe_memory_reuse"]
    assert vars(args) == dict.fromkeys([*(f"pp_{name}" for name in ours), *moe])
    assert GROUP in parser.format_help()


def test_flags_that_are_gone() -> None:
    """By the launcher and patched scripts, ``apply`` and ``enable``."""
    said = pytest.raises(ConfigError, match="removed in 0.3.0, see CHANGELOG")
    for argv in (["--pp-effort", "3"], ["--moe-memory-budget=1GiB"], ["--pp-slices", "auto"]):
        with said:
            wanted(["--pp-schedule", "v-half", *argv])
    assert wanted(["--pp-slices", "4", "--pp-schedule", "auto"])
    for config in ({"pp_profile": "x"}, {"pp_slices": "auto"}):
        with said:
            defaults(config)
    for options in ({"effort": 1}, {"moe_memory_budget": "1GiB"}, {"slices": "auto"}):
        with said:
            parsed(options)


def test_what_would_fail_late_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(generate("1f1b", 4, 8), path)
    file, vee = ScheduleRequest.of(str(path)), ScheduleRequest.of("v-half")
    with pytest.raises(ConfigError, match="name a schedule instead of a file"):
        fails_late(arguments(rampup_batch_size=[4, 4, 32]), file, 1)
    several = arguments(multiple_validation_sets=True)
    assert fails_late(several, file, 1) == []
    with pytest.raises(ConfigError, match="data of 2 model chunks; use a schedule with one"):
        fails_late(several, vee, 2)
    assert len(fails_late(arguments(inprocess_restart=True, perform_rl_step=True), vee, 2)) == 2
