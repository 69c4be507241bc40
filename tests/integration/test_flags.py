"""Every wrong combination of flags: one sentence with the numbers, the rule and the fix."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.flags import GROUP, add_arguments
from megatron_ext.integration.validate import Choice, after_megatron, before_megatron
from megatron_ext.schedule import Schedule, generate


def arguments(**changed: Any) -> SimpleNamespace:
    """Megatron's arguments of a small run, before its own validation."""
    values: dict[str, Any] = {
        "pipeline_model_parallel_size": 4,
        "num_layers": 16,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_model_parallel_layout": None,
        "virtual_pipeline_model_parallel_size": None,
        "cuda_graph_impl": "none",
        "overlap_p2p_comm": True,
        "micro_batch_size": 2,
        "data_parallel_size": 2,
        "global_batch_size": 32,
        "rampup_batch_size": None,
    }
    return SimpleNamespace(**{**values, **changed})


def refusal(schedule: str, **changed: Any) -> str:
    """The sentence with which a combination is refused before Megatron's validation."""
    with pytest.raises(ConfigError) as error:
        before_megatron(arguments(**changed), Choice(schedule))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_unknown_name_lists_the_known() -> None:
    text = refusal("v-haff")
    assert "'v-haff' is not known" in text
    assert "1f1b, interleaved, zb-h1, " in text and "v-half, v-zb, v-cap" in text


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half", "v-zb"])
def test_one_pipeline_rank(schedule: str) -> None:
    text = refusal(schedule, pipeline_model_parallel_size=1)
    assert "--pipeline-model-parallel-size >= 2, got 1" in text


def test_layers_that_do_not_split_over_the_v() -> None:
    text = refusal("v-half", num_layers=12)
    assert "--num-layers is 12" in text
    assert "multiple of 8" in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [("num_layers_per_virtual_pipeline_stage", 2), ("num_virtual_stages_per_pipeline_rank", 2)],
)
def test_virtual_stages_with_v(flag: str, value: int) -> None:
    text = refusal("v-half", **{flag: value})
    assert f"remove --{flag.replace('_', '-')} {value}" in text


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_virtual_stages_with_one_chunk(schedule: str) -> None:
    text = refusal(schedule, num_virtual_stages_per_pipeline_rank=2)
    assert "one model chunk a rank" in text


def test_interleaved_needs_virtual_stages() -> None:
    assert "--num-virtual-stages-per-pipeline-rank 2" in refusal("interleaved")
    before_megatron(arguments(num_virtual_stages_per_pipeline_rank=2), Choice("interleaved"))


@pytest.mark.parametrize(
    ("attribute", "value", "flag"),
    [
        ("mtp_num_layers", 1, "--mtp-num-layers"),
        ("decoder_first_pipeline_num_layers", 1, "--decoder-first-pipeline-num-layers"),
        ("account_for_loss_in_pipeline_split", True, "--account-for-loss-in-pipeline-split"),
        ("cpu_offloading", True, "--cpu-offloading"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
        ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
    ],
)
def test_features_that_do_not_work_together(attribute: str, value: Any, flag: str) -> None:
    text = refusal("v-half", **{attribute: value})
    assert flag in text
    assert "drop it" in text


def test_v_asks_megatron_for_two_chunks() -> None:
    args = arguments(overlap_p2p_comm=False)
    before_megatron(args, Choice("v-half"))
    assert args.num_virtual_stages_per_pipeline_rank == 2
    args.virtual_pipeline_model_parallel_size = 2
    assert after_megatron(args, Choice("v-half")) == 2


def test_variable_sequence_lengths() -> None:
    args = arguments(variable_seq_lengths=True)
    with pytest.raises(ConfigError, match="variable sequence lengths"):
        after_megatron(args, Choice("1f1b"))


class TestFile:
    def write(self, folder: Path, schedule: Schedule) -> str:
        path = folder / "schedule.json"
        schedule.save(path)
        return str(path)

    def test_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read schedule file"):
            Choice(str(tmp_path / "none.json"))

    def test_not_json(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text("{")
        with pytest.raises(ConfigError, match="is not JSON"):
            Choice(str(path))

    def test_invalid_order(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, generate("v-half", 4, 8))
        data = json.loads(Path(path).read_text())
        data["ranks"][2].pop()
        Path(path).write_text(json.dumps(data))
        with pytest.raises(ConfigError) as error:
            Choice(path)
        # Here the checker's grid around the fault follows the sentence.
        assert "--pp-schedule: " in str(error.value).splitlines()[0]

    def test_placement_that_the_runtime_cannot_make(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, generate("1f1b", 2, 1))
        data = json.loads(Path(path).read_text())
        data["placement"] = [[1], [0]]
        data["ranks"] = data["ranks"][::-1]
        Path(path).write_text(json.dumps(data))
        with pytest.raises(ConfigError, match="neither Megatron's"):
            Choice(path)

    def test_other_pipeline_size(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, generate("v-half", 2, 8))
        assert "pp=2 but --pipeline-model-parallel-size is 4" in refusal(path)

    def test_other_microbatches(self, tmp_path: Path) -> None:
        choice = Choice(self.write(tmp_path, generate("v-half", 4, 9)))
        args = arguments(virtual_pipeline_model_parallel_size=2)
        with pytest.raises(ConfigError, match="for 9 microbatches but the run has 8"):
            after_megatron(args, choice)

    def test_batch_size_rampup(self, tmp_path: Path) -> None:
        choice = Choice(self.write(tmp_path, generate("v-half", 4, 8)))
        args = arguments(virtual_pipeline_model_parallel_size=2, rampup_batch_size=[8, 8, 100])
        with pytest.raises(ConfigError, match="--rampup-batch-size"):
            after_megatron(args, choice)

    def test_lowered_and_interleaved_files_are_accepted(self, tmp_path: Path) -> None:
        from megatron_ext.schedule import lower

        schedule = generate("interleaved", 4, 8, 3)
        choice = Choice(self.write(tmp_path, lower(schedule)))
        args = arguments()
        before_megatron(args, choice)
        assert args.num_virtual_stages_per_pipeline_rank == 3
        args.virtual_pipeline_model_parallel_size = 3
        assert after_megatron(args, choice) == 3
        assert choice.plan(4, 3, 8).ranks == schedule.ranks


def test_flags_are_in_their_own_group_and_off_by_default() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    assert vars(args) == {"pp_schedule": None, "pp_trace": None}
    assert GROUP in parser.format_help()
