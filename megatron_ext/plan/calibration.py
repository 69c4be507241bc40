"""Published times of single passes, and what the model of times gives for them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .flags import job_of, read
from .gpu import GPUS, Gpu
from .layout import Split
from .model import Job, PlanError
from .times import stage_times
from .transfer import layer_transfer

_FOLDER = Path(__file__).parent / "gpus" / "published"


class Comparison(NamedTuple):
    """One published number and ours.

    Attributes:
        source: paper and table.
        what: the model and how it is divided.
        quantity: F, B, W or B+W in milliseconds; MFU as a share of the device's peak; k, a set's
            transfers by F+B+W.
        fitted: the device's numbers were fitted to it; else it was held out.
    """

    source: str
    what: str
    quantity: str
    published: float
    ours: float
    fitted: bool

    @property
    def error(self) -> float:
        """By how much our time is longer than the published one, as a share."""
        ratio = self.ours / self.published
        return (ratio if self.quantity in _TIMES else 1 / ratio) - 1


_TIMES = ("F", "B", "W", "B+W")


class Summary(NamedTuple):
    """Errors of several comparisons, as shares: how many, mean, root of the mean square, worst."""

    number: int
    mean: float
    rms: float
    worst: float


def published(name: str) -> dict[str, Any]:
    """Published figures of a device: ``gpu``, ``notes`` and ``figures``.

    Raises:
        PlanError: none are known.
    """
    path = _FOLDER / f"{name}.json"
    if name not in devices():
        known = ", ".join(devices())
        raise PlanError(f"no published pass times of {name} are known, only of {known}")
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


def devices() -> list[str]:
    """Names of the devices with published pass times."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def compare(gpu: Gpu, figures: Iterable[dict[str, Any]]) -> list[Comparison]:
    """Every published number beside what the model of times gives on ``gpu``."""
    out = []
    for figure in figures:
        job = job_of(read(figure["flags"].split())[0])
        split = Split((0, job.num_layers, 0))
        f, b, w = stage_times(job, split, gpu)[1]
        idle, total = figure.get("bubble", (0, 1))
        share = pass_flops(job) / ((f + b + w) * gpu.flops) * (1 - idle / total)
        ours = {"F": 1e3 * f, "B": 1e3 * b, "W": 1e3 * w, "B+W": 1e3 * (b + w), "MFU": share}
        if "k" in figure["published"]:
            ours["k"] = layer_transfer(job, gpu).k
        for quantity, number in figure["published"].items():
            what = figure["source"], figure["what"], quantity
            out.append(Comparison(*what, number, ours[quantity], figure["fitted"]))
    return out


def pass_flops(job: Job) -> float:
    """FLOPs of F, B and W of all layers on one rank, as papers count them: no recomputation, and
    attention as if it were not causal (arXiv 2205.05198, appendix A)."""
    h, q, k = job.hidden_size, job.query_width, job.key_width
    products = h * (2 * q + 2 * k) + (job.gates + 1) * h * job.ffn_hidden_size
    a_token = 2 * products + 4 * job.seq_length * q
    return 3.0 * job.num_layers * job.tokens * a_token / job.tensor_model_parallel_size


def summary(comparisons: Sequence[Comparison]) -> Summary:
    """Of at least one comparison."""
    errors = [math.log1p(each.error) for each in comparisons]
    mean, worst = sum(errors) / len(errors), max(comparisons, key=lambda each: abs(each.error))
    rms = math.sqrt(sum(x * x for x in errors) / len(errors))
    return Summary(len(errors), math.expm1(mean), math.expm1(rms), worst.error)


# Errors (root mean square) of whole iterations of published runs, by what these have; held out,
# except that one factor was fitted to pairs (benchmarks/published-runs.md). Of dense models it is
# less than that of passes.
OF_RUNS = {"experts": 0.09, "passes in pairs": 0.30, "a learned softmax offset": 0.69}
LEAST = 8  # held-out figures that stand for a device


def expected_error(gpu: Gpu, job: Job) -> float:
    """By which share the job's time of all passes may be off: the root of the mean square of
    figures that were held out, each the sum of its passes.

    With experts, and where else passes alone were not published, it is that of published runs,
    where it is larger. The figures are of the device where it has ``LEAST`` of them and its rates
    are the table's, else of all devices; and of layers that tensor parallelism divides, or that it
    does not, as the job's.
    """
    divided = job.tensor_model_parallel_size > 1
    own: tuple[float, ...] = ()
    if gpu.name in devices() and gpu.has_rates_of_the_table:
        own = _held_out(gpu.name, divided)
    if len(own) < LEAST:
        own = tuple(error for name in devices() for error in _held_out(name, divided))
    found = math.expm1(math.sqrt(sum(error * error for error in own) / len(own)))
    return max([found, *(OF_RUNS[kind] for kind in kinds_of_runs(job))])


def kinds_of_runs(job: Job) -> list[str]:
    """Which of ``OF_RUNS`` stand for the job."""
    has = (
        job.num_experts,
        job.overlap_moe_expert_parallel_comm,
        job.softmax_type != "vanilla",
    )
    return [kind for kind, true in zip(OF_RUNS, has) if true]


@functools.cache
def _held_out(name: str, divided: bool) -> tuple[float, ...]:
    """Logarithms of our time by the published one, of a device's figures that were held out."""
    errors = []
    for figure in published(name)["figures"]:
        parallel = job_of(read(figure["flags"].split())[0]).tensor_model_parallel_size > 1
        if figure["fitted"] or parallel != divided:
            continue
        rows = compare(GPUS[name], [figure])
        passes = [row for row in rows if row.quantity in _TIMES]
        if passes:
            ratio = sum(row.ours for row in passes) / sum(row.published for row in passes)
            errors.append(math.log(ratio))
        else:
            errors += [math.log1p(row.error) for row in rows if row.quantity == "MFU"]
    return tuple(errors)
