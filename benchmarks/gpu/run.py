#!/usr/bin/env python3
"""Everything that needs a GPU, on one or two: times, memory, copies, equality, overhead, MoE, NCCL.

    python -m benchmarks.gpu.run [--parts replay,shared,...] [--tiny] [--link-gbs 50]
        [--output DIR] [--date YYYY-MM-DD]

replay    (a) one rank's list of an 8-stage pipeline with real GPT layers, peers emulated: F, B, W
          and copy times, peak memory by the allocator and by our count; from them the whole step
shared    (b) two and four processes share the GPU: losses and weights bit for bit under every
          schedule, offload on and off
rates     (c) copies alone, both ways, while computing; k measured against the formula
overhead  (d) the executor's host time per action with real kernels; bound by launching or not
moe       (e) MoE layers: Megatron's own, with --recompute-modules moe, ours; emulated all-to-alls
nccl      (f) two processes with a GPU each, by NCCL: schedules bit for bit, the cost of messages
          under each --pp-p2p, what a waiting receive takes from computation, memory over 200 steps

Needs torch and megatron-core, no network, nothing else. Each part is a process of its own with a
time limit; one that fails is a line that says so, and the others run. All of it ends within twelve
minutes. Writes results/DATE-gpu.json and gpu.md. ``--tiny`` runs everything with next to nothing
on the CPU, to see that it runs: no figure of it says anything about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page, wrong
from benchmarks.ranks import add_arguments, save
from tests.support.ranks import run_and_leave

HERE = Path(__file__).resolve().parent

# Part: its module and the seconds it may take; together less than twelve minutes.
PARTS = {
    "replay": ("benchmarks.gpu.replay", 225),
    "shared": ("benchmarks.gpu.shared", 100),
    "rates": ("benchmarks.gpu.transfers", 30),
    "overhead": ("benchmarks.gpu.overhead", 60),
    "moe": ("benchmarks.gpu.moe", 60),
    "nccl": ("benchmarks.gpu.nccl", 240),
}


def run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part in processes of its own, ended when its time is over."""
    _, limit = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        started = time.perf_counter()
        child = _start(name, args, out)
        try:
            status = _wait(child, limit)
        finally:
            # It may have started others, which are in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        took = round(time.perf_counter() - started, 1)
        if status == 0:
            return {**json.loads(out.read_text()), "seconds": took}
        why = f"exit status {status}"
        if status is None:
            os.waitpid(child, 0)
            why = f"not done after {limit} s"
        if out.exists():  # What it had until then.
            return {**json.loads(out.read_text()), "unfinished": why, "seconds": took}
        return {"failed": why, "seconds": took}


def _start(name: str, args: argparse.Namespace, out: Path) -> int:
    """The process of one part, leader of a group: new with a GPU, whose state cannot be forked;
    else forked, which saves the imports."""
    if device()["gpu"] is not None:
        command = [sys.executable, __file__, "--only", name, "--into", str(out)]
        command += ["--tiny"] if args.tiny else []
        return os.posix_spawn(command[0], command, os.environ, setpgroup=0)
    importlib.import_module("benchmarks.gpu.model")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    run_and_leave(lambda: part(name, args, out))


def _wait(child: int, seconds: float) -> int | None:
    """Its exit status; None if it runs on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def part(name: str, args: argparse.Namespace, out: Path) -> None:
    """Run one part here. It may call ``args.keep`` with what it has so far."""

    def keep(result: dict[str, Any]) -> None:
        whole = out.with_suffix(".new")
        whole.write_text(json.dumps(result))
        whole.replace(out)

    args.keep = keep
    keep(importlib.import_module(PARTS[name][0]).run(args))


def outcome(result: dict[str, Any]) -> str:
    """Of a part, in words."""
    return str(result.get("failed") or result.get("unfinished") or "done")


@functools.cache
def device() -> dict[str, Any]:
    """What it runs on. Asked before anything else: our CPU stand-in says that it is a GPU."""
    import torch

    found = {"torch": torch.__version__, "python": sys.version.split()[0], "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda
    return found


def main() -> int:
    """Run it; returns the exit status: 1 if anything failed or was not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--tiny", action="store_true", help="next to nothing, also on the CPU")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    if args.only:
        part(args.only, args, args.into)
        return 0
    about = device()
    if about["gpu"] is None and not args.tiny:
        print("there is no CUDA device; --tiny runs the suite on the CPU, without any figure",
              file=sys.stderr)  # fmt: skip
        return 2
    about = about | {"date": args.date, "machine": args.machine, "tiny": args.tiny,
              "megatron": version("megatron-core")}  # fmt: skip
    parts = {}
    for name in args.parts.split(","):
        parts[name] = run_part(name, args)
        print(f"{name}: {outcome(parts[name])} in {parts[name]['seconds']} s")
    save(args, "gpu-tiny" if args.tiny else "gpu", parts, about)
    text = page(parts, about)
    print(text)
    (args.output / "gpu.md").write_text(text)
    return int(bool(wrong(parts)))


if __name__ == "__main__":
    sys.exit(main())
