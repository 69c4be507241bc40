"""``plan`` with sizes given and free: never slower than what the user has, in time."""

from __future__ import annotations

import json
import shlex
import time

import pytest

from tests.support.grids import sampled

LLAMA = (
    "--bf16 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
)


def model(layers, hidden, heads, ffn, groups=0, vocabulary=32000):
    """Megatron's flags of a model's sizes."""
    line = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
    line += f"--ffn-hidden-size {ffn} --vocab-size {vocabulary} "
    return line + (f"--group-query-attention --num-query-groups {groups} " if groups else "")


def run_of(world, batch, sequence, tensor, pipeline, more=""):
    """Megatron's flags of a run."""
    line = f"--world-size {world} --global-batch-size {batch} --seq-length {sequence} "
    line += f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
    return line + ("--sequence-parallel " if tensor > 1 else "") + more


VIRTUAL = "--num-virtual-stages-per-pipeline-rank "
SMALL = {
    "small": ("A100", LLAMA + model(16, 1024, 16, 4096) + run_of(4, 16, 2048, 1, 4)),
    "small-virtual": (
        "H100",
        LLAMA + model(12, 2048, 16, 5504) + run_of(8, 32, 2048, 2, 2, VIRTUAL + "3"),
    ),
}


def _answer(run, gpu, line, *more):
    begin = time.process_time()
    status, out, err = run("plan", "--gpu", gpu, "--from-args", line, *more, "--json")
    took = time.process_time() - begin
    assert (status, err) == (0, "")
    return json.loads(out), took


def _never_slower(run, gpu, line, *more):
    """Processor seconds of both answers, after all that has to hold of them."""
    given, took = _answer(run, gpu, line, *more)
    free, took_free = _answer(run, gpu, line, "--grid", *more)
    own = "--pipeline-model-parallel-size"
    for data in (given, free):
        yours = next(row for row in data["baselines"] if row["what"] == "yours")
        assert f"{own} {yours['division']['pipeline']}" in line
        for row in data["baselines"]:
            if row["fits"]:
                assert data["chosen"]["iteration_ms"] <= row["iteration_ms"], row["what"]
        for row in data["front"]:
            if len(set(row["layers"])) > 1 and not row["layout"]:
                assert "first" in line or "account" in line, "uneven stages need a layout"
    return took, took_free


@pytest.mark.parametrize("name", sampled(SMALL, [name for name in SMALL if name != "small"]))
def test_never_slower_than_given(run, name):
    _never_slower(run, *SMALL[name])


def test_the_difference_leads_to_the_answer(run):
    """The user's line with it is read as the answer."""
    gpu, line = SMALL["small-virtual"]
    data, _ = _answer(run, gpu, line, "--schedules", "v-half,v-zb")
    words = shlex.split(line)
    for each in data["difference"]:
        sign, flag, *value = shlex.split(each)
        if sign == "-":
            at = words.index(flag)
            assert words[at + 1 : at + 1 + len(value)] == value
            del words[at : at + 1 + len(value)]
        else:
            words += [flag, *value]
    assert "--num-virtual-stages-per-pipeline-rank" not in words
    again, _ = _answer(run, gpu, shlex.join(words))
    yours = next(row for row in again["baselines"] if row["what"] == "yours")
    assert yours["schedule"] == data["chosen"]["schedule"]
    assert yours["layers"] == data["chosen"]["layers"]
    assert yours["micro_batch_size"] == data["chosen"]["micro_batch_size"]


SLICED = (
    LLAMA + model(8, 2048, 16, 5504) + run_of(4, 2, 32768, 1, 4)
    + "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 "
)  # fmt: skip
PLAIN = "--schedules", "zb-h1", "--micro-batch-sizes", "1", "--offload", "off"


def test_slices_where_microbatches_are_few(run, tmp_path):
    """They gain what ``simulate`` says, and training takes their flag."""
    more = "--memory-cap", "1000GiB", "--shard-vocabulary", "off", *PLAIN
    data, _ = _answer(run, "H100", SLICED, *more)
    whole, _ = _answer(run, "H100", SLICED, *more, "--slices", "off")
    best = data["chosen"]
    assert best["slices"] in (2, 4) and f"--pp-slices {best['slices']}" in best["flags"]
    assert best["step_ms"] < 0.9 * whole["chosen"]["step_ms"]
    assert whole["chosen"]["slices"] == 1
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(best["stage_cost"]))
    words = [str(path) if word == "STAGE_COST_FILE" else word for word in best["simulate"]]
    said = json.loads(run("simulate", "--json", *words)[1])
    assert said["makespan"] / 1000 == pytest.approx(best["step_ms"], rel=1e-9)
    assert said["peak_activation"] == pytest.approx(best["peak_activation"])
    assert any("W of every slice" in text for text in data["assumptions"])
    three, _ = _answer(run, "H100", SLICED, *more, "--slices", "3")
    assert three["chosen"]["slices"] == 3


def test_slices_are_for_models_that_training_cuts(run):
    line = SLICED + "--context-parallel-size 1 --fp8-format hybrid "
    data, _ = _answer(run, "H100", line, *PLAIN, "--memory-cap", "1000GiB")
    assert all(row["slices"] == 1 for row in data["front"])


def test_flags_of_the_users_pipeline_are_not_ignored(run):
    """Their stages are counted, too."""
    _, line = SMALL["small-virtual"]
    data, _ = _answer(run, "H100", line + "--pp-schedule interleaved")
    assert data["ignored"] == []
    words = "plan", "--gpu", "H100", "--from-args"
    _, line = SMALL["small"]
    layout = f"{line} --pipeline-model-parallel-layout Et|(ttt|)*5L"
    status, out, err = run(*words, layout)
    assert (status, out) == (2, "") and "lists 7 stages, no multiple of" in err
