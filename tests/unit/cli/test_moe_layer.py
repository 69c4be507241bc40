"""``simulate --moe``, and what ``plan`` prints of MoE layers in chunks."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET

import pytest

MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --swiglu "
    "--disable-bias-linear --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 "
    "--moe-grouped-gemm --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
    "--vocab-size 64000 --hidden-dropout 0 --attention-dropout 0 "
    "--moe-token-dispatcher-type alltoall"
)
DENSE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
COSTS = "--moe-cost exchange=1,experts=2,input=0.5,inside=1.5"


def answer(run, line):
    status, out, err = run("simulate", "--moe", "--json", *shlex.split(line))
    assert (status, err) == (0, "")
    return json.loads(out)


def test_explicit_costs(run):
    """By hand: S0 .5, then C0 under S1, C1 under R0, and R1; backward likewise, with W, of
    both chunks, beside R1."""
    data = answer(run, f"{COSTS} --moe-pipeline-chunks 2")
    assert data["unit"] == "" and data["layer"] is None
    stock, two = data["plans"]
    assert (stock["forward"], stock["backward"]) == (4, 6)
    assert (two["forward"], two["backward"]) == (3, 4.5) and data["chosen"] == two
    assert two["speedup"] == pytest.approx(10 / 7.5)
    times = {(o["pass"], o["name"]): (o["start"], o["end"]) for o in data["operations"]}
    assert times["forward", "C0"] == (0.5, 1.5) and times["backward", "C1"] == (0.5, 1.5)
    assert times["backward", "W"] == (2.5, 4.5) and times["backward", "R0"] == (2.5, 3)
    split = answer(run, f"{COSTS} --moe-pipeline-chunks 2 --split-backward")["chosen"]
    assert (split["backward"], split["weights"]) == (3, 2)
    assert answer(run, f"{COSTS} --moe-pipeline-chunks 4 --queue 1")["chosen"]["forward"] == 3
    ahead = answer(run, f"{COSTS} --moe-pipeline-chunks 4 --lookahead 4")["operations"]
    names = [o["name"] for o in ahead if (o["pass"], o["stream"]) == ("forward", "network")]
    assert names == ["S0", "S1", "S2", "S3", "R0", "R1", "R2", "R3"]


def test_all_plans_are_compared_where_nothing_is_fixed(run):
    data = answer(run, COSTS)
    assert len(data["plans"]) == 24
    assert data["chosen"] == min(data["plans"], key=lambda one: one["time"])
    assert len(answer(run, f"{COSTS} --moe-pipeline-chunks auto")["plans"]) == 4
    some = answer(run, f"{COSTS} --moe-pipeline-chunks 4 --moe-memory-reuse auto")["plans"]
    assert [one["chunks"] for one in some] == [1, 4, 4, 4, 4, 4, 4]


def test_a_model(run):
    data = answer(run, f"{MODEL} --moe-pipeline-chunks 4 --moe-memory-reuse s1")
    about, chosen = data["layer"], data["chosen"]
    assert (about["gpu"], about["rows"], about["ranks"]) == ("H100", 4096 * 8, 32)
    assert about["exchange_bandwidth"] == pytest.approx(50e9 * 31 / 24)
    assert chosen["host_bytes"] == 32768 * 2 * (4096 + 3 * 1536) and chosen["kept_bytes"] == 65536
    assert {o["stream"] for o in data["operations"]} == {
        *("compute", "network", "to host", "to device")
    }
    direct = answer(run, f"--from-args '{MODEL}' --moe-pipeline-chunks 4 --moe-memory-reuse s1")
    assert direct["chosen"] == chosen
    # Its costs in ms can be replaced one by one, and rates named.
    free = answer(run, f"{MODEL} --moe-pipeline-chunks 2 --moe-cost exchange=0,latency=0")["chosen"]
    assert free["time"] < chosen["time"]
    node = answer(run, f"{MODEL} --moe-pipeline-chunks 2 --gpus-per-node 32")["layer"]
    assert node["exchange_bandwidth"] == 450e9
    measured = answer(run, f"{MODEL} --moe-pipeline-chunks 2 --exchange-bandwidth 20e9")["layer"]
    assert measured["exchange_bandwidth"] == 20e9


def test_pictures(run, tmp_path):
    words = shlex.split(f"{COSTS} --moe-pipeline-chunks 4 --moe-memory-reuse s1")
    status, out, _ = run("simulate", "--moe", *words, "--width", "100")
    assert status == 0 and "speed-up" in out
    for lane in ("compute |", "network |", "to host |", "to device |"):
        assert lane.replace(" |", "") in out
    assert out.index("forward: ") < out.index("backward: ")
    for suffix in ("svg", "json", "txt"):
        path = tmp_path / f"layer.{suffix}"
        status, out, _ = run("simulate", "--moe", *words, "--output", path)
        assert status == 0 and f"{path}: MoE layer, 4 chunks, s1" in out
        text = path.read_text()
        if suffix == "svg":
            assert "MoE layer, 4 chunks, s1" in ET.fromstring(text)[0].text
        elif suffix == "json":
            names = {event["name"] for event in json.loads(text)["traceEvents"]}
            assert {"S0", "C3", "R3", "D0", "H0"} <= names
        else:
            assert text.startswith("MoE layer, 4 chunks, s1")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--moe", "--moe needs a model as Megatron's flags"),
        ("--moe --moe-cost exchange=1", "--moe-cost with experts too"),
        ("--moe --moe-cost exchange=1,gemm=2", "keys exchange, experts"),
        ("--moe --moe-cost exchange=-1,experts=2", "times >= 0"),
        (f"--moe {COSTS} --moe-pipeline-chunks 3", "must be one of off, auto, 1, 2, 4, 8, got '3'"),
        (f"--moe {COSTS} --moe-pipeline-chunks 2 --moe-memory-reuse s9", "got 's9'"),
        (f"--moe {COSTS} --gpu H100", "--gpu is for a model"),
        (
            f"--moe {COSTS} --moe-pipeline-chunks auto --moe-memory-budget 1GiB",
            "needs a model, whose bytes it limits",
        ),
        (f"--moe {DENSE}", "the model has none; give --num-experts too"),
        (f"--moe {DENSE} --moe-pipeline-chunks 4", "drop --moe-pipeline-chunks"),
        (f"--moe {MODEL} --expert-model-parallel-size 24", "cannot be divided by 24"),
        (f"--moe {MODEL} --gpu Z80", "unknown GPU 'Z80'"),
        (f"--moe {MODEL} --from-args '\"'", "cannot be split into words"),
        (
            f"--moe {MODEL} --moe-pipeline-chunks auto --moe-memory-reuse auto "
            "--moe-memory-budget 1MiB",
            "is too small for",
        ),
        (f"--moe {COSTS} --output a.pdf", "use .svg, .json, .txt"),
        (f"--moe {COSTS} --schedule 1f1b", "--schedule 1f1b is not for --moe"),
        (
            "--schedule 1f1b --pp 4 --microbatches 8 --lookahead 3",
            "--lookahead 3 is for --moe; give both",
        ),
        (
            "--schedule 1f1b --pp 4 --microbatches 8 --moe-memory-reuse s1",
            "s1 is for --moe; give both",
        ),
    ],
)
def test_bad_input_is_one_sentence(run, line, words):
    status, out, err = run("simulate", *shlex.split(line))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and words in err


SIZES = "--pp 4 --world-size 128 --global-batch-size 256 --micro-batch-sizes 1 --no-balance"
FAST = "--schedules 1f1b,v-half --offload off --cheap-recompute off"


def test_plan_prints_the_flags_where_they_help(run):
    words = shlex.split(f"{MODEL} {SIZES} {FAST} --use-distributed-optimizer")
    data = json.loads(run("plan", *words, "--json")[1])
    best = data["chosen"]
    assert best["moe"].split()[1] in ("none", "s0") and best["moe"] != "1 none"
    chunks = f"--moe-pipeline-chunks {best['moe'][0]}"
    assert any(flag.startswith(chunks) for flag in best["flags"])
    assert best["moe_layer"]["layer_ms"] < best["moe_layer"]["stock_layer_ms"]
    assert any("s" in one["moe"] for one in data["front"]), "something restores, for memory"
    assert any("all-to-alls" in text for text in data["assumptions"])
    off = json.loads(run("plan", *words, "--moe-pipeline-chunks", "off", "--json")[1])["chosen"]
    assert (
        off["moe"] in ("-", "pairs")
        and off["moe_layer"] is None
        and off["step_ms"] > best["step_ms"]
    )
    # The flags alone are the same plan, and the words say so.
    given = next(flag for flag in best["flags"] if flag.startswith(chunks))
    text = run("plan", *words, *given.split())[1]
    assert f"  {given}\n" in text
    assert "an MoE layer takes" in text and f"{best['step_ms']:.1f}" in text
    # Where training would refuse chunks, none are proposed.
    line = f"{MODEL} --use-distributed-optimizer --moe-shared-expert-overlap"
    words = shlex.split(f"{SIZES} {FAST}")
    data = json.loads(run("plan", "--from-args", line, *words, "--json")[1])
    assert data["chosen"]["moe"] == "-"
