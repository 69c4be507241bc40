"""The unmodified ``pretrain_gpt.py`` of a stock checkout: same losses as stock, by the launcher.

bf16, distributed optimizer, gradient and parameter overlap, evaluation between training steps.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext._input import parse_bytes
from megatron_ext.plan.budget import Budget
from megatron_ext.plan.estimate import flop_costs
from megatron_ext.plan.flags import job_of
from megatron_ext.plan.flags import read as read_flags
from megatron_ext.plan.layout import Split, even_split
from megatron_ext.schedule import AUTO, Costs, ScheduleSpec, generate, lower, select
from tests.support import ROOT
from tests.support.checkouts import MAIN_TAG, Serve, existing, run
from tests.support.grids import sampled
from tests.support.server import Outcome

MODEL = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split
90,5,5 --eval-iters 1 --eval-interval 2 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
--untie-embeddings-and-output-weights
--clip-grad 0 --ckpt-format torch_dist --bf16 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather"""

TRAINING = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)")
EVALUATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: (\S+)")


Log = dict[str, list[tuple[str, ...]]]


def read(log: str) -> Log:
    """What Megatron's log says of losses and gradient norms."""
    log = log.replace("\n", " ")
    return {"training": TRAINING.findall(log), "evaluation": EVALUATION.findall(log)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Callable[..., Outcome]:
    """Trains under the launcher, on ranks forked from one process that has imported Megatron."""
    folder = tmp_path_factory.mktemp("runs")
    count, server = itertools.count(), serve(MAIN_TAG)

    def run_once(*flags: str, ranks: int = 4) -> Outcome:
        return server.run([*MODEL.split(), *flags], ranks, folder / str(next(count)))

    return run_once


@pytest.fixture(scope="module")
def train(start: Callable[..., Outcome]) -> Callable[..., Log]:
    """What a run that ends well has logged."""

    def run_once(*flags: str, ranks: int = 4) -> Log:
        outcome = start(*flags, ranks=ranks)
        assert outcome.status == "ok", outcome.report
        return read(outcome.log(ranks - 1))

    return run_once


@pytest.mark.matrix
def test_torchrun(train: Callable[..., Log], weights: list[str]) -> None:
    """The same through torchrun, as users start it."""
    pp2 = ["--pipeline-model-parallel-size", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "megatron_ext.launch", "--device", "cpu"]
    command += [str(existing(MAIN_TAG) / "pretrain_gpt.py"), *MODEL.split(), *weights]
    done = run([*command, *pp2, "--pp-schedule", "v-half"])
    assert done.returncode == 0, done.stdout[-6000:]
    assert read(done.stdout) == train(*weights, *pp2, ranks=2)


@pytest.fixture(scope="module")
def weights(train: Callable[..., Log], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that start a run from the weights that stock, without a pipeline, wrote."""
    folder = tmp_path_factory.mktemp("weights")
    train("--train-iters", "1", "--save", str(folder), "--save-interval", "1", ranks=1)
    load = ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]
    return load


@pytest.fixture(scope="module")
def stock(train: Callable[..., Log], weights: list[str]) -> Log:
    """Stock from these weights, in one process, which has the losses of stock's pipelines."""
    found = train(*weights, ranks=1)
    assert len(found["training"]) == 3
    assert len(found["evaluation"]) >= 2
    return found


CPU_KERNELS = ("--transformer-impl", "local")


def flops(split: Split) -> Costs:
    """Of the model's flags."""
    return flop_costs(job_of(read_flags([*MODEL.split(), *CPU_KERNELS])[0]), split)


# Stages that differ: none, one and two layers, and the loss.
UNEVEN = "E|t|t|t|t|t|t|ttL"
SPLIT = Split((0, 1, 1, 1, 1, 1, 1, 2))
LOGGED = re.compile(
    r"\| pipeline bubble: (\S+) % \(plan (\S+) %\) "
    r"\| peak activations: (\S+) microbatches \(plan (\S+)\) \|\n"
)


def plans(folder: Path, ranks: int = 4) -> list[list[str]]:
    """The plans that each rank has run in training, by fingerprint."""
    lines = [(folder / f"rank{r}.jsonl").read_text().splitlines() for r in range(ranks)]
    return [[x["plan"] for x in map(json.loads, rank) if not x["forward_only"]] for rank in lines]


@pytest.fixture(scope="module")
def profiled(
    start: Callable[..., Outcome], weights: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path]:
    """Two steps are measured, the third one runs the order that was made for them."""
    folder = tmp_path_factory.mktemp("profiled")
    flags = ["--pp-profile-steps", "2"]
    flags += ["--pipeline-model-parallel-layout", UNEVEN, "--pp-trace", str(folder)]
    flags += ["--pipeline-model-parallel-size", "4", "--pp-schedule", "v-zb"]
    outcome = start(*weights, *flags)
    assert outcome.status == "ok", outcome.report
    return outcome, folder


def test_losses_do_not_change_across_replanning(profiled: tuple[Outcome, Path], stock: Log) -> None:
    """Bit for bit those of stock; the first plan is for the model's FLOPs, the third, on all ranks
    the same, for what was measured."""
    outcome, folder = profiled
    assert read(outcome.log(3)) == stock
    own = lower(generate("v-zb", 4, 8, costs=flops(SPLIT))).fingerprint()
    first, *others = plans(folder)
    assert first[:2] == [own, own] and others == [first] * 3
    assert re.search("re-planned for measured times|the order stays", outcome.log(0))


def test_the_log_line(profiled: tuple[Outcome, Path]) -> None:
    """In Megatron's own line, on its rank; the sets are those of the plan."""
    outcome, folder = profiled
    found = LOGGED.findall(outcome.log(3))
    assert len(found) == 3
    for (bubble, planned, peak, promised), line in zip(found, range(3)):
        # Both are of measured passes, those of other steps, so either may be larger.
        assert 0 < float(planned) < 100 and 0 < float(bubble) < 100 and peak == promised
        every = [(folder / f"rank{r}.jsonl").read_text().splitlines() for r in range(4)]
        trained = [[x for x in map(json.loads, lines) if not x["forward_only"]] for lines in every]
        assert 2 * float(peak) == max(rank[line]["peak_sets"] for rank in trained)
    assert "pipeline bubble" not in outcome.log(0)


def test_the_log_says_what_is_gained(profiled: tuple[Outcome, Path]) -> None:
    """A few lines at the start, on rank 0 alone: the plan beside 1F1B, hooks only on demand. No
    line of Megatron's is ours to cause."""
    outcome, _ = profiled
    ours = [x for x in outcome.log(0).splitlines() if x.startswith("[megatron_ext]")]
    start = list(itertools.takewhile(lambda x: "measured" not in x, ours))
    assert 3 <= len(start) <= 6, ours
    assert not any(" -> " in line for line in outcome.log(0).splitlines())
    (plan,) = [line for line in start if "planned bubble" in line]
    assert "v-zb, 4 ranks x 2 chunks, 8 microbatches: planned bubble " in plan
    assert re.search(
        r"% \(1F1B \d+\.\d %\), peak activations 4 microbatches a rank \(1F1B 4\)", plan
    )
    for rank in (1, 2, 3):
        assert "[megatron_ext]" not in outcome.log(rank)
    assert "CPU RNG state" not in outcome.log(0)


@pytest.mark.parametrize("pp", sampled([2, 4], [2]))
def test_a_cap_in_bytes(
    start: Callable[..., Outcome], weights: list[str], stock: Log, tmp_path: Path, pp: int
) -> None:
    """Nothing fits: the error names the least that does; that trains, with the same losses, and
    tensor-parallel ranks, whose measurements differ, agree on the plan after a profile."""
    auto = ["--pp-schedule", "auto", "--pipeline-model-parallel-size", str(pp), "--pp-memory-cap"]
    refused = start(*weights, *auto, "1KiB", ranks=pp)
    assert refused.status == "failed"
    (least,) = set(re.findall(r"the least of all is (\S+)", refused.log(0)))
    assert "raise --pp-memory-cap" in refused.log(0)
    fits = start(*weights, *auto, least, "--pp-trace", str(tmp_path / "one"), ranks=pp)
    assert fits.status == "ok", fits.report
    assert read(fits.log(pp - 1))["training"] == stock["training"]
    given = read_flags([*MODEL.split(), *CPU_KERNELS, "--world-size", str(pp)])[0]
    job = job_of({**given, "pipeline_model_parallel_size": pp})
    budget = Budget(job, parse_bytes(least), lambda stages: even_split(8, stages))
    costs = flops(even_split(8, 2 * pp))
    chosen = select(ScheduleSpec(AUTO, pp, 8, 2, costs, budget)).schedule
    assert plans(tmp_path / "one", pp) == [[lower(chosen).fingerprint()] * 3] * pp
    assert f"{chosen.name} is the fastest of " in fits.log(0)
    assert re.search(r"a cap of \d+ activation sets \(estimated", fits.log(0))


def test_all_ranks_agree_on_a_measured_plan(start: Callable[..., Outcome], tmp_path: Path) -> None:
    """Two pipelines side by side measure different times, and must not follow different orders:
    their ranks meet in tensor-parallel collectives. With a cap in bytes and offload beside it."""
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    flags += ["--pp-schedule", "auto", "--pp-memory-cap", "8MiB", "--pp-profile-steps", "2"]
    outcome = start(*flags, "--pp-trace", str(tmp_path))
    assert outcome.status == "ok", outcome.report
    every = plans(tmp_path)
    assert every == [every[0]] * 4
    assert re.search("re-planned|the order stays", outcome.log(0))


EMPTY = ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Etttt||tttt|L")


def test_a_rank_without_parameters_trains(start: Callable[..., Outcome]) -> None:
    """Its second stage holds nothing; offload and profile are about every rank, too."""
    stock = start(*EMPTY)
    assert stock.status == "ok", stock.report
    expected = read(stock.log(3))
    assert len(expected["training"]) == 3
    ours = ("--pp-schedule", "zb-h1", "--pp-offload", "half", "--pp-profile-steps", "2")
    outcome = start(*EMPTY, *ours)
    assert outcome.status == "ok", outcome.report
    assert read(outcome.log(3)) == expected


def test_a_step_leaves_nothing_to_garbage_collection(serve: Serve, tmp_path: Path) -> None:
    """With --manual-gc activations and batches of every step would stay until it is collected."""
    words = [*MODEL.split(), "--eval-interval", "9", "--pipeline-model-parallel-size", "2"]
    outcome = serve(MAIN_TAG).run(
        [*words, "--pp-schedule", "v-half", "--pp-vocab-parallel"],
        2,
        tmp_path / "run",
        prelude=ROOT / "tests" / "support" / "cycles.py",
    )
    assert outcome.status == "ok", outcome.report
    for rank in range(2):
        assert (outcome.folder / f"cycles{rank}").read_text().splitlines() == ["found"] * 3
