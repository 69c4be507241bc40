#!/usr/bin/env python3
"""Random training runs with gradients that have to be refused or clipped, with and without
``--pp-post-validation``: everything has to be the same, bit for bit.

    python -m tests.campaigns.random_post_validation path/to/Megatron-LM --results FILE [--seed 1]
        [--cases 100] [--steps 12]
    python -m tests.campaigns.random_post_validation CHECKOUT --steps 200 --cases 3 --plain

A case draws a setting (dtype, optimizer, experts, overlaps, schedule), how soon steps are taken
ahead, a clipping limit near the run's own gradient norms, and faults: at random iterations, on
random ranks, gradients become inf, nan, or many times as large. The checkout's ``pretrain_gpt.py``
trains on CPU ranks both ways; compared after every iteration are all ranks' main parameters and
optimizer states, the loss scale, exact losses and gradient norms, and Megatron's log line. With
``--plain``, the settings in turn with nothing injected. A line of FILE is one case; a run that is
started again goes on behind the last one. The exit status is 1 if a case differs or fails.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.prove.server import Outcome, ScriptServer
from tests.support import ROOT

PROBE = ROOT / "tests" / "support" / "rank_probe.py"
RANKS = 4
BASE = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--lr-decay-style constant --weight-decay 0.1 --mock-data --tokenizer-type NullTokenizer
--vocab-size 127 --split 90,5,5 --eval-iters 1 --eval-interval 1000 --log-interval 1
--ckpt-format torch_dist --rerun-mode disabled --no-check-for-nan-in-loss-and-grad
--log-num-zeros-in-grad"""
PP4, PP2 = "--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
EXACT = "--attention-dropout 0 --hidden-dropout 0"
FP16 = "--fp16 --initial-loss-scale 1024 --loss-scale-window 5 --hysteresis 1"
MOE = """--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2
--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss"""
# With dropout only where the order of the passes does not depend on what it makes short.
SETTINGS = {
    "bf16, distributed optimizer": f"{PP4} --bf16 {SHARDED} {EXACT} --pp-schedule v-zb",
    "fp32, plain": f"{PP4} {DROPOUT} --pp-schedule 1f1b",
    "slices, experts, global loss": f"""{PP4} {SHARDED} {EXACT} --pp-schedule v-half --pp-slices 2
    {MOE.replace("--expert-model-parallel-size 2 ", "").replace("type aux", "type global_aux")}
    --transformer-impl local""",
    "experts, chained optimizers": f"{PP2} --bf16 {MOE} {EXACT} --pp-schedule v-half",
    "experts, overlaps": f"{PP2} --bf16 {MOE} {OVERLAP} {EXACT} --pp-schedule v-zb --num-layers 4",
    "bf16, overlaps, dropout": f"{PP2} --bf16 {OVERLAP} {DROPOUT} --pp-schedule interleaved "
    "--num-virtual-stages-per-pipeline-rank 2",
    "fp16, plain, dropout": f"{PP4} {FP16} {DROPOUT} --pp-schedule 1f1b",
    "fp16, distributed optimizer": f"{PP2} {FP16} {SHARDED} {EXACT} --pp-schedule v-zb",
    "bf16, plain, zb-h2": f"{PP4} --bf16 {EXACT} --pp-schedule zb-h2",
}
_TIMES = re.compile(
    r"^ \[[^]]*\]|elapsed time per iteration \(ms\): \S+ \||pipeline bubble: [^|]+\|"
)


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        setting: one of ``SETTINGS``.
        clip: gradient norm above which they are clipped.
        patience: of ``--pp-post-validation``.
        faults: see ``tests/support/rank_probe.py``.
    """

    setting: str
    clip: float
    patience: int
    faults: tuple[dict[str, Any], ...]


def draw(seed: int, number: int, steps: int) -> Case:
    """Case ``number``, the same one wherever it is drawn."""
    rng = random.Random(f"{seed}/{number}")
    setting = rng.choice(sorted(SETTINGS))
    ranks = 4 if PP4 in SETTINGS[setting] else 2
    faults = []
    for _ in range(rng.choice((0, 1, 2, 3))):
        iteration = rng.randrange(1, steps)
        # Without a loss scale nothing refuses these, and nothing is a number any more afterwards.
        finite = "fp16" not in setting and iteration < steps - 3
        factor = rng.choice((50, 1000, 1e4) if finite else ("inf", "nan", 1000))
        faults.append({"iteration": iteration, "rank": rng.randrange(ranks), "factor": factor})
    clip = rng.choice((1.6, 1.8, 2.0, 5.0, 0.0))
    return Case(setting, clip, rng.choice((0, 0, 1, 3)), tuple(faults))


def plain(number: int) -> Case:
    """The settings in turn, with clipping in many steps."""
    setting = list(SETTINGS)[number % len(SETTINGS)]
    return Case(setting, 1.2, 0, ())


class Runner:
    """Trains both ways and compares.

    Args:
        server: of the training script.
        steps: iterations of a run.
        folder: for logs.
    """

    def __init__(self, server: ScriptServer, steps: int, folder: Path) -> None:
        self._server, self._steps, self._folder = server, steps, folder

    def compare(self, case: Case) -> dict[str, Any]:
        """The case's line."""
        flags = f"{BASE} {SETTINGS[case.setting]} --train-iters {self._steps}"
        flags += f" --clip-grad {case.clip}"
        value = {"faults": list(case.faults)}
        outcomes = []
        for name, more in (("usual", ""), ("ahead", f" --pp-post-validation {case.patience}")):
            outcome = self._server.run(
                [*flags.split(), *more.split()],
                RANKS,
                self._folder / name,
                120.0 + 4.0 * self._steps,
                prelude=PROBE,
                value=value,
            )
            outcomes.append(outcome)
            if outcome.status != "ok":
                ends = [outcome.log(rank)[-2000:] for rank in range(RANKS)]
                ended = {"exits": outcome.exits, "logs": ends}
                return {"result": f"{name} {outcome.status}", **asdict(case), **ended}
        differences = [
            name
            for name, one, other in zip(("states", "losses", "log"), *map(computed, outcomes))
            if one != other
        ]
        log = outcomes[1].log(0)
        undone = [int(n) for n in re.findall(r"post-validation rolled back (\d+) of", log)]
        norms = [e["grad_norm"] for e in outcomes[0].losses()]
        clipped = sum(1 for n in norms if n and 0 < case.clip < float.fromhex(n))
        return {
            "result": f"DIFFERENT: {', '.join(differences)}" if differences else "equal",
            "iterations": len(norms),
            "clipped": clipped,
            "undone": max(undone, default=0),
            **asdict(case),
        }


def computed(outcome: Outcome) -> tuple[list[Any], list[Any], list[str]]:
    """Everything that has to be the same: optimizers' states, exact losses and norms, the log."""
    states = [
        [json.loads(line)[1:] for line in (outcome.folder / f"rank{rank}.state").open()]
        for rank in range(RANKS)
    ]
    lines = [x for x in outcome.log(RANKS - 1).splitlines() if " iteration " in x and "loss" in x]
    return states, outcome.losses(), [_TIMES.sub("", line) for line in lines]


def main() -> int:
    """Run cases and note their results; 1 if one differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("megatron", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plain", action="store_true", help="nothing injected")
    options = parser.parse_args()
    done = 0
    if options.results is not None and options.results.is_file():
        done = len(options.results.read_text().splitlines())
    bad = 0
    script = options.megatron / "pretrain_gpt.py"
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptServer(script, modules=["tests.support"]) as server,
    ):
        runner = Runner(server, options.steps, Path(folder))
        for number in range(done, options.cases):
            case = plain(number) if options.plain else draw(options.seed, number, options.steps)
            line = {"case": number, **runner.compare(case)}
            bad += line["result"] != "equal"
            print(json.dumps(line), flush=True)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
