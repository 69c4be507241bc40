"""``plan``: what it prints, and how bad input is told."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

MODEL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 "
    "--vocab-size 64000 --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --use-distributed-optimizer"
)
SIZES = "--pp 4 --world-size 4 --microbatches 4 --gpu A100"
FAST = "--micro-batch-sizes 1 --schedules 1f1b,v-half,v-zb"
_ANSWERS = {}  # several tests look at the same one


def _json(run, *words):
    if words not in _ANSWERS or "--output" in words:
        line = " ".join([MODEL, SIZES, FAST, *words, "--json"])
        status, out, err = run("plan", *shlex.split(line))
        assert err == ""
        data = json.loads(out)
        assert status == (0 if data["chosen"] else 1)
        _ANSWERS[words] = out
    return json.loads(_ANSWERS[words])


def test_json_says_what_to_use_and_why(run, tmp_path):
    data = _json(run, "--memory-cap", "12GiB")
    assert data["memory_cap_bytes"] == 12 * 2**30 and data["pp"] == 4
    assert 0.07 < data["expected_error"] < 0.08  # of the A100, without tensor parallelism
    chosen = data["chosen"]
    first = data["front"][0]
    assert chosen["step_ms"] == first["step_ms"]
    assert {key: chosen[key] for key in first} in data["front"]
    assert max(rank["total"] for rank in chosen["ranks"]) == chosen["peak_bytes"] <= 12 * 2**30
    for rank in chosen["ranks"]:
        parts = "parameters", "gradients", "optimizer", "activations", "running_pass"
        assert sum(rank[part] for part in parts) == rank["total"]
    keys = [(p["iteration_ms"], p["peak_bytes"], p["host_bytes"]) for p in data["front"]]
    assert keys == sorted(keys)
    for key in keys:
        others = [other for other in keys if other != key]
        assert not any(all(a <= b for a, b in zip(other, key)) for other in others)
    path = tmp_path / "stages.json"
    for point in data["front"]:
        path.write_text(json.dumps(point["stage_cost"]))
        words = [str(path) if word == "STAGE_COST_FILE" else word for word in point["simulate"]]
        said = json.loads(run("simulate", "--json", *words)[1])
        # A point's order had a part of the search's effort.
        assert said["makespan"] / 1000 <= point["step_ms"] * (1 + 1e-12)
        if not point["simulate"][1].startswith("v-"):
            assert said["makespan"] / 1000 == pytest.approx(point["step_ms"], rel=1e-12)
            assert said["peak_activation"] == point["peak_activation"]
    assert any("flash attention" in text for text in data["assumptions"])


def test_a_command_line_is_taken_as_it_is(run):
    line = f"torchrun --nproc-per-node 4 pretrain_gpt.py {MODEL} --lr 1e-4 --data-path a b --tb x"
    words = [*shlex.split(SIZES + " " + FAST), "--memory-cap", "12GiB", "--json"]
    status, out, _ = run("plan", "--from-args", line, *words)
    assert status == 0
    data, direct = json.loads(out), _json(run, "--memory-cap", "12GiB")
    assert data["ignored"] == ["--lr", "--data-path", "--tb"]  # the launcher's ranks count
    assert data["chosen"] == direct["chosen"]
    # What stands beside it wins.
    other = run("plan", "--from-args", line, *words, "--seq-length", "1024")[1]
    assert json.loads(other)["chosen"]["step_ms"] < data["chosen"]["step_ms"]


def test_the_table_has_the_flags(run):
    words = shlex.split(f"{MODEL} {SIZES} {FAST} --memory-cap 30GiB")
    status, out, _ = run("plan", *words)
    assert status == 0
    assert "--pp-schedule v-" in out and "--micro-batch-size 1" in out
    assert "step times: expect an error of 7%" in out
    assert (
        "Pareto-optimal in time of an iteration" in out and " assumptions; --verbose lists" in out
    )
    assert out.count("\nyours: ") == 2 and "\nstock: interleaved" in out
    status, out, _ = run("plan", *words, "--verbose")
    assert status == 0 and "\nassumptions:\n" in out and "flash attention" in out


def test_the_written_schedule_is_the_plans(run, tmp_path):
    path = tmp_path / "plan.json"
    data = _json(run, "--memory-cap", "30GiB", "--output", str(path))
    assert f"--pp-schedule {path}" in data["chosen"]["flags"]
    said = json.loads(run("simulate", "--schedule", path, "--json")[1])
    assert said["makespan"] / 1000 == pytest.approx(data["chosen"]["step_ms"], rel=1e-12)


def test_a_sharded_vocabulary_is_proposed_where_it_wins(run, tmp_path):
    path = tmp_path / "plan.json"
    words = "--memory-cap", "30GiB", "--vocab-size", "256000", "--slices", "off"
    data = _json(run, *words, "--output", str(path))
    chosen = data["chosen"]
    assert chosen["vocab_parallel"] and "--pp-vocab-parallel" in chosen["flags"]
    said = json.loads(run("simulate", "--schedule", path, "--json")[1])
    assert said["makespan"] / 1000 == pytest.approx(chosen["step_ms"], rel=1e-12)
    assert run("simulate", "--schedule", path)[0] == 0
    off = _json(run, *words, "--shard-vocabulary", "off")["chosen"]
    assert chosen["step_ms"] < off["step_ms"]
    assert not any("vocab" in flag for flag in off["flags"])
    asked = _json(run, *words, "--pp-vocab-parallel")
    assert all(point["vocab_parallel"] for point in asked["front"])
    assert asked["chosen"]["step_ms"] == chosen["step_ms"]


def test_what_the_answer_is_compared_with(run):
    """The flags as they are, and Megatron's best interleaving of all that is searched."""
    yours, stock = _json(run, "--memory-cap", "30GiB")["baselines"]
    assert (yours["what"], yours["schedule"], yours["chunks"], yours["gain"]) == (
        *("yours", "1f1b", 1),
        0.0,
    )
    assert (stock["what"], stock["schedule"], stock["fits"]) == ("stock", "interleaved", True)
    assert stock["gain"] == pytest.approx(1 - stock["iteration_ms"] / yours["iteration_ms"])
    assert 0 < stock["gain"] < 1 and stock["chunks"] in (2, 4)
    line = f"{MODEL} --num-layers-per-virtual-pipeline-stage 2"
    words = ["--from-args", line, *shlex.split(SIZES + " " + FAST), "--memory-cap", "1MiB"]
    status, out, _ = run("plan", *words, "--json")
    yours, stock = json.loads(out)["baselines"]
    assert (status, yours["schedule"], yours["chunks"], yours["fits"]) == (
        *(1, "interleaved", 2),
        False,
    )


LINE = f"{MODEL} --pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 4"
ONE = "--gpu A100 --micro-batch-sizes 1 --schedules 1f1b --cheap-recompute off --offload off"


def test_the_users_own_layout(run):
    """Unequal stages are not called even, and what a printed layout excludes is named."""
    uneven = "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6"
    words = ["--from-args", f"{LINE} {uneven}", *shlex.split(ONE)]
    status, out, err = run("plan", *words)
    assert (status, err) == (0, "")
    (row,) = (line.split() for line in out.splitlines() if line.startswith("yours: 1f1b"))
    assert "given" in row and "even" not in row
    assert "--pipeline-model-parallel-layout" in out
    first, last = uneven.split()[::2]
    assert f"- {first} 2" in out and f"- {last} 6" in out
    assert f"- {first}" not in run("plan", *words, "--no-balance")[1]
    virtual = "--num-layers-per-virtual-pipeline-stage 2"
    data = json.loads(
        run("plan", "--from-args", f"{LINE} {virtual}", *shlex.split(ONE), "--json")[1]
    )
    assert data["replaced_flags"] == [virtual.split()[0]]


def test_flags_that_do_not_start(run):
    words = ["--from-args", f"{LINE} --num-layers 18", *shlex.split(ONE)]
    status, out, _ = run("plan", *words)
    why = "yours has no row: your flags do not divide 18 layers over 4 stages (4 ranks x 1)"
    assert status == 0 and f"{why}, so Megatron does not start with them" in out
    assert "yours: 1f1b" not in out
    status, _, err = run("plan", *words, "--no-balance")
    assert status == 2 and "18 layers on 4 ranks; leave out --no-balance" in err


def test_what_the_flags_lack_is_in_the_answer(run):
    """An assumed vocabulary may change a step by more than any schedule."""
    line = LINE.replace("--vocab-size 64000", "")
    out = run("plan", "--from-args", line, *shlex.split(ONE))[1]
    assert "assumed: no --vocab-size (a tokenizer decides it): 128256 is assumed" in out
    assert "assumed:" not in run("plan", "--from-args", LINE, *shlex.split(ONE))[1]


def test_nothing_fits(run):
    data = _json(run, "--memory-cap", "2GiB")
    assert data["chosen"] is None and data["front"] == []
    need = data["needs"]
    assert need["bytes"] > 2 * 2**30 and need["part"] and need["rank"] in range(4)
    assert _json(run, "--memory-cap", str(need["bytes"]))["chosen"] is not None
    status, text, _ = run("plan", *shlex.split(f"{MODEL} {SIZES} {FAST} --memory-cap 2GiB"))
    assert status == 1, "for scripts"
    assert "yours: 1f1b (too large)" in text
    assert "nothing fits in 2.00 GiB" in text and "binds" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--gpu Z80", "unknown GPU 'Z80'"),
        ("--memory-cap lots", "such as 40GiB"),
        ("--memory-cap 60", "--memory-cap 60 is 60 bytes; write 60GiB?"),
        ("--memory-cap 60KiB", "--memory-cap 60KiB is 61440 bytes, less than 1 MiB"),
        ("--reserve 200GiB", "leaves nothing"),
        ("--schedules x", "unknown schedule 'x'"),
        ("--pp 1", "at least 2 ranks"),
        ("--pp 3", "no multiple of tensor x pipeline"),
        ("--global-batch-size 8", "both give the batch"),
        ("--micro-batch-sizes 3", "no multiple of --micro-batch-size 3"),
        ("--efficiency 2", "a share"),
        ("--host-bandwidth fast", "in bytes/s"),
        ("--from-args '--use-megatron-fsdp --bf16'", "not modelled: --use-megatron-fsdp"),
        ("--from-args '\"'", "cannot be split"),
        ("--from-args no.sbatch", "'no.sbatch' has no flag (--name)"),
        ("--hidden-size 7", "--hidden-size 7 is no multiple of --num-attention-heads 16"),
        ("--gpu ./no.json", "--gpu ./no.json cannot be read: No such file or directory"),
        ("--hf-config no.json", "cannot read --hf-config no.json: No such file or directory"),
        ("--output plan.svg --memory-cap 30GiB", "ends in .json"),
    ],
)
def test_bad_input_is_one_line(run, change, words):
    status, out, err = run("plan", *shlex.split(f"{MODEL} {SIZES} {FAST} {change}"))
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


GRID = "--world-size 4 --global-batch-size 8 --gpu A100 --memory-cap 30GiB " + FAST


def test_a_world_size_alone_searches_the_division(run, tmp_path):
    path = tmp_path / "plan.json"
    words = shlex.split(f"{MODEL} {GRID} --output {path}")
    status, out, err = run("plan", *words, "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    chosen, grid = data["chosen"], data["grid"]
    assert grid["world_size"] == 4 and grid["cases"] == grid["pruned"] + grid["searched"]
    sizes = chosen["division"]
    assert sizes["tensor"] * sizes["pipeline"] * sizes["data"] * sizes["context"] == 4
    assert f"--tensor-model-parallel-size {sizes['tensor']}" in chosen["flags"]
    assert f"--pipeline-model-parallel-size {sizes['pipeline']}" in chosen["flags"]
    assert chosen["iteration_ms"] == data["front"][0]["iteration_ms"] > chosen["step_ms"]
    assert grid["without_pipeline"]["division"]["pipeline"] == 1
    # The file has the planned order, and one division's own search gives the same numbers.
    said = json.loads(run("simulate", "--schedule", path, "--json")[1])
    assert said["makespan"] / 1000 == pytest.approx(chosen["step_ms"], rel=1e-12)
    own = " ".join(
        words for words in chosen["flags"] if "pp-" not in words and "layout" not in words
    )
    again = run("plan", *shlex.split(f"{MODEL} {GRID} {own} --json"))[1]
    assert json.loads(again)["chosen"]["step_ms"] == chosen["step_ms"]
    text = run("plan", *words)[1]
    assert "TP  PP  DP  CP  EP" in text and "without a pipeline" in text
    assert "yours: no-pipeline" in text and "stock: " in text
    assert "data_parallel_ms" not in text


def test_grid_fixes_what_is_given(run):
    words = shlex.split(f"{MODEL} {GRID} --json --tensor-model-parallel-size 2")
    for more in ([], ["--grid", "--pp", "2"]):
        data = json.loads(run("plan", *words, *more)[1])
        assert {point["division"]["tensor"] for point in data["front"]} == {2}
        assert {point["division"]["pipeline"] for point in data["front"]} == {2}


def test_a_grid_that_nothing_fits(run):
    words = shlex.split(f"{MODEL} {GRID} --memory-cap 1GiB")
    status, out, _ = run("plan", *words)
    assert status == 1 and "nothing fits in 1.00 GiB" in out
    assert "yours: no-pipeline (too large)" in out and "stock: " in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--tensor-model-parallel-size 3", "has no division with tensor-model-parallel-size 3"),
        ("--microbatches 8", "--microbatches is of one division"),
        ("--hf-config /no/such", "cannot read --hf-config"),
    ],
)
def test_bad_grids_are_one_line(run, change, words):
    status, out, err = run("plan", *shlex.split(f"{MODEL} {GRID} {change}"))
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_a_hugging_face_config(run, tmp_path):
    """Its answer has the model's flags, which describe the same model."""
    path = tmp_path / "config.json"
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16}
    config |= {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    path.write_text(json.dumps({**config, "vocab_size": 64000, "torch_dtype": "bfloat16"}))
    words = shlex.split(f"{GRID} --pp 4 --seq-length 2048 --json")
    data = json.loads(run("plan", "--hf-config", path, *words)[1])
    assert "--num-query-groups 4" in data["model_flags"] and "--bf16" in data["model_flags"]
    line = " ".join(data["model_flags"])
    again = json.loads(run("plan", "--from-args", line, *words)[1])
    assert again["chosen"] == data["chosen"]
    assert str(path) in data["assumptions"][0]


def test_what_is_needed_is_named(run):
    status, _, err = run("plan", "--pp", 4, "--num-layers", 4)
    assert status == 2 and "--hidden-size, --num-attention-heads, --seq-length" in err


def test_runs_on_a_bare_interpreter(repo_root):
    words = shlex.split(f"{MODEL} {SIZES} {FAST} --memory-cap 12GiB --json")
    command = [sys.executable, "-S", "-m", "megatron_ext", "plan", *words]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["chosen"]
