"""``plan`` on MoE layers in chunks."""

from __future__ import annotations

import json
import shlex

MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --swiglu "
    "--disable-bias-linear --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 "
    "--moe-grouped-gemm --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
    "--vocab-size 64000 --hidden-dropout 0 --attention-dropout 0 "
    "--moe-token-dispatcher-type alltoall"
)
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
