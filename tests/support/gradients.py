"""A ``ScriptServer`` job's prelude: every rank writes a digest of each gradient of each step."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch


def prepare(value: Any, rank: int, folder: str) -> None:
    """Digest all gradients after each reduction, and count the pairs that Megatron's plans ran."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common import model_chunk_schedule_plan as plans

    found: dict[str, Any] = {"pairs": 0, "gradients": []}
    plan = plans.TransformerModelChunkSchedulePlan
    run, reduced = plan.run, DistributedDataParallel.finish_grad_sync

    @functools.wraps(run)
    def counted(f: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        found["pairs"] += f is not None and b is not None
        return run(f, b, *args, **kwargs)

    @functools.wraps(reduced)
    def digested(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduced(self, *args, **kwargs)
        chunk = getattr(self.module, "vp_stage", None)
        for name, parameter in self.module.named_parameters():
            data = parameter.main_grad.contiguous().view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()[:16]
            found["gradients"].append([chunk, name, digest])
        Path(folder, f"gradients{rank}.json").write_text(json.dumps(found))
        return result

    plan.run = staticmethod(counted)
    DistributedDataParallel.finish_grad_sync = digested


def read(folder: Path, world: int) -> tuple[int, list[Any]]:
    """(pairs, gradients) of all ranks of a job."""
    every = [json.loads((folder / f"gradients{rank}.json").read_text()) for rank in range(world)]
    return sum(one["pairs"] for one in every), [one["gradients"] for one in every]
