#!/usr/bin/env python3
"""A sharded vocabulary beside the best layer layout without it, simulated.

    python3 -m benchmarks.vocabulary [--sizes 8,16] [--output DIR] [--date YYYY-MM-DD]

Three models with the planner's times and bytes on H100, four microbatches a rank. Without: layers
in equal numbers, and the fastest of the layouts of ``plan/balance.py`` that even out time or bytes.
With ``--pp-vocab-parallel``: layers in equal numbers. Writes vocabulary.md.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import states_of
from megatron_ext.plan.model import Job
from megatron_ext.plan.point import Point, evaluate
from megatron_ext.plan.space import SearchSpace
from megatron_ext.schedule import GENERATORS, ScheduleSpec, select
from megatron_ext.schedule.effects import peak_sets

HERE = Path(__file__).resolve().parent
GPU = "H100"
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb")
_PLAIN = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--group-query-attention --bf16 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 "
    "--use-distributed-optimizer"
)
# The Gemma-like one has the sizes of Gemma 2 9B, with layers that 32 stages divide; its two
# matrices are one.
MODELS = {
    "Llama-3-8B, V=128256": "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--num-query-groups 8 --ffn-hidden-size 14336 --seq-length 8192 --vocab-size 128256 "
    "--untie-embeddings-and-output-weights",
    "Qwen3-32B, V=151936": "--num-layers 64 --hidden-size 5120 --num-attention-heads 64 "
    "--kv-channels 128 --num-query-groups 8 --ffn-hidden-size 25600 --seq-length 4096 "
    "--vocab-size 151936 --untie-embeddings-and-output-weights --tensor-model-parallel-size 4 "
    "--sequence-parallel",
    "Gemma-like 9B, V=256000": "--num-layers 32 --hidden-size 3584 --num-attention-heads 16 "
    "--kv-channels 256 --num-query-groups 8 --ffn-hidden-size 14336 --seq-length 4096 "
    "--vocab-size 256000",
}


@dataclass(frozen=True)
class Row:
    """One model, number of ranks and schedule: even layers, the best layout, and sharded.

    ``parameters`` are rank 0's parameter bytes over the ranks' mean, even and sharded.
    """

    model: str
    pp: int
    schedule: str
    even: Point
    best: Point
    sharded: Point
    parameters: tuple[float, float]


def job(model: str, pp: int, *, sharded: bool) -> Job:
    """On so many pipeline ranks, with four microbatches a rank."""
    line = f"{_PLAIN} {MODELS[model]} --pipeline-model-parallel-size {pp}"
    line += f" --global-batch-size {4 * pp}" + " --pp-vocab-parallel" * sharded
    tensor = 4 if "tensor-model" in line else 1
    return job_of(read(f"{line} --world-size {pp * tensor}".split())[0])


def rank_0(point: Point) -> float:
    """Parameter bytes of rank 0 over the mean."""
    own = [s.parameters for s in states_of(point.spec.placement, point.workload.stages)]
    return own[0] * len(own) / sum(own)


def compared(model: str, pp: int, name: str) -> Row:
    """One row."""
    placement = ScheduleSpec(name, pp, 4 * pp).placement
    whole, sharded = (job(model, pp, sharded=each) for each in (False, True))
    space = SearchSpace(whole, gpu_of(GPU), pp)
    even = even_split(whole.num_layers, placement.num_stages)
    assert even is not None, (model, name)
    unit = select(ScheduleSpec(name, pp, 2 * pp)).schedule

    def point(each: Job, split: object) -> Point:
        work = space.workload(each, 4 * pp, split)  # type: ignore[arg-type]
        barriers = int(each.vocab_parallel)
        spec = ScheduleSpec(name, pp, 4 * pp, placement.chunks, costs=work.costs, barriers=barriers)
        return evaluate(spec, work)

    layouts = [
        even,
        space.balanced_in_time(whole, placement),
        space.balanced_in_bytes(whole, unit, peak_sets(unit.ranks)),
    ]
    points = {split.counts: point(whole, split) for split in layouts if split is not None}
    best = min(points.values(), key=Point.key)
    first, last = points[even.counts], point(sharded, even)
    return Row(model, pp, name, first, best, last, (rank_0(first), rank_0(last)))


def rows(sizes: list[int]) -> Iterator[Row]:
    """All of them; progress on the terminal."""
    for model in MODELS:
        for pp in sizes:
            for name in SCHEDULES:
                row = compared(model, pp, name)
                print(row_text(row), flush=True)
                yield row


def row_text(row: Row) -> str:
    """Of the page's table."""
    points = row.even, row.best, row.sharded
    times = [float(p.makespan_us) / 1e3 for p in points]
    sizes = [p.worst.total / 2**30 for p in points]
    cells = [
        row.model,
        str(row.pp),
        row.schedule + f" ({row.sharded.spec.chunks})" * GENERATORS[row.schedule].any_chunks,
        *(f"{time:.0f}" for time in times),
        *(f"{times[2] / time - 1:+.1%}" for time in times[:2]),
        *(f"{size:.1f}" for size in sizes),
        *(f"{ratio:.2f}" for ratio in row.parameters),
    ]
    return "| " + " | ".join(cells) + " |"


def page(found: list[Row], date: str) -> str:
    """The Markdown page."""
    slower = [r for r in found if r.sharded.makespan_us >= r.best.makespan_us]
    larger = [r for r in found if r.sharded.worst.total >= r.even.worst.total]
    more = [r for r in found if r.sharded.worst.total >= r.best.worst.total]
    gains = [1 - float(r.sharded.makespan_us / r.best.makespan_us) for r in found]

    def named(some: list[Row]) -> str:
        each = (f"{r.schedule} at p={r.pp} ({r.model.split(',')[0]})" for r in some)
        return ": " + ", ".join(each) if some else ""

    return "\n".join(
        [
            "# A sharded vocabulary",
            "",
            f"{date}, Python {platform.python_version()}: `python3 -m benchmarks.vocabulary`. "
            "**Simulated, no measurement**: times and bytes are the planner's for H100, m = 4p, "
            "microbatches of one sample, orders made for these times. The paper (arXiv 2411.05288) "
            "measured 5 to 51 % more throughput for 1F1B, and less memory.",
            "",
            "*even*: equally many layers on all stages. *best*: the fastest of that and the "
            "layouts that even out the ranks' time or bytes by fewer layers on the heavy ranks. "
            "*sharded*: `--pp-vocab-parallel`, layers as in even. GiB of the fullest rank.",
            "",
            f"- Faster than the best layout in {len(found) - len(slower)} of {len(found)} rows, by "
            f"{min(gains):.1%} to {max(gains):.1%}; not faster{named(slower) or ': none'}.",
            f"- Fewer bytes than with even layers in {len(found) - len(larger)} of {len(found)} "
            f"rows; not fewer{named(larger) or ': none'}.",
            f"- Fewer bytes than the best layout in {len(found) - len(more)} of {len(found)} rows; "
            f"not fewer{named(more) or ': none'}. Every rank keeps a microbatch's activations "
            "and up to four microbatches' probabilities more than without.",
            "",
            "| model | p | schedule | even, ms | best, ms | sharded, ms | over even | over best | "
            "even, GiB | best, GiB | sharded, GiB | rank 0's parameters over the mean, even | "
            "sharded |",
            "|---|--:|---|" + "--:|" * 10,
            *map(row_text, found),
            "",
        ]
    )


def main() -> None:
    """Run and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="8,16", help="pipeline ranks")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    found = list(rows([int(size) for size in args.sizes.split(",")]))
    (args.output / "vocabulary.md").write_text(page(found, args.date))


if __name__ == "__main__":
    main()
