"""(b) Two and four processes share the device: real messages, streams and pinned copies.

Messages go through the host by gloo. Every schedule, and offloading on and off, must give the same
losses and weights bit for bit over a few steps of training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.model import CUDA, Rank, Size, Staged, start, synchronize
from megatron_ext.integration.utils import gather
from megatron_ext.schedule import Link, generate, offload_pass
from tests.support.ranks import on_ranks

# (schedule, chunks, offload); the first is what the others are compared with.
CASES = (
    ("1f1b", 1, None),
    ("interleaved", 2, None),
    ("zb-h1", 1, None),
    ("v-min", 2, None),
    ("v-half", 2, None),
    ("v-half", 2, "full"),
    ("v-zb", 2, None),
    ("po", 4, "half"),
    ("po", 4, "full"),
)
STEPS = 3
RATE = 1e-2
# Until it is measured, as in training: late copies only cost time.
WAY = "0.25"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both numbers of processes; each in processes of its own."""
    found = {}
    for world in (2,) if args.tiny else (2, 4):
        found[str(world)] = _world(world, args)
        args.keep({"worlds": found})
    return {"worlds": found}


def _world(world: int, args: argparse.Namespace) -> Any:
    return together(__name__, world, args, rank_main)


def together(
    module: str, world: int, args: argparse.Namespace, task: Callable[[argparse.Namespace], None]
) -> Any:
    """What the ``task`` of ``module`` writes to rows.json, run in ``world`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        if CUDA:
            good = _processes(module, world, args, folder)
        else:
            # Forked: nothing to import again. A GPU's state cannot be forked.
            good = on_ranks(
                world,
                lambda rank: task(
                    argparse.Namespace(tiny=args.tiny, rank=rank, world=world, folder=folder)
                ),
            )
        if not good:
            return {"failed": "a process failed; its traceback is in the output"}
        return json.loads((Path(folder) / "rows.json").read_text())


def _processes(module: str, world: int, args: argparse.Namespace, folder: str) -> bool:
    """New processes; true if all ended well. The first one that fails ends the others."""
    command = [
        sys.executable,
        "-m",
        module,
        "--world",
        str(world),
        "--folder",
        folder,
    ]
    command += ["--tiny"] if args.tiny else []
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(world)
    ]
    try:
        while True:
            codes = [child.poll() for child in children]
            if any(codes) or None not in codes:
                return not any(codes)
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def rank_main(args: argparse.Namespace) -> None:
    """One of the processes; rank 0 writes what came out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    group = start(args.rank, args.world, f"{args.folder}/store")
    p = args.world
    size = Size(64, 16, 4, p, 2 * p) if args.tiny else Size(1024, 1024, 4, p, 4 * p)
    rows: list[dict[str, Any]] = []
    for name, chunks, offload in CASES:
        plan = generate(name, p, size.microbatches, chunks)
        if offload is not None:
            plan = offload_pass(plan, Link.of(p, WAY), offload).schedule
        rank = Rank(size, plan, args.rank, group, Staged(group, size.shape))
        losses, seconds = [], 0.0
        for _ in range(STEPS):
            seconds = max(gather(rank.step()["took"]))
            losses.append(max(gather([loss.hex() for loss in rank.losses]), key=len))
            learn(rank)
        weights: dict[int, str] = {}
        for part in gather(digests(rank)):
            weights.update(part)
        moved = sum(rank.report.offloaded_sets) if offload else 0
        row = {"schedule": name if offload is None else f"{name}, offload {offload}",
               "losses": losses, "weights": weights, "step_ms": 1e3 * seconds,
               "moved_sets": moved}  # fmt: skip
        rows.append(row)
        rank.close()
    first = rows[0]
    for row in rows:
        row["equal"] = row["losses"] == first["losses"] and row["weights"] == first["weights"]
    changed = first["losses"][0] != first["losses"][-1]
    if args.rank == 0:
        for row in rows:
            row["losses"] = [step[0] for step in row["losses"]]  # enough to look at
            row["weights"] = len(row["weights"])
            print(f"{p} processes: {row}", flush=True)
        text = json.dumps({"size": str(size), "rows": rows, "learns": changed})
        (Path(args.folder) / "rows.json").write_text(text)


def learn(rank: Rank) -> None:
    """Plain gradient descent, so that the next losses depend on every gradient."""
    with torch.no_grad():
        for chunk in rank.chunks:
            for parameter in chunk.parameters():
                if parameter.grad is None:
                    raise RuntimeError("a parameter has no gradient")
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None


def digests(rank: Rank) -> dict[int, str]:
    """Of the weights of each layer, by its number in the model."""
    synchronize()
    found = {}
    for chunk in rank.chunks:
        for layer in chunk.layers:
            digest = hashlib.sha256()
            for parameter in layer.parameters():
                digest.update(parameter.detach().cpu().view(torch.int16).numpy().tobytes())
            found[layer.number] = digest.hexdigest()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--tiny", action="store_true")
    rank_main(parser.parse_args())
