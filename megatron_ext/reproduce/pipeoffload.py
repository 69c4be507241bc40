"""PipeOffload's tables: k, the closed forms of GIS and PO, and single layers."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any

from ..plan.memory import stage_bytes
from ..plan.times import stage_times
from ..schedule import Costs, Link, generate, offload_pass, simulate
from .jobs import GPU, Model, published_k, without_ends
from .pipeoffload_figures import FIGURES
from .plots import lines_by
from .rows import Cell, Kind, Paper, Table, gpu_table

_PLAIN = "--hidden-dropout 0 --attention-dropout 0"
_CHEAP = f"{_PLAIN} --pp-cheap-recompute"


def _layer(hidden: int, sequence: int, groups: int, more: str) -> tuple[float, float]:
    """Bytes that one layer keeps from F to B, and seconds of its F, B and W."""
    model = Model(4, hidden, hidden // 128, sequence, groups, more=more)
    job, split = model.job(2, 2), without_ends(4, 3)
    middle = stage_bytes(job, split)[1].sets, stage_times(job, split, GPU)[1]
    return middle[0].bytes_f_to_b / 2, sum(middle[1]) / 2


def _k(data: dict[str, Any]) -> Iterator[Cell]:
    for hidden, values in data["rows"].items():
        for sequence, value in zip(data["sequences"], values):
            size, seconds = _layer(int(hidden), sequence, 0, _CHEAP)
            travel = size / GPU.to_host + size / GPU.to_device
            yield Cell(f"h={hidden}, s={sequence}", value, travel / seconds)


def _slowdown(data: dict[str, Any], policy: str) -> Iterator[Cell]:
    base = generate("1f1b", 8, 32)
    alone = simulate(base).makespan
    times: dict[float, float] = {}
    for hidden, values in data["rows"].items():
        for sequence, value in zip((4096, 8192, 16384, 32768), values):
            k = published_k(int(hidden), sequence)
            if k not in times:
                link = Link.of(8, Fraction(round(k * 100), 200), policy=policy)
                plan = offload_pass(base, link, "full")
                times[k] = float(100 * plan.stall / alone)
            row = f"h={hidden}, s={sequence} (k={k:.2f})"
            yield Cell(row, value, times[k], reason=_ALLOCATOR if value < 0 else "")


_GROUPS = (
    "the figure's k is for multi-head attention, and that of the models, with 8 key and value "
    "heads, is up to 17 % lower: above 1 the slowdown rises steeply with k"
)
_ALLOCATOR = (
    "the paper's baseline ran near the memory limit and was slowed by the allocator (its own "
    "explanation); an order without stalls cannot be faster than no offload"
)


def _gis(data: dict[str, Any]) -> Iterator[Cell]:
    for p in (4, 8, 16):
        for v in (2, 4):
            for name, g in (("gis", p), ("gis-h", p // 2)):
                run = simulate(generate(name, p, 4 * p, v))
                yield Cell(f"{name}, p={p}, v={v}: sets", g * (v - 1) + p, max(run.peak_sets))
                for f, b, w in ((1, 1, 1), (1, 1, Fraction(3, 2))):
                    run = simulate(generate(name, p, 4 * p, v, Costs.of(f, b, w)))
                    form = Fraction((p - 1) * (f + b) * 1) / v
                    form += Fraction(v - 1, v) * ((p - g) * f + max(0, p * b - g * (b + w)))
                    bubble = run.makespan - 4 * p * (f + b + w)
                    label = f"{name}, p={p}, v={v}, F,B,W={f},{b},{float(w):g}: bubble"
                    yield Cell(label, float(form), float(bubble))


def _selective(data: dict[str, Any]) -> Iterator[Cell]:
    p = v = 8
    base = generate("po", p, 4 * p, v)
    for n in (0, 1, 2, 4, 6, 8):
        plan = offload_pass(base, Link.of(p, "0.25"), str(n))
        sets = max(plan.peak_sets) if n else max(simulate(base).peak_sets)
        left = p * (v - n) * (v - n + 1) / (2 * v)
        yield Cell(f"p=8, v=8, {n} of 8 chunks: sets", left, sets)


def _linear(data: dict[str, Any]) -> Iterator[Cell]:
    none, *rest = _selective(data)
    assert isinstance(none.ours, int | float)
    for n, cell in zip((1, 2, 4, 6), rest):
        assert isinstance(cell.ours, int | float)
        less = cell.ours * 8 < none.ours * (8 - n)
        yield Cell(cell.row, "less than linear", "less than linear" if less else "not less")


def _constant(data: dict[str, Any]) -> Iterator[Cell]:
    layers = PAPER.data["models"]["5.8B"][0]
    for p in data["ranks"]:
        base = generate("po", p, 4 * p, layers // p)
        plan = offload_pass(base, Link.of(p, "0.3"), "full")
        yield Cell(f"5.8B, p={p}, v={layers // p}: layers", data["layers"], max(plan.peak_sets))


def _recompute(data: dict[str, Any], key: str, which: int) -> Iterator[Cell]:
    for hidden, values in data[key].items():
        for sequence, value in zip(data["sequences"], values):
            stock = _layer(int(hidden), sequence, 8, _PLAIN)[which]
            cheap = _layer(int(hidden), sequence, 8, _CHEAP)[which]
            ours = 100 * ((cheap / stock - 1) if which else (1 - cheap / stock))
            yield Cell(f"h={hidden}, s={sequence}", value, ours)


PAPER = Paper(
    "pipeoffload",
    (
        Table(
            "k", "k: a layer's way to the host and back over its F, B and W", "k", Kind.TIME, "",
            _k,
            ("A100, 15 GB/s one way at a time, multi-head attention, recompute of norms and GeLU",),
            plot=lines_by("s", "sequence length", "k"),
        ),
        Table(
            "fig1-right", "Slowdown of 1F1B with full offload, p=8, m=32", "fig1-right",
            Kind.GAIN, "%", partial(_slowdown, policy="single"),
            ("the printed k of each cell, half of it each way, every rank by itself; F = B = W",),
            above=_GROUPS, plot=lines_by("k", "k", "slowdown, %"),
        ),
        Table(
            "fig1-right-paired", "The same where two ranks share a switch, as theirs do",
            "fig1-right", Kind.GAIN, "%", partial(_slowdown, policy="paired"),
            ("the printed k of each cell, half of it each way, neighbours never in the same "
             "direction at once; F = B = W",),
            above=_GROUPS, plot=lines_by("k", "k", "slowdown, %"),
        ),
        Table(
            "gis", "GIS and GIS-H: peak and bubble", "gis", Kind.ORDER, "", _gis,
            ("four microbatches a rank; sets of a chunk, bubbles in units of a rank's F",),
        ),
        Table(
            "selective", "PO's peak when the n longest-lived of 8 chunks leave", "selective",
            Kind.ORDER, "", _selective, ("p=8, a quarter of a chunk's passes each way",),
            above="the formula leaves out the shift that keeps passes of chunks apart (three "
            "sets here), sets on their way, and the copy in use",
        ),
        Table(
            "selective-linear", "PO's peak falls faster than the number of chunks that stay",
            "selective", Kind.EXACT, "", _linear,
            ("p=8, a quarter of a chunk's passes each way",),
        ),
        Table(
            "fig10", "PO-F: layers on a device, one layer a stage", "fig10", Kind.ORDER, "",
            _constant, ("0.3 of a chunk's passes each way; 32 layers; "
             "sets at the peak, without the running pass",),
        ),
        *FIGURES,
        Table(
            "fig16-memory", "Recompute of norms, GeLU and dropout: less activation memory",
            "fig16", Kind.GAIN, "%", partial(_recompute, key="reduction", which=0),
            ("Megatron's local layers, 8 key and value heads, no dropout",),
        ),
        Table(
            "fig16-time", "Recompute of norms, GeLU and dropout: slowdown", "fig16", Kind.GAIN,
            "%", partial(_recompute, key="slowdown", which=1),
            ("Megatron's local layers, 8 key and value heads, no dropout",),
        ),
        gpu_table("pipeoffload-gpu"),
    ),
)  # fmt: skip
