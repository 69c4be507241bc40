"""Architectures of today: sizes of published models, peaks measured by NVIDIA, bytes by hand."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_ext.commands.plan_given import Given
from megatron_ext.plan.activations import sums
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.kinds import layer
from megatron_ext.plan.layout import Stage, read_layout, split_of
from megatron_ext.plan.memory import stage_bytes
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.parameters import (
    Count,
    layer_parameters,
    stage_parameters,
    state_bytes,
)
from megatron_ext.plan.quantization import recipe_of

MODELS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def job(line):
    return job_of(read(line.split())[0])


# Billions of parameters by the model cards, without prediction layers; whole numbers are no more
# than the model's name. Qwen3.5 is counted here without its vision encoder.
PUBLISHED = {
    "DeepSeek-V3": 671.0,
    "Kimi-K2": 1026.4,
    "Qwen3-235B-A22B": 235.1,
    "Qwen3-30B-A3B": 30.5,
    "Llama-3-70B": 70.6,
    "Llama-3.1-405B": 405.9,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_of_published_models(model):
    this = job(f"{MODELS[model]} --seq-length 4096")
    stage = Stage(range(this.num_layers), first=True, last=True)
    total = stage_parameters(this, stage).total
    assert total / 1e9 == pytest.approx(PUBLISHED[model], rel=0.002)


DENSE = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --bf16 "
    "--disable-bias-linear --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 "
    "--vocab-size 1024 --swiglu --ffn-hidden-size 4096 "
)


def test_quantized_layers_keep_their_inputs_in_their_format():
    """Of 2 norm outputs (2sbh each) and the activation's output (8sbh) half and more is saved;
    the output projection keeps what attention keeps anyway, but a copy with delayed scaling."""
    kept = {}
    for recipe in ("", "tensorwise", "delayed", "mxfp8", "blockwise"):
        flags = f"--fp8-format hybrid --fp8-recipe {recipe}" if recipe else ""
        this = job(DENSE + flags)
        kept[recipe] = sums(this, layer(this, "*-"))[0] / (this.tokens * this.hidden_size)
    saved = {name: kept[""] - size for name, size in kept.items()}
    inputs = 1 + 1 + 4  # elements per b*s*h
    assert saved["tensorwise"] == pytest.approx(inputs)
    assert saved["delayed"] == pytest.approx(inputs - 1)
    assert saved["mxfp8"] == pytest.approx(inputs * (2 - 33 / 32))
    assert saved["blockwise"] == pytest.approx(inputs * (2 - 33 / 32))


@pytest.mark.parametrize(
    ("flags", "count", "total"),
    [
        # Weights twice in FP8, and in 16 bits unless gathered in FP8; fp32 gradients, 12 for Adam.
        ("--fp8-format hybrid --fp8-recipe tensorwise", Count(dense=1000), 2 + 2 + 4 + 12),
        ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", Count(1000), 2 + 4 + 12),
        ("--fp8-format hybrid --fp8-recipe tensorwise", Count(other=1000), 2 + 4 + 12),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
            Count(dense=3200),
            2 * 33 / 32 + 4 + 12,
        ),
        (
            "--fp8-format hybrid --fp8-param-gather --disable-parameter-transpose-cache",
            Count(dense=1000),
            2 + 4 + 12,
        ),
        # Both copies are in every set.
        ("--fp8-format hybrid --disable-parameter-transpose-cache", Count(1000), 2 + 4 + 12),
        # Muon: one fp32 moment for matrices, Adam for what is none.
        ("--optimizer muon", Count(dense=1000), 2 + 4 + 8),
        ("--optimizer muon", Count(other=1000), 2 + 4 + 12),
        ("--optimizer dist_muon --world-size 4", Count(dense=1000), 2 + 4 + 8 / 4),
        ("--optimizer-cpu-offload", Count(dense=1000), 2 + 4),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.25",
            Count(dense=1000),
            2 + 4 + 12 * 0.75,
        ),
    ],
)
def test_bytes_of_a_parameter(flags, count, total):
    assert state_bytes(job(DENSE + flags), count).total == pytest.approx(count.total * total)


@pytest.mark.parametrize("again", [False, True])
def test_sets_keep_weights_that_every_microbatch_quantizes(again):
    """Both copies until B; of layers that B runs once more only then; none that are gathered so."""
    line = DENSE + "--num-experts 8 --moe-ffn-hidden-size 512 --fp8-format hybrid "
    line += "--recompute-granularity selective --recompute-modules moe " if again else ""
    flag = "--disable-parameter-transpose-cache "
    plain, every, gathered, both = (
        job(line + flags)
        for flags in ("", flag, "--fp8-param-gather ", "--fp8-param-gather " + flag)
    )

    def sets(this):
        return sums(this, layer(this, "*E"))

    weights = layer_parameters(plain, 0)
    kept = weights.dense if again else weights.dense + weights.expert
    forward, back, once_more = (b - a for a, b in zip(sets(plain), sets(every)))
    assert (forward, back) == (2 * kept, 0)
    assert once_more == (2 * weights.expert if again else 0) and weights.expert
    assert sets(gathered) == sets(both) == sets(plain)


def test_prediction_is_where_the_layout_has_it():
    """Standalone before the loss: its stage has an embedding, the last one two softmaxes."""
    line = DENSE + "--vocab-size 64000 --untie-embeddings-and-output-weights --mtp-num-layers 1 "
    line += "--pipeline-model-parallel-layout Ett|tt|m|L "
    this = job(line)
    split = split_of(this, 4)
    assert split is not None and split.predicts == 2
    stages = stage_bytes(this, split)
    words = this.padded_vocab_size * this.hidden_size
    assert stages[2].parameters.total > words and stages[2].parameters.dense > 0
    assert stages[3].parameters.total == words + this.hidden_size
    softmax = 4 * this.tokens * this.padded_vocab_size
    assert 2 * softmax < stages[3].sets.bytes_f_to_b < 2.1 * softmax
    fused = job(line + "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    sets = stage_bytes(fused, split)[3].sets
    assert sets.bytes_f_to_b < 1.1 * softmax and sets.logits == 0
    assert read_layout("Ett|ttmL", 4).predicts == -1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hybrid-layer-pattern MM", "not modelled: --hybrid-layer-pattern"),
        ("--fp8-format hybrid --fp8-recipe custom", "must be one of delayed, tensorwise"),
        ("--window-size 5", "BEFORE,AFTER"),
        ("--moe-layer-freq 0 --num-experts 4", "N >= 1"),
        (
            "--num-experts 8 --expert-model-parallel-size 8 --world-size 4",
            "8 expert-parallel x expert-tensor-parallel ranks do not divide",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, words):
    with pytest.raises(PlanError, match=words):
        job(DENSE + flags)


SMALL = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 512"


@pytest.mark.parametrize(
    ("more", "chunks"),
    [
        ("--num-layers 14 --num-layers-per-virtual-pipeline-stage 2", 1),
        (
            "--num-layers 14 --num-layers-per-virtual-pipeline-stage 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            2,
        ),
    ],
)
def test_chunks_of_the_users_own_pipeline(more, chunks):
    line = f"{SMALL} --pipeline-model-parallel-size 4 {more}"
    args = Namespace(from_args=Namespace(flags=line.split()), grid=None)
    own = Given.of(args, read(line.split())[0])
    assert (own.chunks, own.schedule) == (chunks, "interleaved" if chunks > 1 else "1f1b")


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, None),
        ({"fp8": None, "fp8_recipe": "delayed"}, None),
        ({"fp8_format": "hybrid"}, "delayed"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"fp8": "e4m3", "fp8_recipe": Namespace(value="blockwise")}, "blockwise"),
    ],
)
def test_the_recipe_of_flags_arguments_and_configurations(given, recipe):
    assert recipe_of(given.get) == recipe
