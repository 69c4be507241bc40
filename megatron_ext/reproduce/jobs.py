"""Training jobs of the papers, simulated with the planner's own times and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from ..plan.flags import job_of, read
from ..plan.gpu import gpu_of
from ..plan.layout import Split, even_split
from ..plan.memory import stage_bytes
from ..plan.model import Job
from ..plan.point import Point, evaluate
from ..plan.space import SearchSpace
from ..plan.times import stage_times
from ..plan.workload import Workload
from ..schedule import Link, OffloadSpec, ScheduleSpec
from .rows import Cell, published

GPU = gpu_of("A100")
GIB = 2**30
BUDGET = 74 * GIB  # 80 GiB less plan's default reserve of 6

# Names of the papers, ours, and the chunks of a rank; None: any number.
SCHEDULES = {
    "1F1B": ("1f1b", 1),
    "1F1B-R": ("1f1b", 1),
    "1F1B-I": ("interleaved", None),
    "ZB-1P": ("zb-h1", 1),
    "ZB-2P": ("zb-h2", 1),
    "V-Min": ("v-min", 2),
    "V-Half": ("v-half", 2),
    "V-ZB": ("v-zb", 2),
    "GIS": ("gis", None),
    "GIS-H": ("gis-h", None),
    "PO-H": ("po", None),
    "PO-F": ("po", None),
}
_OFFLOAD = {"PO-H": "half", "PO-F": "full"}
_MORE = {
    "1F1B-R": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
}
_NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
_CHEAP = f"{_NO_DROPOUT} --pp-cheap-recompute"


class Model(NamedTuple):
    """A GPT of the papers, and what runs it.

    Attributes:
        layers, hidden, heads, sequence: sizes.
        groups: key and value heads; 0: as many as heads.
        tensor, data: ranks beside the pipeline's.
        vocabulary: the papers leave out a layer at each end in exchange for theirs.
        more: other flags of Megatron's.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    groups: int = 0
    tensor: int = 1
    data: int = 1
    vocabulary: int = 1024
    more: str = ""

    def job(self, pp: int, microbatches: int, size: int = 1, more: str = "") -> Job:
        """The job on ``pp`` pipeline ranks with microbatches of so many samples."""
        line = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            f"--num-attention-heads {self.heads} --seq-length {self.sequence} --fp16 "
            f"--micro-batch-size {size} --global-batch-size {microbatches * size * self.data} "
            f"--pipeline-model-parallel-size {pp} --vocab-size {self.vocabulary} "
            f"--world-size {pp * self.tensor * self.data} --transformer-impl local "
            f"--attention-backend flash {self.more} {more} "
        )
        if self.groups:
            line += f"--group-query-attention --num-query-groups {self.groups} "
        if self.tensor > 1:
            line += f"--tensor-model-parallel-size {self.tensor} --sequence-parallel "
        return _job(line)


@cache
def _job(line: str) -> Job:
    return job_of(read(line.split())[0])


def request(
    model: Model, name: str, pp: int, microbatches: int, chunks: int, size: int
) -> tuple[ScheduleSpec, Workload]:
    """What to simulate for a schedule of ``SCHEDULES``, without offload; as ``simulated``."""
    ours, own = SCHEDULES[name]
    chunks = own or chunks
    job = model.job(pp, microbatches, size, _MORE.get(name, ""))
    split = _without_ends(model.layers, pp * chunks)
    work = SearchSpace(job, GPU, pp).workload(job, microbatches, split)
    return ScheduleSpec(ours, pp, microbatches, chunks, costs=work.costs), work


def _without_ends(layers: int, stages: int) -> Split:
    """Equally many layers a stage, one less on the first and last."""
    each, rest = divmod(layers + 2, stages)
    assert rest == 0, (layers, stages)
    return Split((each - 1, *[each] * (stages - 2), each - 1))


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
        k: of the paper's figure 1, for offload: half of it each way, rounded to a 64th of a
            chunk's passes.
    """
    spec, work = request(model, name, pp, microbatches, chunks, size)
    if name in _OFFLOAD:
        link = Link.of(pp, Fraction(max(1, round(32 * k)), 64))
        spec = replace(spec, offload=OffloadSpec(_OFFLOAD[name], link))
    return evaluate(spec, work)


def published_k(hidden: int, sequence: int) -> float:
    """Of PipeOffload's figure 1."""
    table = published()["pipeoffload"]["tables"]["k"]
    return float(table["rows"][str(hidden)][table["sequences"].index(sequence)])


def activation_gib(point: Point) -> float:
    """Of the fullest rank: sets and the running pass."""
    return max(rank.kept + rank.passing for rank in point.ranks) / GIB


def mfu(job: Job, microbatches: int, time_us: float) -> float:
    """In per cent, of an iteration that takes so long, by the FLOPs that the papers count."""
    h, s = job.hidden_size, job.seq_length
    per = 1 + job.num_query_groups / job.num_attention_heads + s / h + 4
    layer = 12 * job.micro_batch_size * s * h**2 * per
    return _share(job, layer * job.num_layers * microbatches, time_us)


def _share(job: Job, flops: float, time_us: float) -> float:
    ranks = job.pipeline_model_parallel_size * job.tensor_model_parallel_size
    return 100 * flops / (time_us / 1e6 * GPU.flops * ranks)


def _point_mfu(point: Point) -> float:
    work = point.workload
    return mfu(work.job, work.microbatches, float(point.makespan_us))


def vocabulary_mfu(point: Point) -> float:
    """In per cent, by the FLOPs of Vocabulary Parallelism's table 4, embedding included."""
    job = point.workload.job
    s, h = job.seq_length, job.hidden_size
    each = 72 * h + 12 * s
    per = each * job.num_layers + 6 * job.padded_vocab_size + 3
    return _share(job, point.workload.microbatches * s * h * per, float(point.makespan_us))


_OF = {
    "mfu": _point_mfu,
    "gib": activation_gib,
    "vocabulary mfu": vocabulary_mfu,
    "total": lambda point: point.worst.total / GIB,
}


def _layer(hidden: int, sequence: int, groups: int, more: str) -> tuple[float, float]:
    """Bytes that one layer keeps from F to B, and seconds of its F, B and W."""
    model = Model(4, hidden, hidden // 128, sequence, groups, more=more)
    job, split = model.job(2, 2), _without_ends(4, 3)
    middle = stage_bytes(job, split)[1].sets, stage_times(job, split, GPU)[1]
    return middle[0].bytes_f_to_b / 2, sum(middle[1]) / 2


def _k(data: dict[str, Any]) -> Iterator[Cell]:
    for hidden, values in data["rows"].items():
        for sequence, value in zip(data["sequences"], values):
            size, seconds = _layer(int(hidden), sequence, 0, _CHEAP)
            travel = size / GPU.to_host + size / GPU.to_device
            yield Cell(f"h={hidden}, s={sequence}", value, travel / seconds)


def _recompute(data: dict[str, Any]) -> Iterator[Cell]:
    of_bytes = data["values"] == "reduction"
    for hidden, values in data[data["values"]].items():
        for sequence, value in zip(data["sequences"], values):
            stock, cheap = (
                _layer(int(hidden), sequence, 8, more) for more in (_NO_DROPOUT, _CHEAP)
            )
            ours = 1 - cheap[0] / stock[0] if of_bytes else cheap[1] / stock[1] - 1
            yield Cell(f"h={hidden}, s={sequence}", value, 100 * ours)


@cache
def _offloaded(name: str, sequence: int, schedule: str) -> Point:
    """Of PipeOffload's figure 15."""
    models = published()["pipeoffload"]["models"]
    layers, each, hidden, heads, microbatches, pp = models[name]
    model = Model(layers, hidden, heads, sequence, 8, more=_CHEAP)
    k = published_k(hidden, sequence)
    return simulated(model, schedule, pp, microbatches, each, k=k)


def _models(data: dict[str, Any]) -> Iterator[Cell]:
    quantity = data["quantity"]
    for name, sequence, cells in data["rows"]:
        for schedule, cell in zip(data["schedules"], cells):
            row = f"{name}, s={sequence}, {schedule}"
            if cell == "skip" or (cell is None and quantity != "fits"):
                continue
            point = _offloaded(name, sequence, schedule)
            if quantity == "fits":
                found = "fits" if point.worst.total <= BUDGET else "out of memory"
                yield Cell(row, "out of memory" if cell is None else "fits", found)
            else:
                yield Cell(row, cell[("mfu", "gib").index(quantity)], _OF[quantity](point))


def _against_tensor_parallel(data: dict[str, Any]) -> Iterator[Cell]:
    low, high = data["gain"]
    for name, sequence in data["rows"].items():
        layers, _, hidden, heads, microbatches, _ = data["models"][name]
        model = Model(layers, hidden, heads, sequence, 8, tensor=8, more=_CHEAP)
        flat = _point_mfu(simulated(model, "1F1B-I", 4, microbatches, 16))
        fast = max(_point_mfu(_offloaded(name, sequence, schedule)) for schedule in _OFFLOAD)
        row = f"{name}, s={sequence}: PO over 1F1B-I"
        yield Cell(row, (low, high), 100 * (fast / flat - 1))


def with_dropout(name: str, sequence: int) -> tuple[Model, int]:
    """A model of Controllable Memory, which keeps attention scores at 1,024 tokens; its ranks."""
    layers, hidden, heads, ranks = published()["controllable-memory"]["models"][name]
    scores = " --attention-backend unfused" * (sequence == 1024)
    more = f"--hidden-dropout 0.1 --attention-dropout 0.1{scores}"
    return Model(layers, hidden, heads, sequence, more=more), ranks


@cache
def _pipeline(name: str, schedule: str, microbatches: int | None) -> Point:
    model, pp = with_dropout(name, 1024)
    size = {"9.6B": 2, "38.5B": 1}[name]
    return simulated(model, schedule, pp, microbatches or 4 * pp, 2, size)


def _pipelines(data: dict[str, Any]) -> Iterator[Cell]:
    """Controllable Memory's pure pipelines; four microbatches a rank, if no number is given."""
    quantity, m = data["quantity"], data.get("microbatches")
    for name, cells in data["rows"].items():
        setup = f"{name}, m={m}" if m else name
        for schedule, values in cells.items():
            value = values[("mfu", "gib").index(quantity)]
            ours = _OF[quantity](_pipeline(name, schedule, m))
            yield Cell(f"{setup}, {schedule}", value, ours)


@cache
def sharded(schedule: str, pp: int, sequence: int, thousand: int, method: str) -> Point:
    """Of Vocabulary Parallelism's tables, with a vocabulary of so many times 1,024 words."""
    models = published()["vocabulary-parallelism"]["models"][schedule]
    layers, hidden, heads = models[str(pp)]
    barriers = {"Vocab-1": 2, "Vocab-2": 1}.get(method, 0)
    shards = " --pp-vocab-parallel" * bool(barriers)
    more = f"{_NO_DROPOUT} --untie-embeddings-and-output-weights{shards}"
    model = Model(layers, hidden, heads, sequence, vocabulary=1024 * thousand, more=more)
    job, spec = model.job(pp, 128), ScheduleSpec(schedule, pp, 128, barriers=barriers)
    space, split = SearchSpace(job, GPU, pp), even_split(layers, spec.placement.num_stages)
    if method == "Redis":
        split = space.balanced_in_time(job, spec.placement)
    assert split is not None
    work = space.workload(job, spec.microbatches, split)
    return evaluate(replace(spec, costs=work.costs), work)


def _sharded(data: dict[str, Any]) -> Iterator[Cell]:
    quantity, sizes = data["quantity"], (32, 64, 128, 256)
    for setup, methods in data["rows"].items():
        pp, sequence = map(int, setup.split("x"))
        for method, values in methods.items():
            for size, value in zip(sizes, values[len(sizes) * (quantity == "total") :]):
                point = sharded(data["schedule"], pp, sequence, size, method)
                row = f"p={pp}, s={sequence}, V={size}k, {method}"
                yield Cell(row, value, _OF[quantity](point))


CELLS = (_k, _recompute, _models, _against_tensor_parallel, _pipelines, _sharded)
