"""What ``plan``'s answer is compared with: the user's flags as they are, stock's interleaving."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._conflict import values_of
from ..plan.model import Job
from ..plan.point import Point, evaluate
from ..plan.search import Result
from ..plan.space import SearchSpace
from ..schedule import GENERATORS, ScheduleSpec
from ..view.table import columns
from .plan_input import VIRTUAL, tokens
from .plan_report import ROW_HEADS, point_cells, point_json

YOURS, STOCK = "yours", "stock"


@dataclass(frozen=True)
class Given:
    """The pipeline of the user's own command line.

    Attributes:
        schedule: that it runs.
        chunks: model chunks a rank.
    """

    schedule: str
    chunks: int

    @classmethod
    def of(cls, args: argparse.Namespace, job: Job) -> Given:
        """As ``--from-args`` has it; Megatron's 1F1B where it says nothing."""
        values = values_of(tokens(args.from_args))
        pp = job.pipeline_model_parallel_size
        chunks, layers = (str(values.get(name, "")) for name in VIRTUAL)
        count = 1
        if chunks.isdigit() and int(chunks):
            count = int(chunks)
        elif layers.isdigit() and int(layers):
            count = job.num_layers // (pp * int(layers)) or 1
        name = values.get("pp_schedule")
        if name in GENERATORS:
            return cls(name, count if count > 1 else GENERATORS[name].default_chunks)
        return cls("1f1b" if count == 1 else "interleaved", count)


def baselines(space: SearchSpace, result: Result, given: Given) -> dict[str, Any]:
    """``baselines``: the rows, as ``point_json``, with ``what`` (yours or stock's), ``fits`` and
    ``gain``: by which share of the user's own time a step is shorter. ``yours_impossible``: why
    there is no row of the user's own; null if there is one."""
    job = space.job
    plain = job.with_(cheap_recompute=False, vocab_parallel=False)
    own = _point(space, job, given.schedule, given.chunks)
    tuned = [
        point
        for size in space.micro_batch_sizes
        for chunks in sorted({*space.chunks, given.chunks} - {1})
        for point in (_point(space, plain.with_(micro_batch_size=size), "interleaved", chunks),)
        if isinstance(point, Point)
    ]
    best = min(tuned, key=lambda p: (not result.fits(p), *p.key()), default=None)
    rows = []
    for what, point in ((YOURS, own), (STOCK, best)):
        if isinstance(point, Point):
            row = {"what": what, **point_json(point), "fits": result.fits(point)}
            share = gain(row, point_json(own)) if isinstance(own, Point) else None
            rows.append({**row, "gain": share})
    return {"baselines": rows, "yours_impossible": own if isinstance(own, str) else None}


def gain(row: dict[str, Any], yours: dict[str, Any]) -> float:
    """By which share of ``yours`` a step is shorter."""
    return float(1 - row["step_ms"] / yours["step_ms"])


def _point(space: SearchSpace, job: Job, name: str, chunks: int) -> Point | str:
    """Without offload, on Megatron's own split; why there is none if it does not exist."""
    try:
        split, count = space.even(job, space.pp * chunks), job.microbatches()
        if split is None:
            # With virtual stages Megatron counts layers of the first and last rank in its own way.
            end = ", so Megatron does not start with them" if chunks == 1 else ""
            return (
                f"your flags do not divide {job.num_layers} layers over {space.pp * chunks} stages "
                f"({space.pp} ranks x {chunks}){end}"
            )
        if name == "interleaved" and count % space.pp:
            return f"{count} microbatches are no multiple of the {space.pp} ranks of interleaving"
        work = space.workload(job, count, split)
        return evaluate(ScheduleSpec(name, space.pp, count, chunks, work.costs), work)
    except ValueError as error:
        return str(error)


def front_text(data: dict[str, Any]) -> list[str]:
    """The points of the front with their gain, and what they are compared with."""
    rows = data["baselines"]
    yours = next((row for row in rows if row["what"] == YOURS), None)
    cells = [
        (*point_cells(point), "-" if yours is None else _percent(gain(point, yours)))
        for point in data["front"]
    ]
    return [*columns([(*ROW_HEADS, "gain"), *cells, *_cells(rows)]), *_legend(data)]


def beside_text(data: dict[str, Any]) -> list[str]:
    """The baselines alone."""
    rows = data["baselines"]
    return [*(columns([(*ROW_HEADS, "gain"), *_cells(rows)]) if rows else []), *_legend(data)]


def _cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    found = []
    for row in rows:
        name, *rest = point_cells(row)
        over = "" if row["fits"] else " (too large)"
        share = "-" if row["what"] == YOURS or row["gain"] is None else _percent(row["gain"])
        found.append((f"{row['what']}: {name}{over}", *rest, share))
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _legend(data: dict[str, Any]) -> list[str]:
    lines = []
    if data["baselines"]:
        lines = [
            "yours: your flags as they are; stock: the best interleaving of Megatron's own; gain: "
            "less time a step than yours"
        ]
    if data["yours_impossible"]:
        lines.append(f"yours has no row: {data['yours_impossible']}")
    return lines
