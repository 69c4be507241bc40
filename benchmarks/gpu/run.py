#!/usr/bin/env python3
"""Everything that needs a GPU, on one: times, memory, copies, equality, overhead, MoE.

    python benchmarks/gpu/run.py [--parts replay,shared,...] [--tiny] [--link-gbs 50]
        [--output DIR] [--date YYYY-MM-DD]

replay    (a) one rank's list of an 8-stage pipeline with real GPT layers, peers emulated: F, B, W
          and copy times, peak memory by the allocator and by our count; the step simulated from them
shared    (b) two and four processes share the GPU: losses and weights bit for bit, offload on and off
rates     (c) copies alone, both ways, while computing; k measured against the formula
overhead  (d) the executor's host time per action with real kernels; bound by launching or not
moe       (e) the MoE region with emulated all-to-alls

Needs torch and megatron-core, no network, nothing else. Each part is a process of its own with a
time limit; one that fails is a line that says so, and the others run. All of it ends within eight
minutes. Writes results/DATE-gpu.json and gpu.md. ``--tiny`` runs everything with next to nothing
on the CPU, to see that it runs: no figure of it says anything about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[1], HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from page import page  # noqa: E402

from benchmarks.ranks import add_arguments, save  # noqa: E402

# Part: its module and the seconds it may take; together less than eight minutes.
PARTS = {
    "replay": ("replay", 225),
    "shared": ("shared", 100),
    "rates": ("transfers", 30),
    "overhead": ("overhead", 60),
    "moe": ("moe", 50),
}


def run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part in processes of its own, ended when its time is over."""
    _, limit = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--only", name, "--into", str(out)]
        command += ["--tiny"] if args.tiny else []
        started = time.perf_counter()
        child = subprocess.Popen(command, start_new_session=True)
        try:
            status = child.wait(limit)
            why = f"exit status {status}"
        except subprocess.TimeoutExpired:
            why = f"not done after {limit} s"
        finally:
            # It may have started others, which are in its group.
            _end(child)
        took = round(time.perf_counter() - started, 1)
        if not out.exists():
            return {"failed": why, "seconds": took}
        return {**json.loads(out.read_text()), "seconds": took}


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def device() -> dict[str, Any]:
    """What it runs on."""
    import torch

    found = {"torch": torch.__version__, "python": sys.version.split()[0], "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda
    return found


def main() -> int:
    """Run it; returns the exit status: 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--tiny", action="store_true", help="next to nothing, also on the CPU")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    if args.only:
        result = importlib.import_module(PARTS[args.only][0]).run(args)
        args.into.write_text(json.dumps(result))
        return 0
    about = device()
    if about["gpu"] is None and not args.tiny:
        print("there is no CUDA device; --tiny runs the suite on the CPU, without any figure",
              file=sys.stderr)  # fmt: skip
        return 2
    from importlib.metadata import version

    about |= {"date": args.date, "machine": args.machine, "tiny": args.tiny,
              "megatron": version("megatron-core")}  # fmt: skip
    parts = {}
    for name in args.parts.split(","):
        parts[name] = run_part(name, args)
        print(f"{name}: {parts[name].get('failed', 'done')} in {parts[name]['seconds']} s")
    save(args, "gpu-tiny" if args.tiny else "gpu", parts, about)
    text = page(parts, about)
    print(text)
    (args.output / "gpu.md").write_text(text)
    return int(any("failed" in part for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
