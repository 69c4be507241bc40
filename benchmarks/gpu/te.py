"""What does Transformer Engine's split into B and W cost, and its kernel for slices?

One layer as Megatron builds it with ``--transformer-impl transformer_engine``: F and BW of stock
against F, B and W through our split, with equal gradients; attention in slices with
``causal_bottom_right``; FP8 by blocks; grouped experts.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import torch

WHY = "" if torch.cuda.is_available() else "there is no CUDA device"
try:
    import transformer_engine.pytorch  # noqa: F401  (after torch, whose libraries it needs)
except Exception as error:
    WHY = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # nor does Megatron try

from benchmarks.gpu import model as gpu
from benchmarks.gpu.moe import SHAPES, rows_of
from megatron_ext.integration.split_local import hooks as split_hooks
from megatron_ext.integration.split_te import attach
from megatron_ext.runtime.trace import Recorder
from megatron_ext.runtime.wgrad import WeightGradStore
from megatron_ext.schedule import Action, Op

# (model, hidden, feed-forward, tokens)
LAYERS = (("Llama 70B", 8192, 28672, 4096), ("Llama 8B", 4096, 14336, 8192))
GROUPS, SLICES = 8, (2, 4, 8)


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Rows by layer; why not, where Transformer Engine does not load."""
    if WHY:
        return {"skipped": WHY}
    gpu.start()
    gpu.warm(gpu.WARM_SECONDS)
    result: dict[str, Any] = {"rows": [], "slices": [], "experts": []}
    for name, hidden, ffn, tokens in LAYERS:
        size = gpu.Size(hidden, tokens)
        for precision in ("bf16", "fp8 blockwise")[: 1 + (name == "Llama 8B")]:
            row = {"layer": name, "size": str(size), "precision": precision}
            result["rows"].append(gpu.tried(row, _layer, size, ffn, precision))
            keep(result)
    for tokens in (8192, 32768):
        result["slices"] += _attention(gpu.Size(4096, tokens))
        keep(result)
    row = {"layer": SHAPES[0].name}
    found = gpu.tried(row, lambda: {"rows": rows_of(SHAPES[0], tiny, te=True)})
    result["experts"] = found.get("rows", [found])
    return result


def _built(size: gpu.Size, ffn: int, **others: Any) -> tuple[Any, Any]:
    """A layer's configuration, and the layer in Megatron's buffers."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    config = gpu.config(
        size, ffn_hidden_size=ffn, num_query_groups=GROUPS, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        gradient_accumulation_fusion=True, **others,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    layer = gpu.initialized(gpu.build_module(spec, config=config, layer_number=1), 0)
    return config, gpu.buffered(config, layer)


def _layer(size: gpu.Size, ffn: int, precision: str) -> dict[str, Any]:
    """F and BW of stock, F, B and W of ours, in turn; whether gradients are equal."""
    from megatron.core.fp8_utils import get_fp8_context

    fp8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"} if precision != "bf16" else {}
    config, layer = _built(size, ffn, **fp8)
    x, store = gpu.batch(size, 1), WeightGradStore()

    def once(split: bool) -> dict[str, float]:
        recorder = Recorder(True, gpu.DEVICE)
        layer.zero_grad_buffer()
        attached = attach(layer, store) if split else []
        with gpu.hooked(split_hooks(store)):
            with recorder.measure(Action(Op.F, 0, 0)), get_fp8_context(config):
                out = layer(x.detach().requires_grad_(True), attention_mask=None)[0]
            collecting = store.collect((0, 0)) if split else contextlib.nullcontext()
            with recorder.measure(Action(Op.B if split else Op.BW, 0, 0)), collecting:
                out.backward(x)
            if split:
                with recorder.measure(Action(Op.W, 0, 0)), torch.no_grad():
                    store.run((0, 0))
        for one in attached:
            one.detach(store)
        return {action.op.value: 1e3 * seconds for action, seconds in recorder.durations()}

    ways = {"stock": lambda: once(False), "ours": lambda: once(True)}
    gradients = []
    for way in ways.values():
        way()
        way()
        gradients.append([p.main_grad.clone() for p in layer.parameters()])
    row: dict[str, Any] = {}
    for name, (every, clock) in gpu.alternate(ways, gpu.ROUNDS).items():
        row |= clock
        row |= {f"{name}_{op}": gpu.spread((one[op] for one in every), 3) for op in every[0]}
    pairs = [*zip(*gradients, strict=True)]
    row["difference"] = max(float((b - a).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs)
    return row | {"bit_equal": all(torch.equal(a, b) for a, b in pairs)}


def _attention(size: gpu.Size) -> list[dict[str, Any]]:
    """Forward and backward of core attention alone, whole and in slices."""
    from megatron.core.transformer.enums import AttnMaskType

    core = _built(size, 128)[1].module.self_attention.core_attention
    q, k, v, grad = (
        torch.randn(size.seq, 1, n, gpu.HEAD, device=gpu.DEVICE).to(gpu.BF16)
        for n in (size.hidden // gpu.HEAD, GROUPS, GROUPS, size.hidden // gpu.HEAD)
    )

    def once(count: int) -> float:
        kind = AttnMaskType.causal_bottom_right if count > 1 else AttnMaskType.causal
        recorder, length = Recorder(True, gpu.DEVICE), size.seq // count
        with recorder.measure(Action(Op.F, 0, 0)):
            for end in range(length, size.seq + 1, length):
                own = slice(end - length, end)
                given = [t.detach().requires_grad_(True) for t in (q[own], k[:end], v[:end])]
                core(*given, None, attn_mask_type=kind).backward(grad[own].flatten(2))
        return 1e3 * sum(seconds for _, seconds in recorder.durations())

    ways, rows = {n: partial(once, n) for n in (1, *SLICES)}, list[dict[str, Any]]()
    gpu.alternate(ways, 2)
    for count, (times, clock) in gpu.alternate(ways, gpu.ROUNDS).items():
        ms = gpu.spread(times, 3)
        over = round(ms[0] / rows[0]["ms"][0], 3) if rows else 1.0
        rows.append({"size": str(size), "slices": count, "ms": ms, "over_whole": over, **clock})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    gpu.main(run)
