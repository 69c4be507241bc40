"""Costs and bytes that decide on the order: measured in training, under a cap."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.schedule.described import capped
from megatron_ext.integration.features.schedule.job import job_of_args, splits_of
from megatron_ext.plan.budget import Budget
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import rank_bytes
from megatron_ext.schedule import AUTO, Costs, generate, simulate
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.planner import Knowledge
from tests.support.stand_ins import after_megatron, before_megatron

from .test_flags import arguments


class TestAutoInVirtualStages:
    """Layers of the first and the last rank, as Megatron divides them over virtual stages."""

    def decided(self, **changed: Any) -> ScheduleRequest:
        request = before_megatron(arguments(**changed), ScheduleRequest.of(AUTO))
        return request.resolve(4, None, 8)

    def test_layers_of_both_ends_are_of_all_their_stages(self) -> None:
        names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        choice = self.decided(num_virtual_stages_per_pipeline_rank=2, **dict.fromkeys(names, 2))
        assert choice.splits is not None
        assert choice.splits(8).counts == (1, 3, 3, 1) * 2

    def test_both_ends_count_as_layers_of_a_stage(self) -> None:
        names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        each = {"num_layers": 14, "num_layers_per_virtual_pipeline_stage": 1}
        assert self.decided(**each, **dict.fromkeys(names, True)).plan(8).chunks == 4


class TestReplanning:
    """``--pp-profile-steps``: the order for measured costs, where it is faster under them."""

    HEAVY = Costs.of(stages=[[2, 2, 2]] * 7 + [[3, 3, 3]])

    def test_a_better_order_is_taken(self) -> None:
        choice = ScheduleRequest.of("v-zb").resolve(4, 2, 16)
        former = choice.plan(16)
        plan = choice.plan(16, Knowledge(costs=self.HEAVY, reorder=True))
        assert plan.ranks != former.ranks
        before = simulate(former, self.HEAVY).makespan
        after = simulate(plan).makespan
        assert after < before
        assert plan.note == (
            f"re-planned for measured times: {float(1 - after / before):.2%} less time a step"
        )

    def test_an_order_that_is_no_better_is_not(self) -> None:
        choice = ScheduleRequest.of("1f1b").resolve(4, 1, 16)
        costs = Costs.of(stages=[[2, 2, 2]] * 3 + [[3, 3, 3]])
        plan = choice.plan(16, Knowledge(costs=costs, reorder=True))
        assert plan.ranks == choice.plan(16).ranks
        assert plan.note == "the order stays: made for measured times it would take as long"

    def test_with_offload_a_cap_with_no_room_names_the_flag(self) -> None:
        """A schedule with no order to choose counts the cap's sets before any order."""
        _, budget = self.budgeted("v-cap", 1.0)
        offloading = "full"
        request = ScheduleRequest.of("v-half", memory_cap="256KiB", offloading=offloading)
        request = capped(replace(request, splits=budget.splits), budget.job)
        with pytest.raises(ConfigError, match="^--pp-schedule v-half: 256KiB a rank leave no room"):
            request.resolve(4, 2, 16)

    @staticmethod
    def budgeted(name: str, share: float) -> tuple[ScheduleRequest, Budget]:
        """A choice with a cap in bytes, between v-half's peak (0) and v-zb's (1)."""
        line = "--num-layers 16 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --bf16"
        line += " --vocab-size 1024 --untie-embeddings-and-output-weights"
        budget = Budget(job_of(read(line.split())[0]), 1, lambda n: even_split(16, n))
        small, large = (budget.worst(generate(kind, 4, 16, 2)).total for kind in ("v-half", "v-zb"))
        size = int(small + share * (large - small))
        budget = replace(budget, size=size)
        request = ScheduleRequest.of(name, memory_cap=f"{size}B")
        request = capped(replace(request, splits=budget.splits), budget.job)
        if name == AUTO:
            request = request.decide(4, 16, ("v-min", "v-half", "v-zb", "v-cap"))
        return request.resolve(4, 2, 16), budget


class TestCapInBytes:
    def test_that_is_no_size(self) -> None:
        with pytest.raises(ConfigError, match="a size must be a number of bytes > 0"):
            ScheduleRequest.of("auto", memory_cap="0GiB")

    def test_of_a_model_that_is_not_modelled(self) -> None:
        args = arguments(use_torch_fsdp2=True, pp_memory_cap="4GiB")
        with pytest.raises(ConfigError, match="not modelled: --use-torch-fsdp2; give a fraction"):
            before_megatron(args, ScheduleRequest.of("auto", memory_cap="4GiB"))

    def test_knows_the_stage_with_prediction(self) -> None:
        layout = "Etttt|tttt|tttt|ttt|t|m|L"
        for text, where in ((layout, 5), ("Etttt|tttt|tttt|ttttmL", -1)):
            split = splits_of(arguments(pipeline_model_parallel_layout=text))(text.count("|") + 1)
            assert (sum(split.counts), split.predicts) == (16, where)


class TestCapAsFraction:
    """Of 1F1B's bytes, where a set grows between B and W: recomputed norms and activations do."""

    SIZES: ClassVar[dict[str, Any]] = {
        **{"hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "vocab_size": 1024},
        **{"bf16": True, "untie_embeddings_and_output_weights": True, "rank": 0},
        **{"attention_backend": "flash", "transformer_impl": "local", "add_bias_linear": True},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    }

    def held(self, name: str, **flags: Any) -> tuple[ScheduleRequest, Fraction]:
        """The choice, and what its fullest rank holds as a fraction of 1F1B's bytes."""
        args = arguments(**self.SIZES, **flags)
        request = before_megatron(args, ScheduleRequest.of(name, memory_cap=flags["pp_memory_cap"]))
        args.virtual_pipeline_model_parallel_size = None if request.name == "1f1b" else 2
        choice = after_megatron(args, request)
        budget = Budget(job_of_args(arguments(**self.SIZES, **flags)), 1, splits_of(args))
        # A stage without embedding and loss; 1F1B's one chunk is two of a V.
        plan, size = choice.plan(8), budget.stages(Placement.vee(4))[2]
        bare = [size._replace(sets=size.sets._replace(layer=0, recompute_bytes=0))] * 8
        held = max(rank.kept + rank.passing for rank in rank_bytes(plan, bare, 0))
        return choice, Fraction(held, 2 // plan.chunks * size.sets.bytes_f_to_b * 8)

    def test_is_kept_in_bytes(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        _, plain = self.held("v-cap", pp_memory_cap="0.75")
        assert 0.6 < plain <= 0.75 and "between B and W" not in caplog.text
        choice, less = self.held("v-cap", pp_memory_cap="0.75", pp_cheap_recompute=True)
        assert 0.5 < less <= 0.75
        assert max(peak_sets(choice.plan(8).ranks)) < 6
        assert "takes up to 1." in caplog.text and "as many bytes between B and W" in caplog.text

    def test_auto_takes_no_more_than_1f1bs_bytes(self) -> None:
        choice, held = self.held("auto", pp_memory_cap="1", pp_cheap_recompute=True)
        assert held <= 1
        assert "too large: " in choice.about and "zb-h1 (" in choice.about
