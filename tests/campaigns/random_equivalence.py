#!/usr/bin/env python3
"""Random training runs under random schedules, compared with stock Megatron; runs for hours.

    python -m tests.campaigns.random_equivalence path/to/Megatron-LM --results FILE [--seed 1]
        [--first 0] [--cases 300] [--hours 8] [--steps 10]
    python -m tests.campaigns.random_equivalence CHECKOUT --seed 1 --only 17 --keep FOLDER

Each case draws pipeline, data-, tensor- and context-parallel size, schedule, chunks, microbatches,
an even or uneven split of the layers, dtype, recomputation, offload, MoE layers, multi-token
prediction, costs, caps (fractions and bytes), overlaps and slices. The checkout's
``pretrain_gpt.py`` then trains on CPU ranks from one checkpoint, once with stock 1F1B (in slices:
with ours) and once with the schedule, and every step's exact losses are compared: bit for bit,
except where the tolerance in the case's line says
why not. A line of FILE is one case, with the command that repeats it; a run that is started again
goes on behind the last one. Results are those of benchmarks/feature_matrix.py; DIFFERENT, FAILED
and HUNG are defects, and then the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.random_extras import extras
from tests.support.feature_runs import DEFECTS, SCHEDULES, compare, reason
from tests.support.features import BASE, MOE, OVERLAP, Feature
from tests.support.server import Outcome, ScriptServer

_LOOPED = ("interleaved", "interleaved-zb", "gis", "gis-h", "po")
_RECOMPUTE = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
)
_TIED = "gradients of tied embeddings are added in another order"
_CLIP = "the norm that clipping divides by is summed per rank, so in another order"
_CHUNKS = "the experts' weight gradients are summed chunk by chunk"
_NORM = "gradients of an RMSNorm's input, three in fp32, are added in another order if recomputed"
_SUM = "two summands of a gradient are added in another order"
# More ways to lay gradients and parameters out, and to move them, beside those of ``OVERLAP``.
_DATA_PARALLEL = (
    "",
    "",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    OVERLAP,
    OVERLAP + " --no-align-grad-reduce --no-align-param-gather",
    "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 2000",
)


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        model: flags that make the starting checkpoint.
        run: flags of both runs.
        stock, ours: flags of one of them.
        world: ranks.
        tolerance: largest relative difference of a loss, 0 for bit for bit; and why not 0.
    """

    model: str
    run: str
    stock: str
    ours: str
    world: int
    tolerance: float = 0.0
    why: str = ""


def draw(seed: int, number: int, steps: int, wide: bool = False) -> Case:
    """Case ``number``, the same one wherever it is drawn; ``wide``: with more features."""
    rng = random.Random(f"{seed}/{number}")
    pp = rng.choice((2, 2, 3, 4))
    dp, inner, inner_flags = _widths(rng, pp)
    name = rng.choice(SCHEDULES.split(","))
    chunks = 2 if name.startswith("v-") else rng.choice((2, 2, 3, 4)) if name in _LOOPED else 1
    dtype = rng.choice(("", "--bf16", "--bf16", "--fp16 --initial-loss-scale 65536"))
    moe = rng.random() < 0.3 and inner == 1
    model, run, why = [dtype], [f"--pipeline-model-parallel-size {pp}", inner_flags], []
    if "tensor" in inner_flags:
        why.append(_SUM)
    ours = [f"--pp-schedule {name}"]
    layers, stock, placed = _layers(rng, pp, chunks, name)
    model.append(f"--num-layers {layers}")
    ours += placed
    if moe:
        model.append(MOE)
        run += ["--expert-model-parallel-size 2"] * (dp == 2 and rng.random() < 0.7)
    rope = rng.random() < 0.25
    if rope:
        model.append("--swiglu --normalization RMSNorm --position-embedding-type rope")
        model.append("--group-query-attention --num-query-groups 2" * (rng.random() < 0.5))
    if rng.random() < 0.08 and not placed and name not in ("auto", *_LOOPED) and inner == 1:
        model.append("--mtp-num-layers 1" + " --position-embedding-type rope" * (not rope))
        why.append(_SUM)
    if rng.random() < 0.2:
        model.append("TIED")
        why.append(_TIED)
    if rng.random() < 0.2:
        run.append("--clip-grad 1.0")
        why.append(_CLIP)
    micro = rng.choice((1, 1, 2))
    run.append(f"--micro-batch-size {micro} --global-batch-size {micro * dp * _microbatches(rng)}")
    run.append(f"--train-iters {steps}")
    run.append(rng.choice(_DATA_PARALLEL))
    run.append("--calculate-per-token-loss" * (rng.random() < 0.1))
    run.append(rng.choice(_RECOMPUTE) if rng.random() < 0.5 else "")
    if rng.random() < 0.2:
        run.append("--eval-iters 1 --eval-interval 4")
    ours += _options(rng, name, pp)
    if rope and not dtype and "--pp-cheap-recompute" in ours:
        why.append(_NORM)
    if moe and rng.random() < 0.5:
        ours.append(f"--moe-pipeline-chunks {rng.choice(('1', '2', '4', 'auto'))}")
        strategies = ("none", "s0", "s1", "s2", "s3", "s4", "auto")
        ours.append(f"--moe-memory-reuse {rng.choice(strategies)}")
        why.append(_CHUNKS)
    if "context" not in inner_flags and not any("chunks" in flag for flag in ours):
        slices = _slices(rng)  # last, so that the other draws are as they were
        ours.append(slices)
        stock += [f"--pp-schedule 1f1b {slices}"] * bool(slices)
    for extra in extras(rng, " ".join([*model, *run, *ours])) if wide else ():
        model.append(extra.model)
        run.append(extra.run)
        ours.append(extra.ours)
        why += [extra.why] * bool(extra.why)
    tolerance = 0.0 if not why else 1e-4 if not dtype else 2e-2
    texts = [" ".join(filter(None, part)) for part in (model, run, stock, ours)]
    return Case(*texts, pp * dp * inner, tolerance, "; ".join(why))


def _slices(rng: random.Random) -> str:
    """Flags that cut sequences of 16 tokens; what runs in slices is compared with 1F1B in the same
    slices, of which no gradient is added in another order."""
    if rng.random() < 0.8:
        return ""
    return f"--transformer-impl local --pp-slices {rng.choice((2, 3, 4, 7))}"


def _widths(rng: random.Random, pp: int) -> tuple[int, int, str]:
    """(data-parallel size, ranks inside a stage, flags of these): eight ranks at most."""
    dp = rng.choice((1, 2)) if pp == 2 else 2 if pp == 3 and rng.random() < 0.25 else 1
    kind = rng.choice(("--tensor-model-parallel-size 2", "--context-parallel-size 2"))
    if pp > 2 or dp > 1 or rng.random() < 0.6:
        return dp, 1, ""
    sequence = "tensor" in kind and rng.random() < 0.5
    return dp, 2, kind + " --sequence-parallel" * sequence


def _microbatches(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 4, 5, 6, 8, 11, 16))


def _layers(
    rng: random.Random, pp: int, chunks: int, name: str
) -> tuple[int, list[str], list[str]]:
    """(layers, how stock places them, how the schedule does)."""
    stages = pp * chunks
    virtual = [f"--num-virtual-stages-per-pipeline-rank {chunks}"] if name in _LOOPED else []
    if name == "auto" or rng.random() < 0.5:
        # auto chooses among both placements where the layers can be split evenly.
        layers = (2 * pp if name == "auto" else stages) * rng.choice((1, 1, 2))
        return layers, [], virtual
    counts = [rng.choice((1, 1, 1, 2, 2, 3)) for _ in range(stages)]
    counts[0] = rng.choice((0, 1, 2))
    layers = sum(counts)
    while layers < pp:
        counts[-1] += 1
        layers += 1
    even = [layers // pp] * pp
    for rank in rng.sample(range(pp), layers % pp):
        even[rank] += 1
    flag = "--pipeline-model-parallel-layout"
    return layers, [flag, _layout(even)], [flag, _layout(counts)]


def _layout(counts: list[int]) -> str:
    stages = ["t" * count for count in counts]
    return "E" + "|".join(stages) + "L"


def _options(rng: random.Random, name: str, pp: int) -> list[str]:
    """Flags of ours beside the schedule and the chunks."""
    flags = []
    if name == "v-cap":
        flags.append(f"--pp-memory-cap {rng.choice(('0.75', '0.9', '1')) if pp > 2 else '1'}")
    elif name == "auto" and rng.random() < 0.5:
        flags.append(f"--pp-memory-cap {rng.choice(('0.9', '1', '1.5'))}")
    elif rng.random() < 0.06:
        flags.append(f"--pp-memory-cap {rng.choice(('256KiB', '1MiB', '4MiB'))}")
    if rng.random() < 0.4:
        costs = ",".join(rng.choice(("1", "1.3", "2", "0.7")) for _ in "FBW")
        flags.append(f"--pp-cost {costs}{rng.choice(('', ',0.05', ',0.5'))}")
    if rng.random() < 0.15:
        flags.append(f"--pp-profile-steps {rng.choice((1, 3))}")
    if rng.random() < 0.2:
        flags.append("--pp-cheap-recompute")
    if rng.random() < 0.3:
        flags.append(f"--pp-offload {rng.choice(('half', 'full', 'auto'))}")
        if name not in ("v-cap", "auto") and rng.random() < 0.2:
            flags.append(f"--pp-memory-cap {rng.choice(('0.6', '0.8', '1'))}")
        if rng.random() < 0.7:
            flags.append(f"--pp-offload-time {rng.choice(('0.1', '0.25', '0.2,0.4', '1'))}")
    return flags


class Runner:
    """Trains cases on one checkout; keeps checkpoints and stock's runs for later cases."""

    def __init__(self, checkout: Path, folder: Path, python: str) -> None:
        self._script, self._python, self.folder = checkout / "pretrain_gpt.py", python, folder
        self._server: ScriptServer | None = None
        self._stock: dict[str, Outcome] = {}

    def train(self, argv: list[str], world: int, name: str) -> Outcome:
        """One run; a server that has died is started again for the next."""
        if self._server is None:
            self._server = ScriptServer(self._script, self._python, modules=["tests.support"])
        try:
            return self._server.run(argv, world, self.folder / name)
        except (RuntimeError, OSError):
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.__exit__()
            self._server = None

    def run(self, case: Case, number: int) -> tuple[str, str, float]:
        """(result, detail, seconds of the schedule's run)."""
        feature = Feature(
            str(number), tolerance=case.tolerance, why=case.why, world=case.world, pp=0
        )
        words = BASE.split() + [w for w in case.model.split() if w != "TIED"]
        if "TIED" in case.model.split():
            words.remove("--untie-embeddings-and-output-weights")
        weights = self.folder / f"weights-{_digest(words)}"
        if not weights.exists():
            save = f"--train-iters 1 --save {weights} --save-interval 1"
            made = self.train([*words, *save.split()], 1, "start")
            if made.status != "ok":
                shutil.rmtree(weights, ignore_errors=True)
                return "no stock", "no checkpoint: " + reason(made, 1), made.seconds
        paths = {"SAVE": "saved", "TRACE": "traces"}
        words += [str(self.folder / paths[w]) if w in paths else w for w in case.run.split()]
        words += f"--load {weights} --finetune --no-load-optim --no-load-rng".split()
        stock = self._stocks(words + case.stock.split(), case.world)
        shutil.rmtree(self.folder / "saved", ignore_errors=True)
        own = [str(self.folder / paths[w]) if w in paths else w for w in case.ours.split()]
        ours = self.train(words + own, case.world, f"case-{number}")
        if ours.status == "hung":
            return "HUNG", f"after {ours.seconds:.0f} s", ours.seconds
        sentence = _refusal(ours, case.world) if ours.status == "failed" else ""
        if sentence:
            return "rejected", sentence, ours.seconds
        if stock.status != "ok":
            return "no stock", reason(stock, case.world), ours.seconds
        if ours.status == "failed":
            return "FAILED", reason(ours, case.world), ours.seconds
        return *compare(feature, stock, ours), ours.seconds

    def _stocks(self, words: list[str], world: int) -> Outcome:
        key = _digest([*words, str(world)])
        if key not in self._stock:
            self._stock[key] = self.train(words, world, f"stock-{key}")
        return self._stock[key]


def _refusal(outcome: Outcome, world: int) -> str:
    """The one sentence with which all ranks refused the flags before training; else nothing."""
    logs = [outcome.log(rank) for rank in range(world)]
    if outcome.losses() or any("Traceback" in log for log in logs):
        return ""
    last = [re.findall(r"^\[megatron_ext\] error: (.*--.*)", log, re.M)[-1:] for log in logs]
    found = {sentence for sentences in last for sentence in sentences}
    return found.pop() if len(found) == 1 else ""


def _digest(words: list[str]) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]


def _done(path: Path | None) -> dict[int, Any]:
    """Cases of an earlier run; a line that was cut off is run again."""
    found = {}
    for line in path.read_text().splitlines() if path is not None and path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["case"]] = entry
    return found


def _append(path: Path, line: str) -> None:
    """Add a line, also behind one that was cut off."""
    cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * cut + line + "\n")


def _record(options: argparse.Namespace, number: int, case: Case, runner: Runner) -> dict[str, Any]:
    """Train one case; what went wrong outside of its ranks is a failure of it, too."""
    try:
        result, detail, seconds = runner.run(case, number)
    except (RuntimeError, OSError, ValueError) as error:
        result, detail, seconds = "FAILED", f"{type(error).__name__}: {error}", 0.0
    module = "tests.campaigns.random_equivalence"
    repeat = f"python -m {module} CHECKOUT --seed {options.seed} --only {number}"
    if options.steps != 10:
        repeat += f" --steps {options.steps}"
    repeat += " --wide" * options.wide
    return {
        "case": number,
        "result": result,
        "detail": detail[:500],
        "seconds": round(seconds, 1),
        "megatron": options.checkout.name,
        **asdict(case),
        "repeat": repeat,
    }


def main() -> int:
    """Run what the command line asks for; exit status 1 if a case is a defect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first")
    parser.add_argument("--cases", type=int, default=300, help="how many, from there")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no case later than this")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--wide", action="store_true", help="with features of random_extras.py")
    parser.add_argument("--only", type=int, metavar="N", help="repeat one case")
    parser.add_argument("--results", type=Path, help="append one JSON line a case, and go on there")
    parser.add_argument("--keep", type=Path, help="keep logs and checkpoints in this folder")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs Megatron")
    options = parser.parse_args()
    # Ended by a batch system, it must not leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.keep or Path(tempfile.mkdtemp(prefix="random-equivalence-"))
    done = _done(options.results)
    drawn = range(options.first, options.first + options.cases)
    todo = [options.only] if options.only is not None else drawn
    runner, start = Runner(options.checkout, folder, options.python), time.monotonic()
    counts = Counter(entry["result"].split("~")[0] or "~" for entry in done.values())
    try:
        for number in todo:
            if number in done or time.monotonic() - start > 3600 * options.hours:
                continue
            entry = _record(
                options, number, draw(options.seed, number, options.steps, options.wide), runner
            )
            counts[entry["result"].split("~")[0] or "~"] += 1
            print(f"{number:4} {entry['result']:10} {entry['ours']}  {entry['detail'][:160]}",
                  flush=True)  # fmt: skip
            if options.results is not None:
                _append(options.results, json.dumps(entry))
            if options.keep is None:
                shutil.rmtree(folder / f"case-{number}", ignore_errors=True)
    finally:
        runner.close()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 1 if any(counts[name] for name in DEFECTS) else 0


if __name__ == "__main__":
    sys.exit(main())
