#!/usr/bin/env python3
"""Feeds damaged and hostile input to everything that reads a user's files and flags.

    python -m tests.campaigns.fuzz --seconds 600 [--seed 1] [--targets schedule,flags] [--json FILE]
    python -m tests.campaigns.fuzz --seconds 600 --coverage CORPUS    # needs atheris

Without ``--coverage`` inputs are mutated at random, the same ones for the same seed. With it
atheris (``pip install atheris``) chooses what to mutate by which lines an input reaches, one target
after the other, and leaves what it found worth keeping in CORPUS; its inputs are counted in steps
of a hundred. The rule is that of ``tests/support/fuzz_inputs.py``: an input is used, or refused
with one sentence. An input that takes longer than ``--patience`` seconds or more memory than
``--memory`` counts as a fault. Inputs at fault are kept in ``--faults``, and the exit status is 1;
one that hangs ends the run at once, and is there as ``running``.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import json
import os
import platform
import random
import resource
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from tests.support.fuzz_inputs import Target, feed, targets
from tests.support.fuzz_mutations import mutated

INPUTS = "tests.support.fuzz_inputs"
_COUNTED = 100
_POOL = 200  # accepted inputs that are kept for more mutation, of each target


class Run:
    """The inputs of one run, counted, and those that were answered against the rules."""

    def __init__(self, faults: Path, patience: float) -> None:
        faults.mkdir(parents=True, exist_ok=True)
        self.faults, self._patience = faults, patience
        self.inputs: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.found: dict[str, str] = {}
        # Written before each input, so that one that hangs or kills the process can be read.
        self._running = os.open(faults / "running", os.O_RDWR | os.O_CREAT, 0o600)

    def feed(self, target: Target, data: bytes) -> bool:
        """One input; True if it was accepted."""
        os.ftruncate(self._running, 0)
        os.pwrite(self._running, data, 0)
        faulthandler.dump_traceback_later(self._patience, exit=True)
        self.inputs[target.name] += 1
        try:
            good = feed(target, data)
        except Exception as error:
            self._keep(target, data, error)
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.accepted[target.name] += good
        return good

    def _keep(self, target: Target, data: bytes, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{target.name}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        if kind in self.found:
            return
        name = f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        (self.faults / name).write_bytes(data)
        self.found[kind] = f"{name}: {str(error)[:300]}"
        print(f"{kind}  {self.found[kind]}", flush=True)


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much more memory than it has now; beyond, MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def mutate_at_random(
    run: Run, chosen: list[Target], seconds: float, most: int | None, seed: int
) -> None:
    """Feed the targets in turn until the time is over, or so many inputs have been tried."""
    rng = random.Random(seed)
    pools = {target.name: list(target.seeds) for target in chosen}
    for target in chosen:
        for data in target.seeds:
            if not run.feed(target, data):
                raise SystemExit(f"{target.name} refuses its own seed {data[:200]!r}")
    end = time.monotonic() + seconds
    while time.monotonic() < end and (most is None or sum(run.inputs.values()) < most):
        for target in chosen:
            pool = pools[target.name]
            for _ in range(50):
                data = mutated(rng.choice(pool), rng)
                if run.feed(target, data) and len(data) < 20_000:
                    if len(pool) < _POOL:
                        pool.append(data)
                    else:
                        pool[rng.randrange(len(target.seeds), _POOL)] = data


def by_coverage(run: Run, names: list[str], options: argparse.Namespace) -> None:
    """Let atheris choose the inputs of one target after the other, each in a process of its own."""
    for name in names:
        counts = run.faults / "counts.json"
        counts.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _atheris(run, name, options.seconds / len(names), options, counts)
        _, status = os.waitpid(child, 0)
        # libFuzzer ends the process itself, with 0 when the time is over.
        ended = json.loads(counts.read_text()) if counts.is_file() else {"inputs": 0, "accepted": 0}
        run.inputs[name], run.accepted[name] = ended["inputs"], ended["accepted"]
        run.found.update(ended.get("faults", {}))
        if status != 0:
            last = shutil.copy(run.faults / "running", run.faults / f"{name}-ended")
            run.found[f"{name}: the process ended with status {status}"] = last.name


def _atheris(
    run: Run, name: str, seconds: float, options: argparse.Namespace, counts: Path
) -> NoReturn:
    import atheris

    # Only what is instrumented when it is imported counts.
    for module in [n for n in sys.modules if n.startswith(("megatron_ext", INPUTS))]:
        del sys.modules[module]
    with atheris.instrument_imports(include=["megatron_ext"]):
        target = importlib.import_module(INPUTS).targets()[name]
    limit_memory(options.memory << 20)
    start, kept = options.coverage / name / "seeds", options.coverage / name / "kept"
    for folder in (start, kept):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds):
        (start / str(number)).write_bytes(data)

    def one(data: bytes) -> None:
        before = len(run.found)
        run.feed(target, data)
        if run.inputs[name] % _COUNTED == 0 or len(run.found) != before:
            state = {"inputs": run.inputs[name], "accepted": run.accepted[name]}
            counts.write_text(json.dumps({**state, "faults": run.found}))

    def half(data: bytes, most: int, number: int) -> bytes:
        if number % 2:
            return bytes(atheris.Mutate(data, most))
        return mutated(data, random.Random(number))[:most]

    arguments = [f"-max_total_time={max(1, int(seconds))}", f"-seed={options.seed}"]
    arguments += ["-max_len=8192", "-rss_limit_mb=0", "-verbosity=0"]
    arguments += [f"-artifact_prefix={run.faults}/", str(kept), str(start)]
    atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=half)
    atheris.Fuzz()
    os._exit(0)


def report(run: Run, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """What was run and found, for a person and as JSON."""
    total = sum(run.inputs.values())
    for name, count in run.inputs.items():
        print(f"{name:14} {count:9} inputs, {run.accepted[name]:8} accepted")
    print(f"{total} inputs in {seconds:.0f} s, {total / seconds:.0f} a second; "
          f"{len(run.found)} faults")  # fmt: skip
    return {
        "seed": options.seed,
        "coverage": options.coverage is not None,
        "seconds": round(seconds, 1),
        "inputs": dict(run.inputs),
        "accepted": dict(run.accepted),
        "inputs_per_second": round(total / seconds),
        "faults": run.found,
        "python": platform.python_version(),
    }


def main() -> int:
    """Run what the command line asks for; exit status 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, metavar="N", help="end after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", help="some of these, with commas: " + ", ".join(targets()))
    parser.add_argument("--coverage", type=Path, metavar="CORPUS", help="let atheris choose")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds for one input")
    parser.add_argument("--memory", type=int, default=1024, help="MiB that inputs may take")
    parser.add_argument("--faults", type=Path, default=Path("fuzz-faults"), help="a folder")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args()
    names = options.targets.split(",") if options.targets else list(targets())
    run, start = Run(options.faults, options.patience), time.monotonic()
    if options.coverage is not None:
        by_coverage(run, names, options)
    else:
        chosen = [targets()[name] for name in names]
        limit_memory(options.memory << 20)
        mutate_at_random(run, chosen, options.seconds, options.inputs, options.seed)
    result = report(run, time.monotonic() - start, options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if run.found else 0


if __name__ == "__main__":
    sys.exit(main())
