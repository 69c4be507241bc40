"""Do schedules compute the same? Losses and weights of three steps, bit for bit those of 1F1B.

Two and four processes train on one GPU, with messages through the host; with a GPU for each,
messages are NCCL's. The first schedule runs twice: if it differs from itself, nothing follows.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import spawn

from benchmarks.gpu import model as gpu
from megatron_ext.integration.utils import gather
from megatron_ext.runtime.channel import Channel, Receipt
from megatron_ext.runtime.edges import connected
from megatron_ext.schedule import Link, Placement, generate, offload_pass

# (schedule, chunks, offload)
CASES = (
    ("1f1b", 1, ""), ("1f1b", 1, ""), ("interleaved", 2, ""), ("zb-h1", 1, ""), ("v-min", 2, ""),
    ("v-half", 2, ""), ("v-half", 2, "full"), ("v-zb", 2, ""), ("po", 4, "half"), ("po", 4, "full"),
)  # fmt: skip
STEPS, RATE = 3, 1e-2
TIME_OF_A_SET = "0.25"  # late copies only cost time


def run(tiny: bool, keep: gpu.Keep) -> dict[str, Any]:
    """Both numbers of processes, each in processes of its own."""
    result: dict[str, Any] = {"rows": []}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    for world in (2,) if tiny else (2, 4):
        before = list(result["rows"])
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows"
            rows.touch()
            ranks, ended = spawn(rank_main, (world, tiny, folder), world, join=False), False
            while not ended:
                failed = []
                try:  # the first process that fails ends the others
                    ended = ranks.join(1)
                except Exception as error:
                    why = str(error).strip().splitlines()[-1]
                    ended, failed = True, [{"ranks": world, "failed": why}]
                made = map(json.loads, rows.read_text().splitlines())
                result["rows"] = [*before, *made, *failed]
                keep(result)
    return result


class Staged:
    """Messages between processes that share one GPU: through the host, by gloo."""

    posts_late, device = False, torch.device("cpu")

    def __init__(self, inner: Channel) -> None:
        self._inner, self.settle = inner, inner.settle
        self.sending_to, self.finish = inner.sending_to, inner.finish

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Waits for the device, then as ``Channel``; a copy, since a receiver may write to it."""
        self._inner.send(tensor.detach().to("cpu", copy=True), peer, tag)

    def receive(self, peer: int, tag: int) -> Receipt:
        """As ``Channel``; waiting brings the message to the device."""
        return _StagedReceipt(self._inner.receive(peer, tag))


class _StagedReceipt(Receipt):
    def __init__(self, inner: Receipt) -> None:
        self._inner, self.peer = inner, inner.peer

    def wait(self) -> torch.Tensor:
        """The message on the device."""
        return self._inner.wait().to(gpu.DEVICE)


def rank_main(rank: int, p: int, tiny: bool, folder: str) -> None:
    """One of ``p`` processes; rank 0 writes what came out, after every case."""
    own = gpu.CUDA and torch.cuda.device_count() >= p
    if own:
        gpu.DEVICE = torch.device("cuda", rank)
    group = gpu.start(rank, p, f"{folder}/store", "nccl" if own else "gloo")
    size = gpu.Size(64, 16, 4, p, 2 * p) if tiny else gpu.Size(1024, 1024, 4, p, 2 * p)
    there = gpu.DEVICE if own else torch.device("cpu")
    # Kernels that compute the same every time, or raise; a fill would race with other streams.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    first: dict[str, Any] = {}
    for number, (name, chunks, offload) in enumerate(CASES):
        plan = generate(name, p, size.microbatches, chunks)
        if offload:
            plan = offload_pass(plan, Link.of(p, TIME_OF_A_SET), offload).schedule
        edges = connected(group, "passes", Placement.loop(p, 2).edges, there)
        channel: Any = Channel(edges, size.shape, gpu.BF16, there)
        one = gpu.Rank(size, plan, rank, group, channel if own else Staged(channel))
        found = trained(one)
        row = {
            "ranks": p, "messages": "NCCL" if own else "through the host",
            "schedule": f"{name}, offload {offload}" if offload else name, "control": number == 1,
            "equal": not first or found == first, "learns": len({*found["losses"]}) == STEPS,
            "moved_sets": sum(one.report.offloaded_sets) if offload else 0,
        }  # fmt: skip
        one.close()
        first = first or found
        if rank == 0:
            print(row, flush=True)
            with Path(folder, "rows").open("a") as file:
                file.write(json.dumps(row) + "\n")


def trained(rank: gpu.Rank) -> dict[str, Any]:
    """Losses of some steps in hex, and digests of all layers' weights after them, by number."""
    losses = []
    for _ in range(STEPS):
        rank.step(timed=False)
        losses.append(str(max(gather([loss.hex() for loss in rank.losses]), key=len)))
        with torch.no_grad():
            for parameter in (p for layer in rank.layers for p in layer.parameters()):
                parameter.sub_(parameter.main_grad.to(parameter.dtype), alpha=RATE)
    weights: dict[int, str] = {}
    for part in gather({layer.module.layer_number: _digest(layer) for layer in rank.layers}):
        weights |= part
    return {"losses": losses, "weights": weights}


def _digest(layer: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in layer.parameters():
        digest.update(parameter.detach().cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    gpu.main(run)
