"""--pp-cheap-recompute through the unmodified script: losses bit for bit those without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkouts import MAIN_TAG, OLDEST_TAG, Serve, nightly, version
from tests.support.feature_runs import command
from tests.support.features import MOE, OVERLAP, Feature
from tests.support.server import ScriptServer


@pytest.fixture(scope="module", params=[version(MAIN_TAG), version(OLDEST_TAG)])
def server(request: pytest.FixtureRequest, serve: Serve) -> ScriptServer:
    """A checkout's ``pretrain_gpt.py``, imported and ready to fork ranks."""
    return serve(request.param)


DENSE = Feature("gelu, dropout", run="--hidden-dropout 0.1 --attention-dropout 0.1")
LLAMA = Feature("swiglu", model="--swiglu --normalization RMSNorm --disable-bias-linear --bf16")
EXPERTS = Feature(
    "experts",
    model=MOE + " --swiglu --moe-shared-expert-intermediate-size 32 --bf16 --num-layers 4",
    run="--expert-model-parallel-size 2 " + OVERLAP,
    pp=2,
)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        nightly(DENSE, "interleaved"),
        nightly(LLAMA, "zb-h1"),
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
    verbose = {0: {"MEGATRON_EXT_VERBOSE": "1"}}  # lists the hooks
    without = server.run(argv, model.world, tmp_path / "without", environment=verbose)
    assert without.status == "ok", without.report
    argv.append("--pp-cheap-recompute")
    cheap = server.run(argv, model.world, tmp_path / "cheap", environment=verbose)
    assert cheap.status == "ok", cheap.report
    assert len(cheap.losses()) == 3
    assert cheap.losses() == without.losses()
    log = cheap.log(0)
    assert "megatron.core.transformer.mlp:MLP.forward -> MLP" in log
    assert "['layernorm']" in log
    assert "MLP.forward -> MLP" not in without.log(0)


def test_megatron_refuses_whole_layers(server: ScriptServer, tmp_path: Path) -> None:
    full = Feature(
        "full",
        run="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ours="--pp-cheap-recompute",
        pp=2,
    )
    outcome = server.run(command(full, "1f1b", tmp_path / "no checkpoint"), 2, tmp_path / "run")
    assert outcome.status == "failed"
    assert "recompute method is not yet supported for selective" in outcome.log(0)
