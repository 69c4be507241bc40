"""A ``ScriptServer`` job's prelude, run in every rank before training: changes gradients at given
iterations, makes passes take a given time, and notes after each iteration the time and what the
optimizer holds, so that two runs can be compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def prepare(value: dict[str, Any], rank: int, folder: Path) -> None:
    """Hook Megatron and megatron_ext.

    Args:
        value: ``faults``: a list of ``{"iteration", "rank", "factor"}``, to multiply gradients of
            that pipeline rank by a factor, "inf" or "nan"; in place of the factor ``"kill"``: true,
            to kill the rank there, or ``"signal"``, to send it one. ``pace``: least milliseconds
            of F, B and W of a chunk.
        rank: of this process.
        folder: of the job; ``rankN.state`` gets a line an iteration: digests of main parameters
            and optimizer state, loss scale, wall clock.
    """
    from megatron.training import training

    finalize, train_step = training.finalize_model_grads, training.train_step
    log = (folder / f"rank{rank}.state").open("w", buffering=1)

    # Under their own signatures, by which megatron_ext knows what it hooks.
    @functools.wraps(finalize)
    def with_faults(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = finalize(model, *args, **kwargs)
        for fault in value.get("faults", ()):
            _inject(fault, model)
        return result

    @functools.wraps(train_step)
    def noted(
        forward_step_func: Any, iterator: Any, model: Any, optimizer: Any, *rest: Any, **more: Any
    ) -> Any:
        result = train_step(forward_step_func, iterator, model, optimizer, *rest, **more)
        # The time first: digests are work of this probe.
        log.write(json.dumps([time.time(), *_state(optimizer)]) + "\n")
        return result

    training.finalize_model_grads, training.train_step = with_faults, noted
    if value.get("pace"):
        _pace(value["pace"])


def _inject(fault: dict[str, Any], model: Any) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.training import get_args

    stage = parallel_state.get_pipeline_model_parallel_rank()
    if fault["iteration"] != get_args().curr_iteration or fault["rank"] != stage:
        return
    if fault.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "signal" in fault:
        os.kill(os.getpid(), fault["signal"])
        return
    for parameter in list(model[-1].parameters())[:2]:
        with torch.no_grad():
            parameter.main_grad.mul_(float(fault["factor"]))


def _pace(milliseconds: list[float]) -> None:
    from megatron_ext.integration.runner import MegatronRunner

    def slow(original: Callable[..., Any], least: Callable[..., float]) -> Callable[..., Any]:
        def paced(*args: Any, **kwargs: Any) -> Any:
            until = time.perf_counter() + least(*args, **kwargs) / 1e3
            result = original(*args, **kwargs)
            time.sleep(max(until - time.perf_counter(), 0.0))
            return result

        return paced

    f, b, w = milliseconds
    MegatronRunner.forward = slow(MegatronRunner.forward, lambda *_: f)  # type: ignore[method-assign]
    MegatronRunner.backward = slow(  # type: ignore[method-assign]
        MegatronRunner.backward, lambda _, chunk, microbatch, grad, split: b if split else b + w
    )
    MegatronRunner.weight = slow(MegatronRunner.weight, lambda *_: w)  # type: ignore[method-assign]


def _state(optimizer: Any) -> list[str]:
    parameters, states = hashlib.sha256(), hashlib.sha256()
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                parameters.update(_bytes(parameter))
                held = part.optimizer.state.get(parameter, {})
                for name in sorted(held):
                    value = held[name]
                    known = _bytes(value) if hasattr(value, "numel") else repr(value).encode()
                    states.update(known)
    scale = float(optimizer.get_loss_scale())
    return [parameters.hexdigest()[:16], states.hexdigest()[:16], scale.hex()]


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
