"""Output of ``simulate --moe``: JSON, a table of plans, the picture of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..moe.plan import STOCK, LayerPlan, copied_bytes
from ..plan import moe_job
from ..plan.flags import notes_on
from ..plan.gpu import Gpu
from ..plan.mlp import routed_tokens
from ..plan.model import Job
from ..plan.moe_layer import Costs, LayerRun, Stream, StreamRun, run_layer
from ..plan.moe_times import ASSUMPTIONS, exchange_rate, job_footprint
from ..view import streams


class Layer(NamedTuple):
    """What is simulated: costs, and where a model is given its job on a device."""

    costs: Costs
    plans: list[LayerPlan]
    unit: str
    one_queue: bool
    job: Job | None = None
    gpu: Gpu | None = None
    ignored: Sequence[str] = ()

    def runs(self, split: bool) -> tuple[list[LayerRun], LayerRun]:
        """Of Megatron's own layer and of all plans; and the fastest of the plans."""
        options = {"split": split, "one_queue": self.one_queue}
        runs = {p: run_layer(p, self.costs, **options) for p in [STOCK, *self.plans]}
        return list(runs.values()), min((runs[p] for p in self.plans), key=lambda run: run.time)


RENDERERS: dict[str, Callable[[streams.Streams], str]] = {
    ".svg": streams.render_svg,
    ".json": lambda picture: json.dumps(streams.to_trace(picture)) + "\n",
    ".txt": streams.render_text,
}


def drawn(picture: streams.Streams, width: int | None) -> str:
    """The picture as text, for a terminal of so many columns."""
    return streams.render_text(picture, width or 0)


def report_json(layer: Layer, runs: Sequence[LayerRun], chosen: LayerRun) -> dict[str, Any]:
    """Every plan's times and bytes, and the chosen one's operations.

    Args:
        runs: of the table, Megatron's own layer among them. chosen: is drawn.
    """
    stock = next(run for run in runs if run.plan == STOCK)
    data: dict[str, Any] = {"unit": layer.unit, "one_queue": layer.one_queue, "layer": None}
    if layer.job is not None and layer.gpu is not None:
        job, shape = layer.job, moe_job.shape_of(layer.job)
        data["layer"] = {
            "gpu": layer.gpu.name,
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.ffn,
            "experts": job.num_experts,
            "ranks": job.expert_model_parallel_size,
            "rows": routed_tokens(job),
            "exchange_bandwidth": exchange_rate(job, layer.gpu),
        }
    data["plans"] = [_plan_json(layer, run, stock) for run in runs]
    data["chosen"] = _plan_json(layer, chosen, stock)
    data["operations"] = [
        {"pass": name, "stream": stream.value, "name": str(one), "start": start, "end": end}
        for name in ("forward", "backward")
        for stream in Stream
        for one, start, end in getattr(chosen, name).on(stream)
    ]
    data["ignored"] = list(layer.ignored)
    data["assumptions"] = [*(layer.job.assumptions if layer.job else ()), *ASSUMPTIONS]
    data["assumptions"] += notes_on(layer.ignored)
    return data


def _plan_json(layer: Layer, run: LayerRun, stock: LayerRun) -> dict[str, Any]:
    plan = run.plan
    data: dict[str, Any] = {
        "chunks": plan.chunks,
        "strategy": plan.strategy.value,
        "lookahead": min(plan.lookahead, plan.chunks),
        "forward": run.forward.makespan,
        "backward": run.backward.makespan,
        "weights": run.weights,
        "time": run.time,
        "speedup": stock.time / run.time if run.time else 1.0,
    }
    if layer.job is not None:
        shape, rows = moe_job.shape_of(layer.job), routed_tokens(layer.job)
        needs = job_footprint(layer.job, plan)
        data["kept_bytes"] = needs.saved_bytes
        data["buffer_bytes"] = needs.ring_bytes + needs.temporary_bytes
        data["host_bytes"] = round(copied_bytes(shape, rows, plan.strategy))
    return data


def report_text(data: dict[str, Any]) -> str:
    """``report_json`` as a table, with an empty line behind it."""
    unit, about = data["unit"], data["layer"]
    lines = []
    if about is not None:
        lines.append(
            f"MoE layer on {about['gpu']}: hidden size {about['hidden_size']}, expert FFN size "
            f"{about['ffn_hidden_size']}, {about['experts']} experts on {about['ranks']} ranks, "
            f"{about['rows']} rows a call, all-to-alls at "
            f"{about['exchange_bandwidth'] / 1e9:.1f} GB/s"
        )
    if data["one_queue"]:
        lines.append("one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)")
    heads = ["", "chunks", "strategy", "forward", "backward", "W", f"all {unit}".strip()]
    heads += ["speed-up", *(["kept MiB", "buffers MiB", "host MiB"] if about else [])]
    chosen, rows = data["chosen"], [heads]
    for one in data["plans"]:
        times = (one[key] for key in ("forward", "backward", "weights", "time"))
        mark = "*" if one == chosen else ""
        row = [mark, str(one["chunks"]), one["strategy"], *(f"{time:.3f}" for time in times)]
        row.append(f"{one['speedup']:.2f}")
        if about:
            sizes = (one[key] for key in ("kept_bytes", "buffer_bytes", "host_bytes"))
            row += [f"{size / 2**20:.1f}" for size in sizes]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines += ["  ".join(cell.rjust(n) for cell, n in zip(row, widths)) for row in rows]
    lines.append("* drawn; 1 chunk and none is Megatron's own layer")
    return "\n".join([*lines, ""])


def picture_of(layer: Layer, run: LayerRun) -> streams.Streams:
    """The streams of a run, forward above backward."""
    title = f"MoE layer, {run.plan}"
    passes = [
        _drawn(label, one) for label, one in (("forward", run.forward), ("backward", run.backward))
    ]
    if run.weights:
        passes[1] = passes[1]._replace(label="backward without W")
    return streams.Streams(title, tuple(passes), layer.unit)


def _drawn(label: str, run: StreamRun) -> streams.Pass:
    lanes = [
        streams.Lane(
            stream.value,
            tuple(streams.Span(str(one), one.kind.value, *times) for one, *times in run.on(stream)),
        )
        for stream in Stream
    ]
    used = [lane for lane in lanes if lane.spans or lane.name in ("compute", "network")]
    return streams.Pass(label, tuple(used), run.makespan)
