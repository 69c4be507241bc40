"""Costs and bytes that decide on the order: measured in training, from a profile, under a cap."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron_ext.integration import ConfigError
from megatron_ext.integration.features.schedule.choose import ScheduleRequest
from megatron_ext.integration.features.schedule.estimate import capped
from megatron_ext.integration.features.schedule.job import job_of_args, splits_of
from megatron_ext.integration.offload_request import OffloadRequest
from megatron_ext.plan.budget import Budget
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import Split, even_split
from megatron_ext.plan.memory import rank_bytes
from megatron_ext.plan.profile import Profile
from megatron_ext.plan.times import PassTimes
from megatron_ext.schedule import AUTO, Costs, generate, simulate
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.io import save
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.planner import Knowledge
from tests.support.stand_ins import after_megatron, before_megatron

from .test_flags import arguments, refusal


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

    def test_measured_bytes_that_do_not_fit_change_the_order(self, tmp_path: Path) -> None:
        """Under v-cap with a cap in bytes: sets are larger than estimated, so fewer may stay."""
        choice, budget = self.budgeted("v-cap", 1.0)
        former = choice.plan(16)
        assert budget.worst(former).total <= budget.size
        measured = measured_profile(budget, 1.15)
        costs = measured.costs(Split(measured.layers))
        plan = choice.plan(16, Knowledge(costs=costs, reorder=True, profile=measured))
        seen = replace(budget, profile=measured)
        assert seen.worst(former).total > seen.size >= seen.worst(plan).total
        assert max(peak_sets(plan.ranks)) < max(peak_sets(former.ranks))
        assert "re-planned for measured bytes, which the former order exceeds: " in plan.note
        assert "activation sets (measured" in plan.note

    def test_measured_bytes_for_which_nothing_fits_change_nothing(self) -> None:
        """Training has begun: it goes on, and the log says what would fit."""
        choice, budget = self.budgeted("v-cap", 1.0)
        measured = measured_profile(budget, 30.0)
        costs = measured.costs(Split(measured.layers))
        plan = choice.plan(16, Knowledge(costs=costs, reorder=True, profile=measured))
        assert plan.ranks == choice.plan(16).ranks
        assert "by measured bytes v-cap at pp=4 with 16 microbatches does not fit in" in plan.note
        assert re.search(r": it takes \S+iB, where rank \d binds .*; raise the cap to", plan.note)

    def test_smaller_sets_let_auto_take_a_faster_order_for_the_same_stages(self) -> None:
        """auto had to take v-half; v-zb's smaller sets fit, and the model is placed for it."""
        choice, budget = self.budgeted("auto", 0.0)
        former = choice.plan(16)
        measured = measured_profile(budget, 0.3)
        costs = measured.costs(Split(measured.layers))
        plan = choice.plan(16, Knowledge(costs=costs, reorder=True, profile=measured))
        assert (plan.placement, plan.name) != (former.placement, former.name)
        assert plan.placement == former.placement
        assert simulate(plan).makespan < simulate(former, costs).makespan

    @pytest.mark.parametrize(("factor", "kept"), [(1.2, True), (3.0, False)])
    def test_with_offload_the_cap_is_of_what_stays(self, factor: float, kept: bool) -> None:
        """In whole sets of the largest size; measured ones, which are larger, make it smaller. If
        nothing keeps it then, training goes on as it was."""
        _, budget = self.budgeted("v-cap", 1.0)
        sizes = (replace(budget, size=n << 20) for n in range(1, 1000))
        budget = next(b for b in sizes if min(b.room(Placement.vee(4), True)) == 5)
        offloading = OffloadRequest("full", "0.25")
        request = ScheduleRequest.of("v-half", memory_cap=f"{budget.size}B", offloading=offloading)
        request = capped(replace(request, splits=budget.splits), budget.job)
        choice = request.resolve(4, 2, 16)
        link = offloading.link(4)
        former = choice.plan(16, Knowledge(link))
        sets = budget.sets(former.placement, True)
        assert max(peak_sets(former.ranks)) <= sets
        assert f"a rank are a cap of {sets} activation sets of estimated size" in choice.about
        measured = measured_profile(budget, factor)
        costs = measured.costs(Split(measured.layers))
        plan = choice.plan(16, Knowledge(link, costs=costs, reorder=True, profile=measured))
        fewer = replace(budget, profile=measured).sets(former.placement, True)
        assert fewer < sets
        if kept:
            assert max(peak_sets(plan.ranks)) <= fewer
            assert "by measured bytes" not in plan.note
        else:
            assert plan.ranks == former.ranks
            assert "the order stays" in plan.note and "by measured bytes" in plan.note
            assert choice.plan(16, Knowledge(link)).ranks == former.ranks

    def test_with_offload_a_cap_with_no_room_names_the_flag(self) -> None:
        """A schedule with no order to choose counts the cap's sets before any order."""
        _, budget = self.budgeted("v-cap", 1.0)
        offloading = OffloadRequest("full", "0.25")
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


def measured_profile(budget: Budget, factor: float) -> Profile:
    """Equal times, and sets so many times as large as estimated."""
    stages = budget.stages(Placement.vee(4))
    return Profile(
        1,
        (2,) * 8,
        (PassTimes(0.1, 0.1, 0.1),) * 8,
        set_bytes=tuple(int(factor * s.sets.bytes_f_to_b) for s in stages),
        weight_set_bytes=tuple(int(factor * s.sets.bytes_b_to_w) for s in stages),
    )


class TestProfileFlag:
    """``--pp-profile``: written with ``--pp-profile-steps``, read without."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        **{"pp_cost": None, "pp_cheap_recompute": None, "rank": 0, "hidden_size": 64},
        **{"seq_length": 32, "expert_model_parallel_size": 1},
    }

    def file(self, tmp_path: Path, **changed: Any) -> str:
        path = tmp_path / "profile.json"
        values: dict[str, Any] = {"micro_batch_size": 2, "model": {"hidden_size": 64}, **changed}
        layers = values.setdefault("layers", (4,) * 4)
        stages = tuple(PassTimes(0.1, 0.1, 0.1 + s / 50) for s in range(len(layers)))
        Profile(stages=stages, **values).save(str(path))
        return str(path)

    def test_is_planned_with_from_the_first_step_on(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, layers=(2,) * 8)
        args = arguments(pp_profile=path, **self.ARGUMENTS)
        request = before_megatron(args, ScheduleRequest.of("v-zb"))
        args.virtual_pipeline_model_parallel_size = 2
        choice = after_megatron(args, request)
        costs = Profile.load(path).costs(Split((2,) * 8))
        assert choice.plan(8).ranks == generate("v-zb", 4, 8, 2, costs).ranks
        assert choice.plan(8).ranks != generate("v-zb", 4, 8, 2).ranks

    def test_transfer_times_are_its_too(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, set_bytes=(64,) * 4, to_host=1000.0, to_device=500.0)
        request = ScheduleRequest.of("zb-h1", offloading=OffloadRequest("full"))
        args = arguments(pp_profile=path, **self.ARGUMENTS)
        choice = after_megatron(args, before_megatron(args, request))
        assert choice.offload is not None and choice.offload.known
        link = choice.offload.link(4)
        assert link is not None
        # 64 bytes at 1000 bytes/s beside passes of 0.3 s: 0.213, in 64ths, rounded up.
        assert (link.to_host[0], link.to_device[0]) == (Fraction(14, 64), Fraction(28, 64))

    @pytest.mark.parametrize(
        ("changed", "flags", "text"),
        [
            ({}, {"pp_cost": "1,1,1"}, "both give pass times; keep one"),
            ({"micro_batch_size": 1}, {}, "--micro-batch-size 1, but the job has 2"),
            ({"model": {"hidden_size": 32}}, {}, "--hidden-size 32, but the job has 64"),
            ({"cheap_recompute": True}, {}, "with --pp-cheap-recompute, but the job is without"),
            (
                {"settings": {"recomputation": "full uniform 1"}},
                {"recompute_activations": True},
                "recomputation 'full uniform 1', but the job has core_attn",
            ),
            ({"settings": {"quantization": "none"}}, {"fp8": "hybrid"}, "the job has delayed"),
        ],
    )
    def test_is_refused(
        self, tmp_path: Path, changed: dict[str, Any], flags: dict[str, Any], text: str
    ) -> None:
        path = self.file(tmp_path, **changed)
        assert text in refusal("zb-h1", pp_profile=path, **{**self.ARGUMENTS, **flags})

    def test_only_a_profile_is_overwritten(self, tmp_path: Path) -> None:
        own = {**self.ARGUMENTS, "pp_profile_steps": 2}
        before_megatron(
            arguments(pp_profile=self.file(tmp_path), **own), ScheduleRequest.of("zb-h1")
        )
        before_megatron(
            arguments(pp_profile=str(tmp_path / "new"), **own), ScheduleRequest.of("zb-h1")
        )
        other = tmp_path / "weights.bin"
        other.write_bytes(b"precious")
        text = refusal("zb-h1", pp_profile=str(other), **own)
        assert "needs a new file or a profile to overwrite, but this one is none" in text
        text = refusal("zb-h1", pp_profile=str(tmp_path / "none" / "x"), **own)
        assert "needs a folder to be written to after 2 steps" in text

    def test_a_file_has_its_own_order(self, tmp_path: Path) -> None:
        save(generate("1f1b", 4, 8), tmp_path / "x.json")
        path = self.file(tmp_path)
        text = refusal(str(tmp_path / "x.json"), pp_profile=path, **self.ARGUMENTS)
        assert f"is a file, whose order is fixed; drop --pp-profile {path}" in text


class TestCapInBytes:
    def test_that_is_no_size(self) -> None:
        with pytest.raises(ConfigError, match="a size must be a number of bytes > 0"):
            ScheduleRequest.of("auto", memory_cap="0GiB")

    def test_of_a_model_that_is_not_modelled(self) -> None:
        args = arguments(use_torch_fsdp2=True, pp_memory_cap="4GiB")
        with pytest.raises(ConfigError, match="not modelled: --use-torch-fsdp2.* as a fraction"):
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
