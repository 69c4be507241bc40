"""Comparison with every table of the papers that simulation or the planner can answer.

``python3 -m benchmarks.papers.compare`` prints all rows, ``--page FILE.md`` writes the page. No
value of ours is a measurement: orders are simulated, times and bytes are the planner's. A verdict
follows from the rule of the table alone.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.moe.plan import LayerShape, Restore, Strategy, copied_bytes
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import Split, even_split
from megatron_ext.plan.memory import stage_bytes
from megatron_ext.plan.model import Job
from megatron_ext.plan.point import Point, evaluate
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.times import stage_times
from megatron_ext.schedule import (
    Costs,
    Link,
    OffloadSpec,
    ScheduleSpec,
    Simulation,
    generate,
    offload_pass,
    select,
    simulate,
)
from megatron_ext.schedule.memory_cap import ShareCap

PUBLISHED: dict[str, Any] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
GPU = gpu_of("A100")
GIB = 2**30
BUDGET = 74 * GIB  # 80 GiB less the planner's default reserve


class Rule(NamedTuple):
    """When ours is the published value: within a share of it, or within a difference.

    Attributes:
        relative: share of the published value.
        absolute: difference.
        less_is_better: more than that below the published value is better, not different.
    """

    text: str
    relative: float = 0.0
    absolute: float = 0.0
    less_is_better: bool = False


RULES = {
    "exact": Rule("closed forms and words: equal, to the last printed digit", absolute=0.05),
    "order": Rule("sets, bubbles, makespans: within 1 %; less is better", 0.01, 0, True),
    "bytes": Rule("predicted memory: within 10 %, or half of a printed GB", 0.1, 0.5),
    "time": Rule("predicted times and MFU: within 10 %", 0.1),
    "points": Rule("gains and losses in per cent: within 2 points or a third", 1 / 3, 2),
}

Value = float | str
Cells = Callable[[dict[str, Any]], Iterator[tuple[str, Value, Value]]]


class Table(NamedTuple):
    """One table or figure.

    Attributes:
        paper, key: of the published values.
        title: with the assumptions that are not those of all tables.
        rule: of ``RULES``.
        cells: makes rows: label, published, ours.
        why: reason for rows that differ.
    """

    paper: str
    key: str
    title: str
    rule: str
    cells: Cells
    why: str = ""

    @property
    def name(self) -> str:
        """Paper and table."""
        return f"{self.paper} {self.key}"


class Row(NamedTuple):
    """A compared value."""

    label: str
    published: Value
    ours: Value
    verdict: str


def rows_of(table: Table) -> list[Row]:
    """All rows of a table with their verdicts."""
    paper = PUBLISHED[table.paper]
    data = {"models": paper.get("models"), **paper["tables"][table.key]}
    rule = RULES[table.rule]
    return [Row(*cell, verdict(rule, cell[1], cell[2])) for cell in table.cells(data)]


def verdict(rule: Rule, published: Value, ours: Value) -> str:
    """``same``, ``better`` or ``differs``."""
    if isinstance(published, str) or isinstance(ours, str):
        return "same" if published == ours else "differs"
    off = ours - published
    if abs(off) <= max(rule.relative * abs(published), rule.absolute) + 1e-9:
        return "same"
    return "better" if rule.less_is_better and off < 0 else "differs"


# Orders under given times.


@cache
def run(name: str, p: int, m: int, v: int | None = None, *times: str) -> Simulation:
    """A generated schedule: p ranks, m microbatches, v chunks a rank, F, B, W (and hop)."""
    return simulate(generate(name, p, m, v, Costs.of(*times or (1, 1, 1))))


def _slowdown(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    base = generate("1f1b", 8, 32)
    alone = simulate(base).makespan
    printed = PUBLISHED["pipeoffload"]["tables"]["k"]
    for hidden, values in data["rows"].items():
        for sequence, value, k in zip(printed["sequences"], values, printed["rows"][hidden]):
            link = Link.of(8, Fraction(round(k * 100), 200))
            stall = float(100 * offload_pass(base, link, "full").stall / alone)
            yield f"h={hidden}, s={sequence} (k={k:.2f})", value, stall


def _gis(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for p, v, name, w in product((4, 8, 16), (2, 4), ("gis", "gis-h"), (1, 1.5)):
        group = p if name == "gis" else p // 2
        late = p - group + max(0, p - group * (1 + w))
        found = run(name, p, 4 * p, v, "1", "1", str(w))
        label = f"{name}, p={p}, v={v}, W={w}"
        bubble = float(found.makespan - 4 * p * Fraction(2 + w))
        yield f"{label}: bubble", ((p - 1) * 2 + (v - 1) * late) / v, bubble
        if w == 1:
            yield f"{label}: sets", group * (v - 1) + p, max(found.peak_sets)


def _selective(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    base = generate("po", 8, 32, 8)
    every = max(simulate(base).peak_sets)
    for n in (1, 2, 4, 6):
        sets = max(offload_pass(base, Link.of(8, "0.25"), str(n)).peak_sets)
        less = "less than linear" if sets * 8 < every * (8 - n) else "not less"
        yield f"p=8, v=8, {n} of 8 chunks", "less than linear", less


def _constant(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for p in data["ranks"]:
        base = generate("po", p, 4 * p, 32 // p)
        plan = offload_pass(base, Link.of(p, "0.3"), "full")
        yield f"5.8B, p={p}, v={32 // p}: layers", data["layers"], max(plan.peak_sets)


def _v_schedules(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for p in (4, 6, 8):
        peaks = {"v-min": 2 * ((p + 4) // 3), "v-half": 2 * ((p + 2) // 2), "v-zb": 2 * p}
        for name, peak in peaks.items():
            found, m = run(name, p, 4 * p), 4 * p
            more = p - 1 if name == "v-zb" else 6 * p - 3 * peak - 1
            yield f"{name}, p={p}: sets", peak, max(found.peak_sets)
            yield f"{name}, p={p}: makespan", 6 * m + more, float(2 * found.makespan)


def _periods(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    work = sum(data["costs"])
    for name, value in data["rows"].items():
        few, many = (run(name, 4, m, None, *data["costs"]).makespan for m in (32, 64))
        idle = (many - few) / 32 - work > Fraction(work, 100)
        yield f"{name}, F,B,W=3,4,2", value, "a bubble in every period" if idle else "none"


def _caps(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for costs, values in data["rows"].items():
        times = data["costs"][costs]
        for share, value in zip(data["caps"], values):
            cap = ShareCap(Fraction(share))
            spec = ScheduleSpec("v-cap", 8, 16, costs=Costs.of(*times), cap=cap)
            found = float(simulate(select(spec).schedule).makespan)
            yield f"F,B,W={','.join(times)}, cap={share}", value, found


_ZERO_BUBBLE = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1P": "zb-h1", "ZB-2P": "zb-h2"}


def _bubbles(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    """Bubbles of the longest rank's own span, as where no rank waits for the optimizer."""
    for p, name in product((4, 8, 16), ("1f1b", "zb-h1", "zb-h2")):
        less = {"1f1b": 0, "zb-h1": 2, "zb-h2": 3}[name]
        found = run(name, p, 4 * p)
        work = 12 * p
        yield f"{name}, p={p}: peak", 2 * p - 1 if name == "zb-h2" else p, max(found.peak_sets)
        bubble = float(work / (1 - found.span_bubble) - work)
        yield f"{name}, p={p}: bubble", (p - 1) * max(0, 3 - less), bubble


def _throughput(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for model, cells in data["rows"].items():
        p, size, chunks, *times = data["models"][model]
        for name, ours in _ZERO_BUBBLE.items():
            v = chunks if ours == "interleaved" else None
            for m, value in zip(cells["m"], cells[name]):
                found = run(ours, p, m, v, *map(str, times))
                bubble = found.span_bubble if name in ("ZB-1P", "ZB-2P") else found.bubble
                ms = float(found.makespan * (1 - found.bubble) / (1 - bubble))
                yield f"{model}, m={m}, {name}", value, 1e3 * m * size / (ms * p)


def _few(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for (p, m), name in product(((8, 2), (8, 4), (8, 8), (16, 8)), ("1f1b", "zb-h1")):
        value = (m + p - 1) * (3 if name == "1f1b" else 2) + (name == "zb-h1")
        yield f"{name}, p={p}, m={m}", value, float(run(name, p, m).makespan)


def _devices(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    """A stage computes F = B = W = 1; DualPipeV has two of them on each of half the devices."""
    names = {"1F1B": "1f1b", "ZB1P": "zb-h1", "DualPipeV": "dualpipev"}
    bubbles = {"1F1B": lambda s: 3 * (s - 1), "ZB1P": lambda s: s - 1, "DualPipeV": lambda s: s - 2}
    for stages, (method, row) in product((8, 16), data["rows"].items()):
        own = 2 if method == "DualPipeV" else 1
        found = run(names[method], stages // own, 2 * stages, None, *[str(own)] * 3)
        idle = float(found.makespan - 6 * own * stages)
        yield f"PP={stages}, {method}: idle", bubbles[method](stages), idle
        peak = float(own * max(found.peak_activation))
        yield f"PP={stages}, {method}: activations", stages + row["more_sets"], peak


class Recipe(NamedTuple):
    """The pipeline of one large-scale recipe, at equal costs."""

    label: str
    pp: int
    chunks: int
    microbatches: int

    @property
    def row(self) -> str:
        """The recipe for people."""
        return f"{self.label}: PP {self.pp}, VP {self.chunks}, m {self.microbatches}"

    def run(self, name: str) -> Simulation:
        """A schedule, ``stock``'s, or ``zero-bubble`` in 1F1B's memory, with the virtual stages."""
        if name == "stock":
            name = "1f1b" if self.chunks == 1 else "interleaved"
        elif name == "zero-bubble":
            name = "interleaved-zb" if self.chunks > 2 else "v-zb"
        chunks = self.chunks if name.startswith("interleaved") else None
        return run(name, self.pp, self.microbatches, chunks)

    def memory(self, name: str) -> float:
        """Peak of the worst rank as a fraction of 1F1B's."""
        return float(max(self.run(name).peak_activation)) / self.pp

    def idle(self, name: str) -> float:
        """Idle share in per cent."""
        return float(100 * self.run(name).bubble)

    def limit(self, name: str) -> float:
        """Speed-up over stock if nothing but passes counts."""
        return float(self.run("stock").makespan / self.run(name).makespan)


RECIPES = [Recipe(*row) for row in PUBLISHED["large-scale"]["tables"]["settings"]["rows"]]


def _recipes(name: str) -> Cells:
    def cells(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
        for one in RECIPES:
            idle = one.pp - 1
            stock = 100 * idle / (one.chunks * one.microbatches + idle)
            yield f"{one.row}, memory {one.memory(name):.2f}", stock, one.idle(name)

    return cells


# Training jobs, with the planner's times and bytes.

# Name in the papers -> ours, and the chunks of a rank; None: any number.
SCHEDULES = {
    **{"1F1B": ("1f1b", 1), "1F1B-R": ("1f1b", 1), "1F1B-I": ("interleaved", None)},
    **{"ZB-1P": ("zb-h1", 1), "ZB-2P": ("zb-h2", 1)},
    **{"V-Min": ("v-min", 2), "V-Half": ("v-half", 2), "V-ZB": ("v-zb", 2)},
    **{"GIS": ("gis", None), "GIS-H": ("gis-h", None), "PO-H": ("po", None), "PO-F": ("po", None)},
}
_OFFLOAD = {"PO-H": "half", "PO-F": "full"}
_NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
_CHEAP = f"{_NO_DROPOUT} --pp-cheap-recompute"


class Model(NamedTuple):
    """A GPT of the papers.

    Attributes:
        groups: key and value heads; 0: as many as heads.
        vocabulary: the papers leave out a layer at each end in exchange for theirs.
        more: other flags of Megatron's.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    groups: int = 0
    vocabulary: int = 1024
    more: str = ""

    def job(self, pp: int, microbatches: int, size: int = 1, more: str = "") -> Job:
        """The job on ``pp`` pipeline ranks with microbatches of ``size`` samples."""
        line = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --fp16 "
            f"--num-attention-heads {self.heads} --seq-length {self.sequence} "
            f"--micro-batch-size {size} --global-batch-size {microbatches * size} "
            f"--pipeline-model-parallel-size {pp} --vocab-size {self.vocabulary} "
            f"--world-size {pp} --transformer-impl local --attention-backend flash "
            f"{self.more} {more} "
        )
        if self.groups:
            line += f"--group-query-attention --num-query-groups {self.groups} "
        return _job(line)


@cache
def _job(line: str) -> Job:
    return job_of(read(line.split())[0])


def _without_ends(layers: int, stages: int) -> Split:
    """Equally many layers a stage, one less on the first and last."""
    each = (layers + 2) // stages
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
        chunks: of schedules that take any number of chunks.
        size: samples of a microbatch.
        k: of PipeOffload's figure 1; half of it each way, rounded to a 64th of a chunk's passes.
    """
    ours, own = SCHEDULES[name]
    chunks = own or chunks
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    job = model.job(pp, microbatches, size, full if name == "1F1B-R" else "")
    split = _without_ends(model.layers, pp * chunks)
    work = SearchSpace(job, GPU, pp).workload(job, microbatches, split)
    spec = ScheduleSpec(ours, pp, microbatches, chunks, costs=work.costs)
    if name in _OFFLOAD:
        link = Link.of(pp, Fraction(max(1, round(32 * k)), 64))
        spec = replace(spec, offload=OffloadSpec(_OFFLOAD[name], link))
    return evaluate(spec, work)


def published_k(hidden: int, sequence: int) -> float:
    """k of PipeOffload's figure 1."""
    table = PUBLISHED["pipeoffload"]["tables"]["k"]
    return float(table["rows"][str(hidden)][table["sequences"].index(sequence)])


def activation_gib(point: Point) -> float:
    """Sets and the running pass of the fullest rank."""
    return max(rank.kept + rank.passing for rank in point.ranks) / GIB


def _mfu(point: Point) -> float:
    """MFU in per cent, by the FLOPs that the papers count."""
    job, h = point.workload.job, point.workload.job.hidden_size
    per = 1 + job.num_query_groups / job.num_attention_heads + job.seq_length / h + 4
    layer = 12 * job.micro_batch_size * job.seq_length * h**2 * per
    return _share(point, layer * job.num_layers)


def vocabulary_mfu(point: Point) -> float:
    """MFU by the FLOPs of Vocabulary Parallelism's table 4, embedding included."""
    job = point.workload.job
    s, h = job.seq_length, job.hidden_size
    per = (72 * h + 12 * s) * job.num_layers + 6 * job.padded_vocab_size + 3
    return _share(point, s * h * per)


def _share(point: Point, flops: float) -> float:
    work = point.workload
    seconds = float(point.makespan_us) / 1e6
    ranks = work.job.pipeline_model_parallel_size
    return 100 * flops * work.microbatches / (seconds * GPU.flops * ranks)


def _layer(hidden: int, sequence: int, groups: int, more: str) -> tuple[float, float]:
    """Bytes that one layer keeps from F to B, and seconds of its F, B and W."""
    job = Model(4, hidden, hidden // 128, sequence, groups, more=more).job(2, 2)
    split = _without_ends(4, 3)
    sets, times = stage_bytes(job, split)[1].sets, stage_times(job, split, GPU)[1]
    return sets.bytes_f_to_b / 2, sum(times) / 2


def _k(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for hidden, values in data["rows"].items():
        for sequence, value in zip(data["sequences"], values):
            size, seconds = _layer(int(hidden), sequence, 0, _CHEAP)
            travel = size / GPU.to_host + size / GPU.to_device
            yield f"h={hidden}, s={sequence}", value, travel / seconds


def _recompute(kind: str) -> Cells:
    def cells(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
        for hidden, values in data[kind].items():
            for sequence, value in zip(data["sequences"], values):
                stock, cheap = (_layer(int(hidden), sequence, 8, m) for m in (_NO_DROPOUT, _CHEAP))
                saved, longer = 1 - cheap[0] / stock[0], cheap[1] / stock[1] - 1
                yield (
                    f"h={hidden}, s={sequence}",
                    value,
                    100 * (saved if kind == "reduction" else longer),
                )

    return cells


@cache
def _offloaded(name: str, sequence: int, schedule: str) -> Point:
    layers, each, hidden, heads, m, pp = PUBLISHED["pipeoffload"]["models"][name]
    model = Model(layers, hidden, heads, sequence, 8, more=_CHEAP)
    return simulated(model, schedule, pp, m, each, k=published_k(hidden, sequence))


def _models(quantity: str) -> Cells:
    def cells(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
        for name, sequence, values in data["rows"]:
            for schedule, cell in zip(data["schedules"], values):
                label = f"{name}, s={sequence}, {schedule}"
                if cell == "skip" or (cell is None and quantity != "fits"):
                    continue
                point = _offloaded(name, sequence, schedule)
                if quantity == "fits":
                    found = "fits" if point.worst.total <= BUDGET else "out of memory"
                    yield label, "out of memory" if cell is None else "fits", found
                elif quantity == "mfu":
                    yield label, cell[0], _mfu(point)
                else:
                    yield label, cell[1], activation_gib(point)

    return cells


@cache
def _pipeline(name: str, schedule: str) -> Point:
    """A pure pipeline of Controllable Memory, which keeps attention scores."""
    layers, hidden, heads, pp = PUBLISHED["controllable-memory"]["models"][name]
    more = "--hidden-dropout 0.1 --attention-dropout 0.1 --attention-backend unfused"
    model = Model(layers, hidden, heads, 1024, more=more)
    return simulated(model, schedule, pp, 4 * pp, 2, {"9.6B": 2, "38.5B": 1}[name])


def _pipelines(quantity: str) -> Cells:
    def cells(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
        for name, values in data["rows"].items():
            for schedule, (mfu, gib) in values.items():
                point, base = _pipeline(name, schedule), _pipeline(name, "1F1B")
                label = f"{name}, {schedule}"
                if quantity == "gib":
                    yield label, gib, activation_gib(point)
                elif schedule != "1F1B":
                    yield label, mfu / values["1F1B"][0], _mfu(point) / _mfu(base)

    return cells


@cache
def sharded(pp: int, sequence: int, thousand: int, on: bool) -> Point:
    """1F1B of Vocabulary Parallelism, with a vocabulary of so many times 1,024 words."""
    layers, hidden, heads = PUBLISHED["vocabulary-parallelism"]["models"]["1f1b"][str(pp)]
    shards = " --pp-vocab-parallel" * on
    more = f"{_NO_DROPOUT} --untie-embeddings-and-output-weights{shards}"
    model = Model(layers, hidden, heads, sequence, vocabulary=1024 * thousand, more=more)
    job, spec = model.job(pp, 128), ScheduleSpec("1f1b", pp, 128, barriers=int(on))
    work = SearchSpace(job, GPU, pp).workload(job, 128, even_split(layers, pp))
    return evaluate(replace(spec, costs=work.costs), work)


def _sharded(quantity: str) -> Cells:
    def cells(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
        for setup, methods in data["rows"].items():
            pp, sequence = map(int, setup.split("x"))
            for at, size in enumerate((32, 64, 128, 256)):
                whole, shards = (sharded(pp, sequence, size, on) for on in (False, True))
                label, two = f"p={pp}, s={sequence}, V={size}k", methods["Vocab-2"]
                if quantity == "gib":
                    yield label, two[4 + at], shards.worst.total / GIB
                else:
                    ours = vocabulary_mfu(shards) / vocabulary_mfu(whole)
                    yield label, two[at] / methods["Baseline"][at], ours

    return cells


# MoE layers.


def savings(hidden: int, ffn: int, experts: int, tokens: int, chunks: int) -> tuple[float, float]:
    """Shares that reuse saves of the pipelined layer (phi), and of the one that is not pipelined.

    Equations 1 to 6 of MPipeMoE: one expert a device, top-1, Adam, ``tokens`` on each device.
    """
    states = 4 * (experts * hidden + 2 * hidden * ffn)
    activations = tokens * (4 * hidden + ffn)
    exchanged, middle = 2 * hidden * (chunks - 2) / chunks, ffn * (chunks - 1) / chunks
    reused = tokens * (exchanged + middle) if chunks > 1 else 0.0
    sequential = states + activations + tokens * (hidden + ffn)
    pipelined = states + 2 * activations
    return 2 * reused / pipelined, 1 - (pipelined - 2 * reused) / sequential


def _work(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    shape = LayerShape(1024, 4096, gated=False, kept_bytes=2 * 4096)
    for name, passes in data["rows"].items():
        strategy = Strategy(name)
        copies = copied_bytes(shape, 1, strategy) / 2048
        again = strategy.inside is Restore.RECOMPUTE, strategy.input is Restore.RESEND
        found = (2, 2, copies), (4 + again[0], 2 + again[1], copies)
        for which, *values in zip(("forward", "backward"), passes, found):
            text = "{:g} GEMMs, {:g} all-to-alls, {:g} copies"
            yield f"{name}, {which}", text.format(*values[0]), text.format(*values[1])


def _limits(data: dict[str, Any]) -> Iterator[tuple[str, Value, Value]]:
    for chunks, values in data["limits"].items():
        shares = savings(1024, 4096, 1, 10**9, int(chunks))
        for of, value, ours in zip(("pipelined", "sequential"), values, shares):
            yield f"n={chunks}, of the {of} layer", value, round(100 * ours, 1 if value % 1 else 0)


_PLANNER = (
    "the A100's rates are fitted to published passes; the planner has no fragmentation, no "
    "buffers of communicators and no slowdown of passes beside collectives"
)
_FEW = "the optimizer is not in ours, and the profile's passes were synchronized to be timed"
TABLES = (
    Table("pipeoffload", "k", "a layer's way to the host and back over F+B+W", "time", _k),
    Table(
        *("pipeoffload", "fig1-right", "slowdown of 1F1B with full offload, p=8, m=32, per cent"),
        *("points", _slowdown),
        "the models' own k, with 8 key and value heads, is up to 17 % lower than the printed one, "
        "and the paper's baseline was slowed by the allocator",
    ),
    Table("pipeoffload", "gis", "GIS and GIS-H, four microbatches a rank", "order", _gis),
    Table(
        *("pipeoffload", "selective", "the peak falls faster than the chunks that stay", "exact"),
        _selective,
    ),
    Table("pipeoffload", "fig10", "PO-F: layers on a device", "order", _constant),
    Table("pipeoffload", "fig15", "activation memory, GB", "bytes", _models("gib"), _PLANNER),
    Table("pipeoffload", "fig15", "fits on 80 GB", "exact", _models("fits")),
    Table("pipeoffload", "fig15", "MFU, per cent", "time", _models("mfu"), _PLANNER),
    Table(
        *("pipeoffload", "fig16", "cheap recompute: less activation memory, per cent", "points"),
        _recompute("reduction"),
    ),
    Table(
        *("pipeoffload", "fig16", "cheap recompute: slowdown, per cent", "points"),
        _recompute("slowdown"),
    ),
    Table("controllable-memory", "table1", "V-Min, V-Half, V-ZB", "order", _v_schedules),
    Table("controllable-memory", "fig5", "bubbles of a period", "exact", _periods),
    Table("controllable-memory", "appb", "v-cap and the adaptive scheduler", "order", _caps),
    Table(
        *("controllable-memory", "fig7", "MFU over 1F1B's", "time", _pipelines("mfu")),
        _PLANNER,
    ),
    Table(
        *("controllable-memory", "fig7", "activation memory, GB", "bytes", _pipelines("gib")),
        _PLANNER,
    ),
    Table("mpipemoe", "table1", "work of a chunk by strategy, H = 4M", "exact", _work),
    Table("mpipemoe", "phi", "memory saved for many tokens, per cent", "exact", _limits),
    Table("zero-bubble", "table2", "bubble of a rank's own span, and peak", "order", _bubbles),
    Table("zero-bubble", "table4", "samples a GPU and second", "time", _throughput, _FEW),
    Table("zero-bubble", "small", "few microbatches: makespan", "order", _few),
    Table(
        *("vocabulary-parallelism", "table5", "1F1B: MFU over the baseline's", "time"),
        *(_sharded("mfu"), _PLANNER),
    ),
    Table(
        *("vocabulary-parallelism", "table5", "1F1B: peak memory, GB", "bytes"),
        *(_sharded("gib"), _PLANNER),
    ),
    Table("dualpipe", "comparison", "idle time and activations, in stages", "order", _devices),
    Table("large-scale", "settings", "stock's idle share, per cent", "exact", _recipes("stock")),
    Table(
        *("large-scale", "settings", "a zero-bubble schedule's idle share beside stock's", "order"),
        _recipes("zero-bubble"),
    ),
    Table(
        *("large-scale", "settings", "V-Half's idle share beside stock's", "order"),
        _recipes("v-half"),
        "V-Half has two chunks and less memory, stock more chunks and at least 1F1B's memory",
    ),
)
_HEAD = """\
# The papers' tables, and ours

`python3 -m benchmarks.papers.compare --page benchmarks/papers/README.md` wrote this page; without
`--page` it prints every row. It needs a bare Python. **No value of ours is a measurement**: orders
are simulated, times and bytes are the planner's. `published.json` has the published values, each
with its place in the paper and how sure it is.

"""


def page(found: list[tuple[Table, list[Row]]]) -> str:
    """The Markdown page: one line a table, then why rows differ."""
    every = Counter(row.verdict for _, rows in found for row in rows)
    lines = [f"- *{name}*: {rule.text}" for name, rule in RULES.items()]
    lines += ["", f"**{every.total()} rows: {_tally(every)}.**", ""]
    lines += ["| table | what | rule | verdicts |", "|---|---|---|---|"]
    for table, rows in found:
        tally = _tally(Counter(row.verdict for row in rows))
        lines.append(f"| {table.name} | {table.title} | {table.rule} | {tally} |")
    why: dict[str, list[str]] = {}
    for table, rows in found:
        if table.why and any(row.verdict == "differs" for row in rows):
            why.setdefault(table.why, []).append(f"{table.name} ({table.title})")
    lines += ["", "## Why rows differ", ""]
    lines += [f"- {'; '.join(tables)}: {text}." for text, tables in why.items()]
    return _HEAD + "\n".join(lines) + "\n"


def _tally(found: Counter[str]) -> str:
    return ", ".join(
        f"{found[name]} {name}" for name in ("same", "better", "differs") if found[name]
    )


def main() -> None:
    """Print every row, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--page", metavar="FILE.md", type=Path)
    parser.add_argument("--table", metavar="WORDS", default="", help="only tables that have these")
    args = parser.parse_args()
    tables = [one for one in TABLES if args.table in f"{one.name}: {one.title}"]
    found = [(table, rows_of(table)) for table in tables]
    if args.page is not None:
        args.page.write_text(page(found), encoding="utf-8")
        return
    for table, rows in found:
        print(f"\n{table.name}: {table.title}")
        for row in rows:
            values = (x if isinstance(x, str) else f"{x:.4g}" for x in (row.published, row.ours))
            print("  {:<50} {:>16} {:>16}  {}".format(row.label, *values, row.verdict))


if __name__ == "__main__":
    main()
