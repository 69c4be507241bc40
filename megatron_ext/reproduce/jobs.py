"""Training jobs of the papers, and their simulation with the planner's own times and bytes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from ..plan.flags import job_of, read
from ..plan.gpu import gpu_of
from ..plan.layout import Split
from ..plan.model import Job
from ..plan.point import Point, evaluate
from ..plan.space import SearchSpace, Workload
from ..schedule import Link, OffloadSpec, ScheduleSpec
from .rows import published

GPU = gpu_of("A100")
GIB = 2**30
BUDGET = 74 * GIB  # 80 GiB less plan's default reserve of 6

ASSUMPTIONS = (
    "A100 with the rates of `plan --gpu A100`, of which six are fitted to 15 published passes "
    "(docs/concepts/pass-times.md); orders are made for the planner's pass times",
    "a vocabulary of 1,024: the papers leave out one layer at each end in exchange for theirs",
    "activation memory is the sets at the peak and what the running pass needs beside them, in GiB",
    "MFU counts 12bsh^2 l(1 + kv/a + s/h + f/h) FLOPs, no causal discount, of 312 TFLOP/s; the "
    "optimizer, gradient reductions, data loading are not in the time",
)

# Names of the papers, ours, and whether all layers are recomputed in full.
SCHEDULES = {
    "1F1B": ("1f1b", False),
    "1F1B-R": ("1f1b", True),
    "1F1B-I": ("interleaved", False),
    "ZB-1P": ("zb-h1", False),
    "ZB-2P": ("zb-h2", False),
    "V-Min": ("v-min", False),
    "V-Half": ("v-half", False),
    "V-ZB": ("v-zb", False),
    "GIS": ("gis", False),
    "GIS-H": ("gis-h", False),
    "PO-H": ("po", False),
    "PO-F": ("po", False),
}
OFFLOAD = {"PO-H": "half", "PO-F": "full"}
_V = {"V-Min", "V-Half", "V-ZB"}
_PLAIN = {"1f1b", "zb-h1", "zb-h2"}  # one chunk a rank
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class Model(NamedTuple):
    """A GPT of the papers, and what runs it.

    Attributes:
        layers, hidden, heads, sequence: sizes.
        groups: key and value heads; 0: as many as heads.
        tensor, data: ranks beside the pipeline's.
        more: other flags of Megatron's.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    groups: int = 0
    tensor: int = 1
    data: int = 1
    more: str = ""

    def job(self, pp: int, microbatches: int, size: int = 1, more: str = "") -> Job:
        """The job on ``pp`` pipeline ranks with microbatches of so many samples."""
        line = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            f"--num-attention-heads {self.heads} --seq-length {self.sequence} --fp16 "
            f"--micro-batch-size {size} --global-batch-size {microbatches * size * self.data} "
            f"--pipeline-model-parallel-size {pp} --vocab-size 1024 "
            f"--world-size {pp * self.tensor * self.data} --transformer-impl local "
            f"--attention-backend flash {self.more} {more} "
        )
        if self.groups:
            line += f"--group-query-attention --num-query-groups {self.groups} "
        if self.tensor > 1:
            line += f"--tensor-model-parallel-size {self.tensor} --sequence-parallel "
        return _job(line)

    def flops(self, size: int = 1) -> float:
        """Of F, B and W of one layer and microbatch."""
        groups = self.groups or self.heads
        per = 1 + groups / self.heads + self.sequence / self.hidden + 4
        return 12 * size * self.sequence * self.hidden**2 * per

    def mfu_in(self, time_us: float, microbatches: int, pp: int, size: int) -> float:
        """In per cent, of an iteration that takes so long."""
        work = self.flops(size) * self.layers * microbatches
        return 100 * work / (time_us / 1e6 * GPU.flops * pp * self.tensor)

    def mfu(self, point: Point) -> float:
        """In per cent."""
        size = point.workload.job.micro_batch_size
        m, pp = point.workload.microbatches, point.spec.pp
        return self.mfu_in(float(point.makespan_us), m, pp, size)


@cache
def _job(line: str) -> Job:
    return job_of(read(line.split())[0])


def without_ends(layers: int, stages: int) -> Split:
    """Equally many layers a stage, one less on the first and last."""
    each, rest = divmod(layers + 2, stages)
    assert rest == 0, (layers, stages)
    counts = [each] * stages
    counts[0], counts[-1] = each - 1, each - 1
    return Split(tuple(counts))


def workload(job: Job, microbatches: int, split: Split) -> Workload:
    """Times and bytes of the planner."""
    space = SearchSpace(job, GPU, job.pipeline_model_parallel_size)
    return space.workload(job, microbatches, split)


def link(pp: int, k: float) -> Link:
    """Of a published k: half of it each way, rounded to a 64th of a chunk's passes."""
    return Link.of(pp, Fraction(max(1, round(32 * k)), 64))


def simulated(
    model: Model,
    name: str,
    pp: int,
    microbatches: int,
    chunks: int = 1,
    size: int = 1,
    k: float = 1,
) -> Point:
    """A schedule of ``SCHEDULES``, with its offload.

    Args:
        chunks: of schedules that take any number of chunks; others have their own.
        size: of a microbatch, in samples.
        k: of the paper's figure 1, for offload.
    """
    spec, work = request(model, name, pp, microbatches, chunks, size)
    if name in OFFLOAD:
        spec = replace(spec, offload=OffloadSpec(OFFLOAD[name], link(pp, k)))
    return evaluate(spec, work)


def request(
    model: Model, name: str, pp: int, microbatches: int, chunks: int, size: int
) -> tuple[ScheduleSpec, Workload]:
    """As ``simulated``, without offload: what to simulate."""
    ours, full = SCHEDULES[name]
    chunks = 2 if name in _V else 1 if ours in _PLAIN else chunks
    job = model.job(pp, microbatches, size, _FULL if full else "")
    work = workload(job, microbatches, without_ends(model.layers, pp * chunks))
    return ScheduleSpec(ours, pp, microbatches, chunks, costs=work.costs), work


def published_k(hidden: int, sequence: int) -> float:
    """Of PipeOffload's figure 1."""
    table = published()["pipeoffload"]["tables"]["k"]
    return float(table["rows"][str(hidden)][table["sequences"].index(sequence)])


def activation_gib(point: Point) -> float:
    """Of the fullest rank: sets and the running pass."""
    return max(rank.kept + rank.passing for rank in point.ranks) / GIB
