"""Profile files: what was measured comes back exactly, and is refused for another run."""

from __future__ import annotations

import json
from enum import Enum
from fractions import Fraction
from math import ceil

import pytest

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.layout import Split
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.profile import Profile
from megatron_ext.plan.quantization import recipe_of
from megatron_ext.plan.times import PassTimes
from megatron_ext.schedule.placement import Placement

LINE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
JOB = job_of(read(LINE.split())[0])
SPLIT = Split((1, 1, 1, 1))
PROFILE = Profile(
    1,
    SPLIT.counts,
    tuple(PassTimes(0.1 + s / 7, 0.2, 0.1 / 3) for s in range(4)),
    set_bytes=(100, 90, 90, 200),
    weight_set_bytes=(50, 50, 50, 60),
    hop=1 / 3000,
    to_host=1000.0,
    to_device=2000.0,
    model={"hidden_size": 64, "seq_length": 32, "tensor_model_parallel_size": 1},
    settings={"recomputation": "none", "quantization": "none"},
)


def test_a_file_holds_all_of_it_exactly(tmp_path):
    path = tmp_path / "new" / "profile.json"
    for profile in (PROFILE, Profile(1, SPLIT.counts, PROFILE.stages)):
        profile.save(str(path))
        assert Profile.load(str(path)) == profile
        # Replaced as a whole: nothing else is left in the folder.
        assert [file.name for file in path.parent.iterdir()] == ["profile.json"]
    assert "set_bytes" not in json.loads(path.read_text())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"hidden_size": 128}, "--hidden-size 64, but the job has 128"),
        ({"seq_length": 64}, "--seq-length 32, but the job has 64"),
        ({"micro_batch_size": 2}, "--micro-batch-size 1, but the job has 2"),
        ({"num_layers": 8}, "--num-layers 4, but the job has 8"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "full uniform 1"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn")},
            "recomputation 'none', but the job has core_attn, mlp",
        ),
        ({"recipe": "delayed"}, "quantization 'none', but the job has delayed"),
        ({"cheap_recompute": True}, "without --pp-cheap-recompute, but the job is with"),
    ],
)
def test_another_run_is_refused(changed, text):
    PROFILE.require(JOB)
    with pytest.raises(PlanError, match=text):
        PROFILE.require(JOB.with_(**changed))


class Recipe(str, Enum):
    """As megatron.core.enums.Fp8Recipe, which a model's configuration may have."""

    blockwise = "blockwise"


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, None),
        ({"fp8": None, "fp8_recipe": "delayed"}, None),
        ({"fp8_format": "hybrid"}, "delayed"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"fp8": "e4m3", "fp8_recipe": Recipe.blockwise}, "blockwise"),
    ],
)
def test_the_recipe_of_flags_arguments_and_configurations(given, recipe):
    found = recipe_of(given.get)
    assert found == recipe and type(found) in (str, type(None))


@pytest.mark.parametrize("settings", [{"recompute": "none"}, {"quantization": None}, ["none"]])
def test_settings_that_are_not_understood_are_refused(settings, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.to_json() | {"settings": settings}))
    with pytest.raises(PlanError, match='json: "settings" may have recomputation, q'):
        Profile.load(str(path))


def test_costs_are_in_64ths_of_the_mean_pass():
    rows = PROFILE.costs(SPLIT).stages
    mean = sum(map(sum, PROFILE.stages)) / 12
    for row, seconds in zip(rows, PROFILE.stages):
        assert row == tuple(Fraction(round(64 * x / mean)) for x in seconds)
    assert PROFILE.costs(SPLIT).hop == round(64 * PROFILE.hop / mean)
    # Other seconds, in the same proportions: the same plan.
    slower = Profile(1, SPLIT.counts, tuple(PassTimes(*(9 * x for x in r)) for r in PROFILE.stages))
    assert slower.costs(SPLIT).stages == rows


def test_every_stage_has_transfer_times():
    """Set bytes over rate over F+B+W, in 64ths, rounded up; rank 0 of the V has stages 0 and 3."""
    placement = Placement.vee(2)
    link = PROFILE.link(SPLIT, placement)
    for stage, size in enumerate(PROFILE.set_bytes):
        part = size / sum(PROFILE.stages[stage])
        there, back = link.of_stage(placement, stage)
        assert (there, back) == tuple(Fraction(ceil(64 * part / x), 64) for x in (1000, 2000))
    assert link.of_stage(placement, 0) != link.of_stage(placement, 3)
    assert Profile(1, SPLIT.counts, PROFILE.stages).link(SPLIT, placement) is None
