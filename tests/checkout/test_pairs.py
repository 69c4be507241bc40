"""Passes in pairs under the stock ``pretrain_gpt.py``: every gradient bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.schedule import Costs, ScheduleSpec, check, lower, save, select, simulate
from megatron_ext.schedule.actions import Action
from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, Serve, nightly
from tests.support.feature_runs import command
from tests.support.features import MOE, Feature
from tests.support.gradients import read
from tests.support.server import Outcome

PRELUDE = ROOT / "tests" / "support" / "gradients.py"
FLAG = "--overlap-moe-expert-parallel-comm"
COSTS = Costs.of("1.5", "1.5", 1).with_exchange([("0.5", "0.5")])


@pytest.mark.parametrize(
    ("name", "pp"), [nightly("v-zb", 2), nightly("zb-h1", 2), nightly("interleaved", 4)]
)
def test_every_gradient_is_that_of_single_passes(
    serve: Serve, tmp_path: Path, name: str, pp: int
) -> None:
    """One order, once with its pairs run by Megatron's plans and once pass by pass."""
    order = select(ScheduleSpec(name, pp, 8, costs=COSTS, overlap=True)).schedule
    check(lower(order))
    planned = sum(type(action) is not Action for row in order.ranks for action in row)
    assert planned
    file = tmp_path / "order.json"
    save(order, file)
    feature = Feature(name, model=MOE + " --bf16", run="--expert-model-parallel-size 2", pp=pp)
    weights, server = tmp_path / "weights", serve(MAIN_TAG)
    start = f"--save {weights} --save-interval 1 --train-iters 1".split()
    made = server.run([*command(feature, "stock", None), *start], 1, tmp_path / "made")
    assert made.status == "ok", made.report

    def train(run: str, *flags: str) -> tuple[Outcome, int, list[object]]:
        words = [*command(feature, "stock", weights), "--pp-schedule", str(file), *flags]
        # Both ranks of expert parallelism in one pipeline position: 8 microbatches each.
        words += ["--global-batch-size", "16", "--train-iters", "3"]
        outcome = server.run(words, 2 * pp, tmp_path / run, prelude=PRELUDE)
        assert outcome.status == "ok", outcome.report
        return outcome, *read(tmp_path / run, 2 * pp)

    paired, pairs, gradients = train("paired", FLAG)
    single, none, others = train("single")
    assert gradients == others and all(gradients)
    assert paired.losses() == single.losses() and len(paired.losses()) == 3
    # Two pipelines, three steps; without the flag a pair's passes run one after the other.
    assert (pairs, none) == (2 * 3 * planned, 0)
    # Sets on every rank are those of the simulation.
    peaks = simulate(order).peak_sets
    peak = f"peak activations: {max(peaks) / order.chunks:.4g} microbatches (plan "
    assert peak in paired.log(2 * pp - 1)
