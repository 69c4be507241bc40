"""What do schedules gain and hold, and what does offload cost?

The fullest rank of an eight-rank pipeline runs its whole list with real layers. A message from a
peer is there when the simulated peer would have sent it, so a rank that falls behind is seen. The
pipeline's step is simulated from the passes; rows with offload take those of the same schedule
without, since a device that waits for copies has a higher clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from benchmarks.gpu import model as gpu
from benchmarks.gpu.transfers import rates_of
from megatron_ext.offload.rates import Rates
from megatron_ext.schedule import Costs, Link, Op, Schedule, Simulation

from megatron_ext.schedule import generate, offload_pass, simulate  # isort: skip

# (schedule, chunks, recompute)
WHOLE = (
    ("1f1b", 1, ""), ("1f1b", 1, "selective"), ("1f1b", 1, "full"), ("interleaved", 2, ""),
    ("v-min", 2, ""), ("v-half", 2, ""), ("v-zb", 2, ""), ("po", 4, ""),
)  # fmt: skip
FEW = tuple(WHOLE[i] for i in (0, 4, 5, 7))
OFFLOADS = ("full", "half")  # of po's sets
CASES = (
    (gpu.Size(4096, 4096, 4, 8, 16), WHOLE, OFFLOADS),
    (gpu.Size(8192, 4096, 4, 8, 16), FEW, OFFLOADS[:1]),
)
TINY = ((gpu.Size(64, 32, 4, 2, 4), WHOLE, OFFLOADS),)


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Rows by size and schedule; what one cannot do is a row that says so."""
    group, rates = gpu.start(), rates_of(tiny)
    result: dict[str, Any] = {"gb_per_s": {k: v / 1e9 for k, v in vars(rates).items()}, "rows": []}
    gpu.warm(0 if tiny else gpu.WARM_SECONDS)

    def save(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        keep(result)

    for size, names, offloads in TINY if tiny else CASES:
        rows = _Rows(size, group, 2 if tiny else gpu.ROUNDS, save)
        rows.whole(names)
        for which in offloads:
            row = {"size": str(size), "schedule": f"po, offload {which}"}
            if "failed" in gpu.tried(row, rows.offloaded, rates, which):
                save(row)
        del rows
        gpu.release()
    return result


class _Rows:
    """All rows of one size, whose ranks share their layers."""

    def __init__(self, size: gpu.Size, group: Any, rounds: int, save: Any) -> None:
        self._size, self._group, self._rounds, self._save = size, group, rounds, save
        self._layers = gpu.layers_of(size, range(size.layers))
        self._bytes = set_bytes(gpu.Chunk(gpu.config(size), self._layers), size)
        self._base, self._po = 0.0, dict[Any, float]()

    def _rank(self, plan: Schedule, recompute: str = "", at: int | None = None) -> gpu.Rank:
        peaks = simulate(plan).peak_sets
        at = peaks.index(max(peaks)) if at is None else at
        return gpu.Rank(self._size, plan, at, self._group, None, self._layers, recompute)

    def whole(self, names: Any) -> None:
        """Schedules without offload, in turn."""
        ranks = {}
        for name, chunks, recompute in names:
            plan = generate(name, self._size.pp, self._size.microbatches, chunks)
            key = f"{name}, recompute {recompute}" if recompute else name
            ranks[key] = self._rank(plan, recompute)
        self._measure(ranks, {key: _first_passes(rank) for key, rank in ranks.items()})

    def offloaded(self, rates: Rates, which: str) -> dict[str, Any]:
        """One offload of ``po``, in turn with the same rank's list without."""
        pp, plan = self._size.pp, generate("po", self._size.pp, self._size.microbatches, 4)
        ways = rates.to_host_together, rates.to_device_together
        # Of a set, over its chunk's F+B+W.
        times = [Fraction(self._bytes / way / sum(self._po.values())) for way in ways]
        link = Link.of(pp, *(t.limit_denominator(10**4) for t in times))
        rank = self._rank(offload_pass(plan, link, which).schedule)
        base = self._rank(plan, at=rank.rank)
        try:
            ranks = {f"po on rank {rank.rank}": base, f"po, offload {which}": rank}
            for one in ranks.values():
                _first_passes(one)
            self._measure(ranks, dict.fromkeys(ranks, self._po))
        finally:
            rank.close()
        return {}

    def _measure(self, ranks: Mapping[str, gpu.Rank], passes: Mapping[str, Any]) -> None:
        """Rounds of these ranks, their messages as late as simulated from these passes."""
        for key, rank in ranks.items():
            rank.channel.arrivals = arrivals(simulated(rank.plan, passes[key]), rank.rank)
        ways = {key: lambda rank=rank: _timed(rank) for key, rank in ranks.items()}
        for key, (every, clock) in gpu.alternate(ways, self._rounds).items():
            rank = ranks[key]
            rounds = [one["passes"] for one in every]
            own = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            run = simulated(rank.plan, passes[key] if rank.plan.has_offload else own)
            self._base = float(run.makespan) if key == "1f1b" else self._base
            self._po = own if key == "po" else self._po
            planned, chunks = rank.report.peak_sets[rank.rank], rank.plan.chunks
            row = {
                "size": str(self._size), "schedule": key, "rank": rank.rank,
                "passes_ms": {f"{op.value}{c}": round(1e3 * t, 3) for (c, op), t in own.items()},
                "work_ms": gpu.spread((1e3 * one["work"] for one in every), 2),
                "step_ms": gpu.spread((1e3 * one["took"] for one in every), 2),
                "simulated_rank_ms": round(run.end[rank.rank][-1] / run.scale / 1e6, 2),
                "pipeline_ms": round(float(run.makespan) / 1e6, 2),
                "speed": round(self._base / float(run.makespan), 3),
                "sets": rank.recorder.peak_sets, "planned_sets": planned,
                "moved_sets": sum(a.op is Op.OFFLOAD for a in rank.plan.ranks[rank.rank]),
                "planned_bytes": self._bytes / chunks * planned,
                "peak_bytes": max(one["peak"] for one in every), **clock,
            }  # fmt: skip
            print(row, flush=True)
            self._save(row)


def _first_passes(rank: gpu.Rank) -> dict[Any, float]:
    """Two steps without late messages: the first measures what is offloaded."""
    rank.channel.arrivals = {}
    rank.step()
    rank.step()
    return rank.passes()


def _timed(rank: gpu.Rank) -> dict[str, Any]:
    if gpu.CUDA:
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    took = rank.step()["took"]
    peak = torch.cuda.max_memory_allocated() - resting if gpu.CUDA else 0
    work = sum(seconds for _, seconds in rank.recorder.durations())
    return {"took": took, "peak": peak, "work": work, "passes": rank.passes()}


def set_bytes(chunk: gpu.Chunk, size: gpu.Size) -> int:
    """Bytes that autograd keeps of a microbatch, parameters left out."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in chunk.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk(gpu.batch(size, 0).requires_grad_(True))
    return sum(kept.values())


def simulated(plan: Schedule, passes: Mapping[tuple[int, Op], float]) -> Simulation:
    """The pipeline whose stages all take these passes; in nanoseconds, without messages."""
    rows = []
    for chunk in range(plan.chunks):
        whole = passes.get((chunk, Op.BW))
        halves = [whole / 2] * 2 if whole else [passes[chunk, Op.B], passes[chunk, Op.W]]
        rows.append([round(1e9 * seconds) or 1 for seconds in (passes[chunk, Op.F], *halves)])
    placement = plan.placement
    stages = [rows[placement.chunk_of(stage)] for stage in range(placement.num_stages)]
    return simulate(plan, Costs.of(stages=stages))


def arrivals(run: Simulation, rank: int) -> dict[int, float]:
    """Seconds at which a rank's messages are there, by the executor's tags."""
    plan, found = run.schedule, {}
    for row, ends in zip(plan.ranks, run.end, strict=True):
        for action, end in zip(row, ends, strict=True):
            to = action.stage + (1 if action.op is Op.F else -1)
            if action.op is Op.W or not 0 <= to < plan.placement.num_stages:
                continue
            if plan.placement.rank_of(to) == rank:
                tag = (to * len(plan.units) + action.microbatch) * 2 + (action.op is not Op.F)
                found[tag] = end / run.scale / 1e9
    return found


if __name__ == "__main__":
    gpu.main(run)
