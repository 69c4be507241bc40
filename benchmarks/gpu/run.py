#!/usr/bin/env python3
"""Everything that needs a GPU, on one or two: tests, equality, times, memory, copies, MoE, NCCL.

    python -m benchmarks.gpu.run [--parts tests,shared,...] [--rest] [--seconds N] [--tiny]
        [--output DIR] [--date YYYY-MM-DD]

By value, the longest last:

tests     the tests marked ``gpu``, where pytest is installed
shared    two and four processes share the GPU: losses and weights bit for bit under every
          schedule, offload on and off
replay    one rank's list of an 8-stage pipeline with real GPT layers, peers emulated: F, B, W
          and copy times, peak memory by the allocator and as planned; from them the whole step
rates     copies alone, both ways, while computing; k measured against the formula
slices    a layer's passes in 1 to 16 slices of a sequence
overhead  the executor's host time per action with real kernels; Megatron's local CUDA graphs
moe       MoE layers: Megatron's own, with --recompute-modules moe, ours; emulated all-to-alls
layers    F, B and W of one layer of models that people train, for the planner's times
wide      replay at hidden size 8192
nccl      two processes with a GPU each, by NCCL: schedules bit for bit, the cost of messages
          under each --pp-p2p, what a waiting receive takes from computation, memory over 200 steps

Needs torch and megatron-core, no network, nothing else; ``benchmarks/gpu/bare.py`` starts it where
megatron-core is but a wheel. Each part is a process of its own with a time limit; one that fails is
a line that says so, and the others run. results/DATE-gpu.json and gpu.md are written after every
part; what the running part has is in results/DATE-gpu-PART.part. SIGTERM ends all. ``--rest`` goes
on where the newest results stop; ``--seconds`` is the time for all. ``--tiny`` runs everything with
next to nothing on the CPU, to see that it runs: no figure of it says anything about a GPU.
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
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import page as pages
from benchmarks.gpu.keep import keep, kept
from benchmarks.gpu.page import page, wrong
from tests.support.ranks import run_and_leave

ROOT = Path(__file__).resolve().parents[2]

# Part: its module and the seconds it may take.
PARTS = {
    "tests": ("benchmarks.gpu.marked", 90),
    "shared": ("benchmarks.gpu.shared", 100),
    "replay": ("benchmarks.gpu.replay", 75),
    "rates": ("benchmarks.gpu.transfers", 30),
    "slices": ("benchmarks.gpu.slices", 80),
    "overhead": ("benchmarks.gpu.overhead", 75),
    "moe": ("benchmarks.gpu.moe", 150),
    "layers": ("benchmarks.gpu.layers", 120),
    "wide": ("benchmarks.gpu.replay", 110),
    "nccl": ("benchmarks.gpu.nccl", 240),
}


def run_part(name: str, args: argparse.Namespace, left: float = float("inf")) -> dict[str, Any]:
    """One part in processes of its own, ended when its time is over, or all that is ``left``."""
    limit = round(min(seconds_of(name, args), left))
    out = part_file(name, args)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    started = time.perf_counter()
    child = None
    try:
        child = _start(name, args, out)
        status = _wait(child, limit)
    finally:
        if child is not None:
            # It may have started others, which are in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    result = kept(out)
    if status != 0:
        why = f"not done after {limit} s" if status is None else f"exit status {status}"
        result["unfinished" if result else "failed"] = why
    out.unlink(missing_ok=True)
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def seconds_of(name: str, args: argparse.Namespace) -> float:
    """That a part may take. On a CPU it only bounds a hang: tests run on machines that are busy."""
    return PARTS[name][1] * (10 if args.tiny else 1)


def part_file(name: str, args: argparse.Namespace) -> Path:
    """Where a part keeps what it has until it is done."""
    folder: Path = args.output / "results"
    return folder / f"{args.date}-{stem(args)}-{name}.part"


def stem(args: argparse.Namespace) -> str:
    """Of the results' names, behind the date."""
    return "gpu-tiny" if args.tiny else "gpu"


def _start(name: str, args: argparse.Namespace, out: Path) -> int:
    """The process of one part, leader of a group: new with a GPU, whose state cannot be forked;
    else forked, which saves the imports. Tests look for a GPU: ours that stands in for one must
    not be there."""
    if device()["gpu"] is not None or name == "tests":
        command = [sys.executable, "-m", "benchmarks.gpu.run", "--only", name, "--into", str(out)]
        command += ["--tiny"] if args.tiny else []
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        return os.posix_spawn(command[0], command, environment, setpgroup=0)
    importlib.import_module("benchmarks.gpu.model")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child may have done it, and ended
            os.setpgid(pid, pid)
        return pid
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
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
    """Run one part here. It may call ``args.keep`` with what it has so far, or write ``out``."""
    args.name, args.into, args.keep = name, out, functools.partial(keep, out)
    args.keep(importlib.import_module(PARTS[name][0]).run(args))


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


ENDING = (signal.SIGTERM, signal.SIGHUP)


def _end(number: int, _: Any) -> NoReturn:
    """Leave as after an exception, so that the running part is ended, too."""
    raise SystemExit(128 + number)


def before(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The parts of the newest results in the folder; their date becomes this run's."""
    found = pages.newest(args.output, stem(args))
    if found is None:
        return {}
    args.date = found["date"]
    parts: dict[str, dict[str, Any]] = found["rows"]
    return parts


def run_all(names: list[str], args: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any]:
    """All of ``names`` in turn; results and page are written after every one."""
    end = time.monotonic() + args.seconds
    parts = args.done
    for name in names:
        left = end - time.monotonic()
        if left < LEAST:
            print(f"{name}: not begun, the time is over", flush=True)
            parts.setdefault(name, {"failed": "not begun, the time was over", "seconds": 0})
        else:
            print(f"{name}: at most {min(left, seconds_of(name, args)):.0f} s", flush=True)
            parts[name] = run_part(name, args, left) | {"device": about["gpu"]}
            print(f"{name}: {outcome(parts[name])} in {parts[name]['seconds']} s", flush=True)
        parts = {one: parts[one] for one in PARTS if one in parts}
        pages.save(args, stem(args), {**about, "rows": parts})
        write_page(parts, args, about)
    return parts


def write_page(parts: dict[str, Any], args: argparse.Namespace, about: dict[str, Any]) -> None:
    """gpu.md; what cannot be shown costs no measurement."""
    try:
        text = page(parts, about)
    except Exception:
        traceback.print_exc()
    else:
        (args.output / "gpu.md").write_text(text)


# Seconds below which a part is not begun: its imports take as long.
LEAST = 10


def main() -> int:
    """Run it; returns the exit status: 1 if anything failed or was not equal."""
    parser = pages.parser_of(
        __doc__,
        parts=(",".join(PARTS), "comma-separated"),
        rest=(False, "only what has no result in DIR yet"),
        seconds=(float("inf"), "for all parts"),
        tiny=(False, "next to nothing, also on the CPU"),
    )
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        part(args.only, args, args.into)
        return 0
    if args.page_of is not None:
        data = json.loads(args.page_of.read_text())
        write_page(data["rows"], args, data)
        return int(bool(wrong(data["rows"])))
    names = args.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for number in ENDING:
        signal.signal(number, _end)
    about = device()
    if about["gpu"] is None and not args.tiny:
        print("there is no CUDA device; --tiny runs the suite on the CPU, without any figure",
              file=sys.stderr)  # fmt: skip
        return 2
    args.done = before(args) if args.rest else {}
    names = [name for name in names if outcome(args.done.get(name, {"failed": 1})) != "done"]
    about = about | {"date": args.date, "machine": args.machine, "tiny": args.tiny,
              "megatron": version("megatron-core"),
              "compiled": os.environ.get("TORCH_COMPILE_DISABLE") != "1"}  # fmt: skip
    parts = run_all(names, args, about)
    print((args.output / "gpu.md").read_text() if parts else "no parts", flush=True)
    return int(bool(wrong(parts)))


if __name__ == "__main__":
    sys.exit(main())
