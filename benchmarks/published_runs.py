"""Published throughput of whole runs beside what the planner predicts for them; writes a page.

    python -m benchmarks.published_runs [--json]

``published_runs.json`` has the published rows. Each is predicted with stock's schedule (1F1B, or
interleaved 1F1B) on the split that Megatron makes, or on the balanced one where the layers do not
divide, with what an iteration does beside its passes.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bridge_recipes import FACTS as RECIPES
from megatron_ext.plan.collectives import Overlap
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.point import evaluate
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.throughput import throughput
from megatron_ext.schedule import ScheduleSpec

FACTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).with_name("published-runs.md")


class Run(NamedTuple):
    """One published run and its prediction.

    Attributes:
        fact: the published row, by column.
        tokens, tflops: a second and device, as predicted.
    """

    fact: dict[str, Any]
    tokens: float
    tflops: float

    @property
    def error(self) -> float:
        """By which share the predicted time is longer than the published one."""
        return float(self.fact["tokens"] / self.tokens - 1)

    @property
    def counted(self) -> float:
        """FLOPs that we count for a token, by those that were published."""
        return float(self.tflops / self.tokens * self.fact["tokens"] / self.fact["tflops"])


def flags(fact: dict[str, Any], data: dict[str, Any], models: dict[str, str]) -> str:
    """Megatron's flags of a published row."""
    line = f"{models[fact['model']]} {data['common']} {data['precisions'][fact['precision']]}"
    sizes = {
        "world-size": "gpus", "global-batch-size": "gbs", "micro-batch-size": "mbs",
        "seq-length": "sequence", "tensor-model-parallel-size": "tp",
        "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    }  # fmt: skip
    line += "".join(f" --{flag} {fact[name]}" for flag, name in sizes.items())
    line += " --sequence-parallel" * (fact["tp"] > 1)
    if fact["ep"] > 1:
        line += f" --expert-model-parallel-size {fact['ep']} --expert-tensor-parallel-size 1"
        line += " --moe-token-dispatcher-type alltoall"
    if "405B" in fact["model"] or "235B" in fact["model"]:
        line += " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    return line


def predicted(fact: dict[str, Any], data: dict[str, Any], models: dict[str, str]) -> Run:
    """The planner's numbers for a published row."""
    job, gpu = job_of(read(flags(fact, data, models).split())[0]), gpu_of(fact["gpu"])
    space = SearchSpace(job, gpu, fact["pp"], overlap=Overlap(True, True))
    name = "1f1b" if fact["vp"] == 1 else "interleaved"
    spec = ScheduleSpec(name, fact["pp"], job.microbatches(), fact["vp"])
    split = space.even(job, fact["pp"] * fact["vp"])
    split = split or space.balanced_in_time(job, spec.placement)
    assert split is not None
    work = space.workload(job, spec.microbatches, split)
    point = evaluate(replace(spec, costs=work.costs), work)
    rate = throughput(job, gpu, spec.microbatches, point.iteration_us)
    return Run(fact, rate.tokens, rate.tflops)


def runs() -> list[Run]:
    """Of all published rows."""
    data = json.loads(FACTS.read_text(encoding="utf-8"))
    models = json.loads(RECIPES.read_text(encoding="utf-8"))["models"]
    facts = (dict(zip(data["columns"], row)) for row in data["runs"])
    return [predicted(fact, data, models) for fact in facts]


def main() -> None:
    """Print or write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows, write nothing")
    args = parser.parse_args()
    found = runs()
    if args.json:
        rows = [
            {**one.fact, "predicted": one.tokens, "tflops_predicted": one.tflops,
             "error": one.error} for one in found
        ]  # fmt: skip
        print(json.dumps(rows))
    else:
        PAGE.write_text(page(found), encoding="utf-8")


_HEAD = (
    *("model", "devices", "precision", "GBS", "TP x PP x CP x VP x EP", "tokens/s a device"),
    *("predicted", "TFLOP/s", "predicted", "error of time"),
)


def page(found: list[Run]) -> str:
    """The whole page."""
    data = json.loads(FACTS.read_text(encoding="utf-8"))
    dense = [one for one in found if one.fact["ep"] == 1]
    experts = [one for one in found if one.fact["ep"] > 1]
    lines = [
        "# Published runs beside predictions",
        "",
        _INTRODUCTION.format(
            *(len(found), data["source"], data["commit"][:12]),
            *(_range(dense), _rms(dense), _range(experts), _rms(experts)),
        ),
        *("| " + " | ".join(row) + " |" for row in (_HEAD, ("---",) * len(_HEAD))),
        *("| " + " | ".join(_cells(one)) + " |" for one in found),
        "",
        _NOTES,
    ]
    return "\n".join(lines)


def _cells(one: Run) -> tuple[str, ...]:
    fact = one.fact
    return (
        *(fact["model"], f"{fact['gpus']} {fact['gpu']}", fact["precision"], str(fact["gbs"])),
        " x ".join(str(fact[name]) for name in ("tp", "pp", "cp", "vp", "ep")),
        *(str(fact["tokens"]), f"{one.tokens:.0f}", str(fact["tflops"]), f"{one.tflops:.0f}"),
        f"{one.error:+.0%}",
    )


def _range(some: list[Run]) -> str:
    errors = [one.error for one in some]
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def rms(some: list[Run]) -> float:
    """Root of the mean square of the errors' logarithms, as an error."""
    squares = [math.log1p(one.error) ** 2 for one in some]
    return math.expm1(math.sqrt(sum(squares) / len(squares)))


def _rms(some: list[Run]) -> str:
    return f"{rms(some):.0%}"


_INTRODUCTION = """\
`python -m benchmarks.published_runs` writes this page: {0} runs with a pipeline of
{1} (commit {2}), and
the planner's prediction for the same model, devices, precision and sizes, with stock's schedule,
Megatron's split, and data-parallel exchange overlapped. Nothing was fitted to these runs.

**Error of an iteration's time: dense models {3} (root mean square {4}), models with experts {5}
({6}).** Positive: we predict a slower run.
"""
_NOTES = """\
What the rows do not say, and what is assumed: recompute (none), the fusions of the container, how
tokens are dispatched (an all-to-all at the rate of the links, not hidden; the runs may hide it or
use another library), CUDA graphs, and the layout where layers do not divide (balanced). Experts
have equal loads in the runs, too.

The model's FLOPs are counted as in `plan/throughput.py`; published ones differ by their own rules.

Memory is not published with these runs, so it is not compared here.

All models with experts ran slower than predicted, most of all those with many small experts a
device (Qwen3 30B, expert parallelism of 8): products of experts, and what moves rows to them, cost
more than the model of times has. `plan` prints this error for them, and marks gains below it.
"""


if __name__ == "__main__":
    main()
