"""The runs of a training command on CPU ranks: one process, stock's layout, ours."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .flags import Flags
from .shrink import CP, EP, PP, STEPS, TP, Shrunk, trained

_SECONDS = 600.0  # of one run
_LISTED = 8  # differences of a check in words


class Check(NamedTuple):
    """One layout compared with one process.

    Attributes:
        name: what was run.
        status: ``equal``, ``different`` or ``failed``.
        differences: in words; why it failed.
        compared: number of tensors and losses.
        largest: relative difference found.
        skipped: names that could not be compared.
    """

    name: str
    status: str
    differences: list[str]
    compared: int = 0
    largest: float = 0.0
    skipped: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """A line, and one for each difference."""
        if self.status == "equal":
            return (
                f"{self.name}: equal to one process; {self.compared} losses, gradients and "
                f"weights, at most {self.largest:.0e} apart"
            )
        more = len(self.differences) - _LISTED
        lines = [f"  {text}" for text in self.differences[:_LISTED]]
        lines += [f"  and {more} more"] if more > 0 else []
        return "\n".join([f"{self.name}: {self.status}", *lines])


class Refused(ValueError):
    """Megatron itself refuses the command; the text is its reason."""


class _Jobs:
    """Jobs of ``ranks``, written down before they run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, list[dict[str, Any]]()

    def add(self, name: str, words: list[str], world: int = 1, **more: Any) -> Path:
        """A run's folder."""
        folder = self._folder / name
        job = {"words": words, "world": world, "folder": str(folder), "timeout": _SECONDS}
        self._jobs.append({**job, **more})
        return folder

    def run(self, script: Path, progress: Callable[[str], None]) -> int:
        """Run them; returns how many ended well."""
        path = self._folder / "jobs.json"
        path.write_text(json.dumps(self._jobs), encoding="utf-8")
        # Megatron warns of every optional package that is not installed.
        environment = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **os.environ}
        home = str(Path(__file__).resolve().parents[2])
        path_of = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path_of)
        command = [sys.executable, "-m", "megatron_ext.prove.ranks", str(script), str(path)]
        progress(f"importing {script.name}")
        with open(self._folder / "ranks.log", "w", encoding="utf-8") as errors:
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process:
                assert process.stdout is not None
                good = 0
                for line in process.stdout:
                    good += line.strip() == "ok"
                    if good < len(self._jobs):
                        progress(Path(self._jobs[good]["folder"]).name)
        return good


def check_command(jobs: _Jobs, words: list[str], world: int) -> Path:
    """Add the job that lets Megatron judge the command's own sizes."""
    flags, _ = trained(Flags(words))
    sizes = [flags.number(name, 1) for name in (TP, PP, CP)]
    for name in ("--train-iters", "--lr"):
        flags.append(name, 1)
    flags.append("--mock-data")
    flags.append("--tokenizer-type", "NullTokenizer")
    if "--vocab-size" not in flags:
        flags.append("--vocab-size", 50000)
    world = world or math.lcm(math.prod(sizes), flags.number(EP, 1))
    return jobs.add("the command's own sizes", flags.words, world, check=True)


def refusal(script: Path, words: list[str], world: int, folder: Path) -> str:
    """Why Megatron refuses a command; empty: it does not."""
    jobs = _Jobs(folder)
    path = check_command(jobs, words, world)
    return "" if jobs.run(script, lambda text: None) else reason(path, 1)


def prove(
    script: Path,
    words: list[str],
    world: int,
    shrunk: Shrunk,
    folder: Path,
    progress: Callable[[str], None],
) -> list[Check]:
    """Run stock's layout, and ours if the command has flags of ours; compare with one process.

    Args:
        script: the training script.
        words, world: of the command as it was given; 0 ranks: not known.
        shrunk: its small form.
        folder: for all files; empty.
        progress: called with a line before each run.

    Raises:
        Refused: Megatron refuses the command.
    """
    jobs, alone = _Jobs(folder), shrunk.reference()
    given = check_command(jobs, words, world)
    cache = ["--data-cache-path", str(folder / "samples")]
    first = alone.copy()
    first.append("--train-iters", 1)
    saved = ["--save", str(folder / "start"), "--save-interval", "1"]
    start = jobs.add("weights", [*first.words, *cache, *saved])
    load = ["--load", str(folder / "start"), "--finetune", "--no-load-optim", "--no-load-rng"]
    reference = jobs.add("one process", [*alone.words, *cache, *load])
    runs = [(f"stock Megatron on {shrunk.world} ranks", shrunk.stock)]
    if shrunk.ours:
        runs.append((f"with {shrunk.ours}", shrunk.flags))
    folders = [
        jobs.add(f"layout {number}", [*flags.words, *cache, *load], shrunk.world)
        for number, (_, flags) in enumerate(runs)
    ]
    good = jobs.run(script, progress)
    if good == 0:
        raise Refused(reason(given, 1))
    if good < 3:
        why = reason((start, reference)[good - 1], 1)
        return [Check("one process", "failed", [why])]
    checks = []
    for number, (name, _) in enumerate(runs):
        if good < 4 + number:
            checks.append(Check(name, "failed", [reason(folders[number], shrunk.world)]))
            break
        checks.append(_judge(name, folders[number], shrunk.world, reference))
    return checks


def _judge(name: str, folder: Path, world: int, reference: Path) -> Check:
    from .compare import compare

    made = compare(folder, world, reference, STEPS)
    status = "different" if made.differences else "equal"
    skipped = tuple(sorted(made.skipped))
    return Check(name, status, made.differences, made.compared, max(made.largest.values()), skipped)


def reason(folder: Path, world: int) -> str:
    """Why a run failed: our sentence, or the last error of the first rank that has one."""
    errors: list[str] = []
    for rank in range(world):
        path = folder / f"rank{rank}.log"
        text = path.read_text(errors="replace") if path.is_file() else ""
        if ours := re.findall(r"^\[megatron_ext\] error: (.*)", text, re.M):
            return str(ours[-1])
        found = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception)\b: .+|\S+: error: .*)", text, re.M)
        errors += [f"rank {rank}: {one}" if world > 1 else one for one in found[-1:]]
    # A rank whose neighbour died says only that.
    own = [one for one in errors if "Connection " not in one]
    return (own or errors or [f"see {folder}"])[0]
