"""Cheap recompute: what it keeps, byte for byte, and that no loss or gradient changes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from feature_matrix import command
from features import MOE, OVERLAP, Feature
from script_server import ScriptServer

from .conftest import RANKS, ROOT, Serve, cached, needs_megatron, run, running_here

pytestmark = [needs_megatron, pytest.mark.timeout(400)]

# The oldest and the newest version differ most.
VERSIONS = ("core_v0.16.1", "core_v0.19.0")

# Of recompute_cases.py: tokens, hidden size, heads and length.
TOKENS, H, HEADS, S, B = 32, 64, 4, 16, 2
F = 4 * H
NORMS = 2 * H  # their outputs
# What a layer keeps either way: norms' inputs, Q, K, V and the attention's output.
REST = 2 * H + 3 * H + H

# kind -> numbers per token that the layer keeps without and with cheap recompute.
NUMBERS = {
    "gelu": (REST + NORMS + F + F, REST + F),  # 16 h and 10 h: 32 and 20 bytes of 16 bits
    "gelu fused": (REST + NORMS + F + F, REST + F),
    "gelu bf16": (REST + NORMS + F + F, REST + F),
    "swiglu fused": (REST + NORMS + 2 * F + F, REST + 2 * F),
    # Both factors of the product too.
    "swiglu": (REST + NORMS + 2 * F + 3 * F, REST + 2 * F),
    # Without recompute relu's output, with it relu's input.
    "squared relu": (REST + NORMS + F + F, REST + F),
    # Two masks, which a CPU keeps as numbers of full size, stay.
    "dropout": (REST + NORMS + F + F + 2 * H, REST + F + 2 * H),
    # Megatron recomputes the whole MLP.
    "mlp too": (REST + NORMS, REST),
}
KINDS = (*NUMBERS, "rmsnorm", "rmsnorm bf16", "experts", "frozen fc1")
# torch's RMSNorm is several operations on a CPU, two of whose gradients and the residual's are
# added up in another order where the norm is recomputed. In 16 bits they meet in one cast to fp32.
ROUNDED = "rmsnorm"


@pytest.fixture(scope="module", params=["installed", *VERSIONS])
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What recompute_cases.py found."""
    path = [str(ROOT)]
    if request.param != "installed":
        found = cached(request.param)
        if found is None:
            pytest.skip(f"needs a checkout; run ./scripts/get_megatron.sh {request.param}")
        if request.param not in running_here():
            pytest.skip(f"{request.param} does not run on Python {sys.version_info.minor}")
        path.insert(0, str(found))
    command = [sys.executable, str(RANKS / "recompute_cases.py")]
    command += [str(tmp_path_factory.mktemp("recompute"))]
    done = run(command, 200, PYTHONPATH=os.pathsep.join(path))
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, done.stdout[-5000:]
    return json.loads(lines[-1][7:])


def local_attention_bytes(kind: str) -> int:
    """What the local implementation keeps beside theory, which takes flash attention for granted:
    the scores after softmax, with 16 bits those before the cast too, and the mask."""
    scores = B * HEADS * S * S
    return (scores * (2 + 4) if kind.endswith("bf16") else scores * 4) + S * S


@pytest.mark.parametrize("kind", NUMBERS)
def test_bytes_kept(cases: Any, kind: str) -> None:
    """Distinct storages that autograd holds after a layer's forward pass, parameters apart."""
    size = 2 if kind.endswith("bf16") else 4
    # Mean and reciprocal deviation of both norms; computed again with the norms.
    statistics = 2 * 2 * TOKENS * 4
    kept, cheap = (numbers * TOKENS * size for numbers in NUMBERS[kind])
    attention = local_attention_bytes(kind)
    assert sum(cases[kind]["kept"].values()) == kept + statistics + attention, cases[kind]["kept"]
    assert sum(cases[kind]["cheap"].values()) == cheap + attention, cases[kind]["cheap"]


def test_bytes_of_experts(cases: Any) -> None:
    """Two experts a token: of each, all but fc1's output (two factors, product, scaled product)."""
    saved = sum(cases["experts"]["kept"].values()) - sum(cases["experts"]["cheap"].values())
    assert saved == (NORMS + 2 * 4 * F) * TOKENS * 4 + 2 * 2 * TOKENS * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["fused", "split", "moved", "evaluation"])
def test_nothing_changes(cases: Any, kind: str, way: str) -> None:
    """All gradients are bit for bit those without recompute, whenever W comes."""
    rounding = 1e-6 if kind == ROUNDED and way != "evaluation" else 0
    assert cases[kind][way] <= rounding
    assert cases["moved_bytes"] > 0


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest, serve: Serve) -> ScriptServer:
    """A checkout's ``pretrain_gpt.py``, imported and ready to fork ranks."""
    return serve(cached(request.param), request.param)


DENSE = Feature("gelu, dropout", run="--hidden-dropout 0.1 --attention-dropout 0.1")
LLAMA = Feature("swiglu", model="--swiglu --normalization RMSNorm --disable-bias-linear --bf16")
EXPERTS = Feature(
    "experts",
    model=MOE + " --swiglu --moe-shared-expert-intermediate-size 32 --bf16",
    run="--expert-model-parallel-size 2 " + OVERLAP,
    pp=2,
)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (DENSE, "interleaved"),
        (LLAMA, "zb-h1"),
        (EXPERTS, "v-half"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_losses_are_those_without(
    server: ScriptServer, model: Feature, schedule: str, tmp_path: Path
) -> None:
    """Through the real script, dropout included: the forward pass draws the same masks."""
    argv = command(model, schedule, tmp_path / "no checkpoint")
    for flag in ("--finetune", "--no-load-optim", "--no-load-rng"):
        argv.remove(flag)
    at = argv.index("--load")
    del argv[at : at + 2]
    without = server.run(argv, model.world, tmp_path / "without")
    assert without.status == "ok", without.log(0)[-5000:]
    cheap = server.run([*argv, "--pp-cheap-recompute"], model.world, tmp_path / "cheap")
    assert cheap.status == "ok", cheap.log(0)[-5000:]
    assert len(cheap.losses()) == 5
    assert cheap.losses() == without.losses()
    log = cheap.log(0)
    assert "megatron.core.transformer.mlp:MLP.forward -> MLP" in log
    assert "['layernorm']" in log
    assert "MLP.forward -> MLP" not in without.log(0)


def test_refused_before_training(server: ScriptServer, tmp_path: Path) -> None:
    full = Feature(
        "full",
        run="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ours="--pp-cheap-recompute",
    )
    outcome = server.run(command(full, "1f1b", tmp_path / "no checkpoint"), 4, tmp_path / "run")
    assert outcome.status == "failed"
    assert "--pp-cheap-recompute has nothing to do under --recompute-granularity" in outcome.log(0)
