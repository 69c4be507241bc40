#!/usr/bin/env python3
"""A sharded vocabulary beside the best layer layout without it, simulated.

    python3 -m benchmarks.vocabulary [--sizes 8,16] [--output DIR] [--date YYYY-MM-DD]

Three models with the planner's times and bytes on H100, four microbatches a rank. Without: layers
in equal numbers, and the fastest of the layouts of ``plan/balance.py`` that even out time or bytes.
With ``--pp-vocab-parallel``: layers in equal numbers. Writes
results/DATE-vocabulary.json and vocabulary.md.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import page as pages
from benchmarks.page import Row
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import states_of
from megatron_ext.plan.model import Job
from megatron_ext.plan.point import Point, evaluate
from megatron_ext.plan.space import SearchSpace
from megatron_ext.schedule import GENERATORS, ScheduleSpec, select
from megatron_ext.schedule.effects import peak_sets

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


def row_of(model: str, pp: int, name: str) -> Row:
    """One row: milliseconds, GiB of the fullest rank and rank 0's parameters over the mean, with
    even layers, the best layout, and a sharded vocabulary."""
    placement = ScheduleSpec(name, pp, 4 * pp).placement
    whole, sharded = (job(model, pp, sharded=each) for each in (False, True))
    space = SearchSpace(whole, gpu_of(GPU), pp)
    even = even_split(whole.num_layers, placement.num_stages)
    assert even is not None, (model, name)
    unit = select(ScheduleSpec(name, pp, 2 * pp)).schedule

    def point(each: Job, split: Any) -> Point:
        work = space.workload(each, 4 * pp, split)
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
    kinds = {"even": points[even.counts], "best": best, "sharded": point(sharded, even)}
    return {
        "model": model,
        "pp": pp,
        "schedule": name,
        "chunks": placement.chunks,
        "ms": {kind: float(one.makespan_us) / 1e3 for kind, one in kinds.items()},
        "gib": {kind: one.worst.total / 2**30 for kind, one in kinds.items()},
        "parameters": {kind: rank_0(kinds[kind]) for kind in ("even", "sharded")},
    }


def measure(sizes: str) -> Row:
    """All rows; progress on the terminal."""
    rows = []
    for model in MODELS:
        for pp in map(int, sizes.split(",")):
            for name in SCHEDULES:
                rows.append(row_of(model, pp, name))
                print(rows[-1], flush=True)
    return {"rows": rows}


def body(data: Row) -> list[Any]:
    """The page."""
    rows = data["rows"]
    gains = [1 - row["ms"]["sharded"] / row["ms"]["best"] for row in rows]

    def where(what: str, than: str) -> str:
        """In how many rows sharded takes less than another kind, and in which it does not."""
        kept = [row for row in rows if row[what]["sharded"] >= row[what][than]]
        names = [f"{r['schedule']} at p={r['pp']} ({r['model'].split(',')[0]})" for r in kept]
        by = f", by {min(gains):.1%} to {max(gains):.1%}" if what == "ms" else ""
        word = "faster" if what == "ms" else "fewer"
        less = f"in {len(rows) - len(kept)} of {len(rows)} rows{by}"
        return f"{less}; not {word}: {', '.join(names) or 'none'}"

    def over(than: str) -> Any:
        return lambda row: f"{row['ms']['sharded'] / row['ms'][than] - 1:+.1%}"

    def schedule(row: Row) -> str:
        name: str = row["schedule"]
        return name + f" ({row['chunks']})" * GENERATORS[name].any_chunks

    columns: pages.Columns = {
        "model": "{model}",
        "p": "{pp}",
        "schedule": schedule,
        **{f"{kind}, ms": f"{{ms[{kind}]:.0f}}" for kind in ("even", "best", "sharded")},
        "over even": over("even"),
        "over best": over("best"),
        **{f"{kind}, GiB": f"{{gib[{kind}]:.1f}}" for kind in ("even", "best", "sharded")},
        "rank 0's parameters over the mean, even": "{parameters[even]:.2f}",
        "sharded": "{parameters[sharded]:.2f}",
    }
    return [
        "The paper (arXiv 2411.05288) measured 5 to 51 % more throughput for 1F1B, and less "
        "memory. *even*: equally many layers on all stages. *best*: the fastest of that and the "
        "layouts that even out the ranks' time or bytes by fewer layers on the heavy ranks. "
        "*sharded*: `--pp-vocab-parallel`, layers as in even. GiB of the fullest rank.",
        [
            f"- Faster than the best layout {where('ms', 'best')}.",
            f"- Fewer bytes than with even layers {where('gib', 'even')}.",
            f"- Fewer bytes than the best layout {where('gib', 'best')}. Every rank keeps a "
            "microbatch's activations and up to four microbatches' probabilities more than "
            "without.",
        ],
        pages.table(columns, rows),
    ]


BENCHMARK = pages.Benchmark(
    "vocabulary",
    __doc__,
    "A sharded vocabulary",
    lambda data: (
        "**simulated, no measurement**, times and bytes are the planner's for H100, m = 4p, "
        "microbatches of one sample, orders made for these times"
    ),
    body,
    lambda args: measure(args.sizes),
    {"sizes": ("8,16", "pipeline ranks")},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
