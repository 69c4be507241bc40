"""What tests/campaigns/random_equivalence.py found, kept: each failed before its fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.campaigns.random_equivalence import Case, Runner
from tests.support.checkouts import MAIN_TAG, existing
from tests.support.features import MOE

CASES = {
    # One rank has all experts, so no message leaves it, and its cost cannot be measured.
    "experts on one rank": Case(
        f"--bf16 --num-layers 3 {MOE}",
        "--pipeline-model-parallel-size 3 --global-batch-size 4 --train-iters 2",
        "",
        "--pp-schedule 1f1b --moe-pipeline-chunks 4 --moe-memory-reuse s2",
        3,
        2e-2,
        "weight gradients are summed chunk by chunk",
    ),
    # Megatron's recomputation does not run inside the chunks' own backward passes.
    "cheap recompute and chunks": Case(
        f"--num-layers 2 {MOE}",
        "--pipeline-model-parallel-size 2 --global-batch-size 1 --train-iters 2",
        "",
        "--pp-schedule zb-h1 --pp-cheap-recompute --moe-pipeline-chunks 2 --moe-memory-reuse s2",
        2,
        1e-4,
        "weight gradients are summed chunk by chunk",
    ),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    found = Runner(existing(MAIN_TAG), tmp_path_factory.mktemp("cases"), sys.executable)
    yield found
    found.close()


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_trains_as_stock(name: str, runner: Runner) -> None:
    result, detail, _ = runner.run(CASES[name], list(CASES).index(name))
    assert result == "equal" or result.startswith("~"), f"{result}: {detail}"
