"""Runs in every rank before training (``ScriptServer.run``'s ``prepare``): changes gradients at
given iterations, and notes what the optimizer holds after each, so that two runs can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any


def prepare(faults: list[dict[str, Any]], rank: int, folder: Path) -> None:
    """Hook Megatron.

    Args:
        faults: ``{"iteration", "rank", "factor"}``: multiply one gradient of that pipeline rank by
            a factor, or by "inf" or "nan"; with "kill", the rank is killed there instead.
        rank: of this process.
        folder: of the job; ``rankN.state`` gets a line an iteration.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.training import training

    finalize, train_step = training.finalize_model_grads, training.train_step
    log = (folder / f"rank{rank}.state").open("w", buffering=1)

    def with_faults(model: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        result = finalize(model, *args, **kwargs)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for fault in faults:
            if fault["iteration"] == get_args().curr_iteration and fault["rank"] == stage:
                if fault.get("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                for parameter in list(model[-1].parameters())[:2]:
                    with torch.no_grad():
                        parameter.main_grad.mul_(float(fault["factor"]))
        return result

    def noted(
        forward: Any, iterator: Any, model: Any, optimizer: Any, *args: Any, **kw: Any
    ) -> Any:
        result = train_step(forward, iterator, model, optimizer, *args, **kw)
        log.write(json.dumps(_state(optimizer)) + "\n")
        return result

    training.finalize_model_grads, training.train_step = with_faults, noted


def _state(optimizer: Any) -> list[str]:
    """Digests of main parameters, of optimizer state, and the loss scale."""
    parameters, states = hashlib.sha256(), hashlib.sha256()
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                parameters.update(_bytes(parameter))
                held = part.optimizer.state.get(parameter, {})
                for name in sorted(held):
                    value = held[name]
                    states.update(
                        _bytes(value) if hasattr(value, "numel") else repr(value).encode()
                    )
    scale = float(optimizer.get_loss_scale())
    return [parameters.hexdigest()[:16], states.hexdigest()[:16], scale.hex()]


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
