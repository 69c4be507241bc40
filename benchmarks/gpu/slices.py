"""What do slices of a sequence cost, against whole sequences with the kernel that torch chooses?

F, B and W of one layer, slice by slice, as training runs them with local attention: keys and values
are carried, two calls of torch's kernel are merged. Nothing hides the host's launches. From the
passes, steps of an eight-rank pipeline are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import model as gpu
from megatron_ext.integration import split_local
from megatron_ext.integration.features.slices.carry import Carry, Held
from megatron_ext.runtime.merged_attention import PLAIN, attend
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Action, Costs, Op, generate, simulate

HIDDEN = 4096
TOTALS = {8192: (2, 4, 8, 16), 32768: (2, 4, 8, 16), 131072: (4, 16)}
TINY = {64: (2, 4)}
PP, MICROBATCHES = 8, (4, 8)


class Sliced(gpu.Sdpa):
    """Causal attention of a slice to all before it.

    Attributes:
        tokens: of a microbatch.
        span: first token of the slice, and the first one behind it.
        held: keys and values so far; None before a microbatch.
    """

    tokens, span, held = 0, (0, 0), None

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """(slice, batch, heads, width) each -> (slice, batch, heads * width)."""
        if self.held is None:
            self.held = Held(key, value, self.tokens)
        key, value = Carry.apply(key, value, self.held, *self.span)
        out = attend(query, key, value, query.shape[-1] ** -0.5, None if gpu.CUDA else PLAIN)
        if out is None:
            raise RuntimeError("torch chooses a kernel here that cannot be merged")
        return out


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Rows by tokens and slices; the first of each is the whole with torch's choice."""
    gpu.start()
    gpu.warm(0 if tiny else gpu.WARM_SECONDS)
    result: dict[str, Any] = {"rows": []}
    for tokens, counts in (TINY if tiny else TOTALS).items():
        size = gpu.Size(64 if tiny else HIDDEN, tokens)
        result["rows"] += _rows(size, counts, 2 if tiny else gpu.ROUNDS)
        keep(result)
        gpu.release()
    return result


def _rows(size: gpu.Size, counts: Sequence[int], rounds: int) -> Any:
    """Rows of one number of tokens."""
    (layer,), rows = gpu.layers_of(size, [0]), list[dict[str, Any]]()
    slices = {"whole": (1, False)} | {f"{n} slices": (n, False) for n in counts}
    slices |= {f"{n} slices, W joined": (n, True) for n in counts[1::2]}
    ways = {name: partial(once, layer, size, *way) for name, way in slices.items()}
    gradients = {}
    for name, way in ways.items():
        way()
        gradients[name] = [p.main_grad.clone() for p in layer.parameters()]
    for name, (every, clock) in gpu.alternate(ways, rounds).items():
        pairs = zip(gradients[name], gradients["whole"], strict=True)
        ms = gpu.spread((sum(map(sum, one.values())) for one in every), 3)
        rows.append({
            "size": str(size), "slices": name, "ms": ms,
            "passes": {op: [gpu.spread(t)[0] for t in zip(*(one[op] for one in every))]
                       for op in "FBW"},
            "over_whole": round(ms[0] / rows[0]["ms"][0], 3) if rows else 1.0,
            "difference": max(float((a - b).norm() / b.norm()) for a, b in pairs), **clock,
        })  # fmt: skip
        print(rows[-1], flush=True)
    speeds(rows, list(slices.values()))
    return rows


def once(layer: Any, size: gpu.Size, count: int, joined: bool) -> dict[str, list[float]]:
    """Milliseconds of one microbatch: F of all slices, then B and W of each, the last one first."""
    store = WeightGradStore()
    core: Any = gpu.Sdpa() if count == 1 else Sliced()
    layer.module.self_attention.core_attention = core
    layer.zero_grad_buffer()
    length, recorder = size.seq // count, Recorder(True, gpu.DEVICE)
    core.tokens = size.seq
    x = gpu.batch(size, 1)
    inputs, outs = [], []
    gpu.synchronize()
    with gpu.hooked(split_local.hooks(store)):
        for n in range(count):
            core.span = n * length, (n + 1) * length
            inputs.append(x[slice(*core.span)].detach().requires_grad_(True))
            with recorder.measure(Action(Op.F, 0, n)):
                outs.append(layer(inputs[n], attention_mask=None)[0])
        for n in reversed(range(count)):
            grad = x[n * length : (n + 1) * length]
            with recorder.measure(Action(Op.B, 0, n)), store.collect((0, n)):
                torch.autograd.backward(outs.pop(), grad)
            if not joined:
                with recorder.measure(Action(Op.W, 0, n)), torch.no_grad():
                    store.run((0, n))
        if joined:
            store.join([(0, n) for n in range(count)])
            with recorder.measure(Action(Op.W, 0, 0)), torch.no_grad():
                store.run((0, 0))
    found: dict[str, list[float]] = {op: [0.0] * count for op in "FBW"}
    for action, seconds in recorder.durations():
        found[action.op.value][action.microbatch] = 1e3 * seconds
    return found


def speeds(rows: Sequence[dict[str, Any]], slices: Sequence[tuple[int, bool]]) -> None:
    """Add the speed of ``v-zb`` on ranks with half such a layer in each of two chunks, against 1F1B
    of whole microbatches, and its peak in whole microbatches."""
    for m in MICROBATCHES:
        base = simulate(generate("1f1b", PP, m, costs=_costs(rows[0], 1, False, m))).makespan
        for row, (count, joined) in zip(rows, slices, strict=True):
            costs = _costs(row, count, joined, m)
            plan = generate("v-zb", PP, m, 2, costs, slices=count, effort=0, joined=joined)
            found = simulate(plan)
            row[f"speed_{m}"] = round(float(base / found.makespan), 2)
            row[f"peak_{m}"] = round(float(max(found.peak_activation)), 2)


def _costs(row: dict[str, Any], count: int, joined: bool, m: int) -> Costs:
    times = [[Fraction(t).limit_denominator(10**6) for t in row["passes"][op]] for op in "FBW"]
    if joined:  # one W, of which each slice has a part
        times[2] = [sum(times[2]) / count] * count
    costs = Costs.of(*map(sum, times))
    if count == 1:
        return costs
    shares = zip(*([t / sum(each) for t in each] for each in times), strict=True)
    return costs.with_units([(*one, Fraction(1, count)) for one in shares] * m)


if __name__ == "__main__":
    gpu.main(run)
