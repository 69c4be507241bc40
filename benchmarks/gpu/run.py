#!/usr/bin/env python3
"""Everything that needs a GPU, by worth, in twelve minutes.

    python -m benchmarks.gpu.run [--part NAME ...] [--rest] [--seconds N] [--tiny]
        [--wheels DIR] [--output DIR] [--date YYYY-MM-DD]

Needs torch and megatron-core, no network. On a bare machine ``--wheels`` is a folder with
megatron-core's wheel, others that are missing there, and, if carried, Transformer Engine's kit
(``te-*.tar.xz``, which needs pydantic); all are unpacked into a temporary folder. Each part is a
process of its own with a time limit. results/DATE-gpu.json and gpu.md are written after every part,
and a part keeps its rows as they come, so whatever ends the run loses nothing. ``--rest`` goes on
where the newest results stop. ``--tiny`` runs everything with next to nothing on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.page import page, wrong

ROOT = Path(__file__).resolve().parents[2]
# Part: the seconds it may take; by worth.
PARTS = {
    "equality": 90, "row": 240, "graphs": 90, "slices": 70,
    "te": 70, "transfers": 25, "moe": 80, "overhead": 50,
}  # fmt: skip
LEAST = 10  # seconds below which a part is not begun: its imports take as long
# The first call of a MoE layer would compile for seconds.
SETTINGS = {"TORCH_COMPILE_DISABLE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
SETTINGS["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # streams that wait do not hold others back


def run_part(name: str, args: argparse.Namespace, site: str, limit: float) -> dict[str, Any]:
    """One part in a process group of its own, ended when its time is over."""
    into = args.output / "results" / f"{args.stem}-{name}.part"
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--into", str(into)]
    # Elsewhere Megatron would fail where Transformer Engine does not load.
    engine = f"{site}/engine" if name == "te" else ""
    path = [str(ROOT), site, engine, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    started, status = time.perf_counter(), None
    child = subprocess.Popen(
        command + ["--tiny"] * args.tiny, env=environment, start_new_session=True
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        child.wait()
    result: dict[str, Any] = json.loads(into.read_text()) if into.exists() else {}
    into.unlink(missing_ok=True)
    if status != 0:
        result["failed"] = f"not done after {limit:.0f} s" if status is None else f"status {status}"
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def unpacked(wheels: Path | None, site: str) -> None:
    """Put what was carried where Python finds it."""
    for path in sorted(wheels.iterdir()) if wheels is not None else ():
        if path.suffix == ".whl":
            zipfile.ZipFile(path).extractall(site)
        elif path.name.startswith("te-"):
            with tarfile.open(path) as kit:
                kit.extractall(f"{site}/engine", filter="data")


def _end(number: int, _: Any) -> NoReturn:
    """Leave as after an exception, so that the running part is ended, too."""
    raise SystemExit(128 + number)


def main() -> int:
    """Run it; returns the exit status: 1 if anything failed or was not equal."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--seconds", type=float, default=720.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--date", default=date.today().isoformat())
    args = parser.parse_args()
    kind = "gpu-tiny" if args.tiny else "gpu"
    args.stem = f"{args.date}-{kind}"
    (args.output / "results").mkdir(parents=True, exist_ok=True)
    found = sorted((args.output / "results").glob(f"????-??-??-{kind}.json")) if args.rest else []
    data: dict[str, Any] = {"date": args.date, "tiny": args.tiny, "parts": {}}
    if found:
        data = json.loads(found[-1].read_text())
        args.stem = f"{data['date']}-{kind}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    end = time.monotonic() + args.seconds * (10 if args.tiny else 1)  # there it bounds a hang
    with tempfile.TemporaryDirectory() as site:
        unpacked(args.wheels, site)
        for name in PARTS:
            if name not in args.part or "failed" not in data["parts"].get(name, {"failed": 1}):
                continue
            limit = min(PARTS[name] * (10 if args.tiny else 1), end - time.monotonic())
            if limit < LEAST:
                print(f"{name}: not begun, the time is over", flush=True)
                continue
            print(f"{name}: at most {limit:.0f} s", flush=True)
            part = run_part(name, args, site, limit)
            print(f"{name}: {part.get('failed', 'done')} in {part['seconds']} s", flush=True)
            data["about"] = part.pop("about", data.get("about", {}))
            before = data["parts"].get(name, {})
            if "failed" not in part or len(before.get("rows", ())) <= len(part.get("rows", ())):
                data["parts"][name] = part
            if data["about"]:  # else nothing has begun anywhere: earlier results stay
                save(args.output, args.stem, data)
    problems = wrong(data["parts"])
    print("\n".join(problems) or "nothing is wrong", flush=True)
    return int(bool(problems))


def save(folder: Path, stem: str, data: dict[str, Any]) -> None:
    """Results, whole at any moment, and their page."""
    path = folder / "results" / f"{stem}.json"
    new = path.with_suffix(".new")
    parts = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data["parts"].items())
    rest = json.dumps({k: v for k, v in data.items() if k != "parts"})
    new.write_text(f'{rest[:-1]}, "parts": {{\n{parts}\n}}}}\n')
    new.replace(path)
    (folder / "gpu.md").write_text(page(data, f"results/{stem}.json"))


if __name__ == "__main__":
    sys.exit(main())
