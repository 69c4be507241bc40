"""(b) Two and four processes share the device: real messages, streams and pinned copies.

Messages go through the host by gloo. Every schedule, and offloading on and off, must give the same
losses and weights bit for bit over a few steps of training. The first runs twice: if it differs
from itself, nothing follows for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.keep import keep, kept
from benchmarks.gpu.model import CUDA, Rank, Size, Staged, start, synchronize
from megatron_ext.integration.utils import gather
from megatron_ext.schedule import Link, generate, offload_pass
from tests.support.ranks import on_ranks

# (schedule, chunks, offload); the first is what the others are compared with.
CASES = (
    ("1f1b", 1, None),
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
    for world in (2,) if args.tiny else (2, 4):
        if not together(__name__, world, args, rank_main):
            found = kept(args.into).get("worlds", {}).get(str(world), {})
            found["unfinished" if found else "failed"] = FAILED
            keep(args.into, found, "worlds", str(world))
    return kept(args.into)


FAILED = "a process failed; its traceback is in the output"


def together(
    module: str, world: int, args: argparse.Namespace, task: Callable[[argparse.Namespace], None]
) -> bool:
    """Run the ``task`` of ``module`` in ``world`` processes; rank 0 writes ``args.into``.

    Returns:
        Whether all ended well.
    """
    with tempfile.TemporaryDirectory() as folder:
        if CUDA:
            return _processes(module, world, args, folder)
        # Forked: nothing to import again. A GPU's state cannot be forked.
        about = {"tiny": args.tiny, "world": world, "folder": folder, "into": args.into}
        return on_ranks(world, lambda rank: task(argparse.Namespace(rank=rank, **about)))


@contextlib.contextmanager
def exact() -> Iterator[bool]:
    """Inside, torch chooses kernels that compute the same every time, or raises.

    With ``warn_only`` it would not: flash attention's backward pass stays as it is then. Memory is
    not filled, as in training: a fill on this stream could come after a copy on another.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


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
        "--into",
        str(args.into),
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
    """One of the processes; rank 0 writes what came out, after every case."""
    group = start(args.rank, args.world, f"{args.folder}/store")
    p = args.world
    size = Size(64, 16, 4, p, 2 * p) if args.tiny else Size(1024, 1024, 4, p, 4 * p)
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for name, chunks, offload in CASES:
        plan = generate(name, p, size.microbatches, chunks)
        if offload is not None:
            plan = offload_pass(plan, Link.of(p, WAY), offload).schedule
        rank = Rank(size, plan, args.rank, group, Staged(group, size.shape))
        with exact() as deterministic:
            found = trained(rank)
        moved = sum(rank.report.offloaded_sets) if offload else 0
        rank.close()
        rows.append({
            "schedule": name if offload is None else f"{name}, offload {offload}",
            "control": len(rows) == 1,
            "equal": not first or all(found[key] == first[key] for key in ("losses", "weights")),
            "deterministic": deterministic,
            "losses": [step[0] for step in found["losses"]],  # enough to look at
            "weights": len(found["weights"]),
            "step_ms": 1e3 * found["seconds"],
            "moved_sets": moved,
        })  # fmt: skip
        first = first or found
        if args.rank == 0:
            print(f"{p} processes: {rows[-1]}", flush=True)
            learns = first["losses"][0] != first["losses"][-1]
            result = {"size": str(size), "rows": rows, "learns": learns}
            keep(args.into, result, "worlds", str(p))


def trained(rank: Rank) -> dict[str, Any]:
    """Some steps of training: the losses of each, in hex, the digests of the weights after them by
    layer, and the seconds of the last step."""
    losses, seconds = [], 0.0
    for _ in range(STEPS):
        seconds = max(gather(rank.step()["took"]))
        losses.append(max(gather([loss.hex() for loss in rank.losses]), key=len))
        learn(rank)
    weights: dict[int, str] = {}
    for part in gather(digests(rank)):
        weights.update(part)
    return {"losses": losses, "weights": weights, "seconds": seconds}


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
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    rank_main(parser.parse_args())
