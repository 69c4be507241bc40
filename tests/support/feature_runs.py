"""Trains one feature of stock Megatron under a schedule and compares it with stock, exactly.

A cell's result is one of

    equal       every loss bit for bit stock's; what the log prints is equal, or, where it is a sum
                over ranks (norms), within 2e-3
    ~ x         within the tolerance that the feature states, x the largest relative difference
    rejected    megatron_ext refused the run before training
    no stock    stock itself cannot run this here
    DIFFERENT, FAILED, HUNG     defects (``DEFECTS``)
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.run_log import values
from tests.support.features import BASE, Feature
from tests.support.server import Outcome, ScriptServer
from tests.support.server import reason as error_of

SCHEDULES = "1f1b,interleaved,zb-h1,zb-h2,interleaved-zb,v-min,v-half,v-zb,v-cap,gis,gis-h,po,auto"
_LOOPED = ("interleaved", "interleaved-zb", "gis", "gis-h", "po")
_LAYOUTS = ("LAYOUT", "STANDALONE")  # words in a feature's flags that stand for one
DEFECTS = ("DIFFERENT", "FAILED", "HUNG")
# Megatron prints norms with three or more digits; they are sums over ranks.
_PRINTED = 2e-3
# Losses of multi-token prediction stand in the log only, with seven digits.
_LOSS, _LOSSES = re.compile(r"mtp_\d+ loss"), 1e-6


@dataclass(frozen=True)
class Cell:
    """What one run gave."""

    feature: str
    schedule: str
    result: str
    detail: str = ""
    seconds: float = 0.0


# Activations of these small models may be offloaded, however small they are.
os.environ.setdefault("MEGATRON_EXT_OFFLOAD_MIN_BYTES", "1")


def schedule_flags(name: str, pp: int) -> list[str]:
    """Flags of ours that run the schedule ``name`` on ``pp`` ranks; ``stock`` has none."""
    if name == "stock":
        return []
    flags = ["--pp-schedule", name]
    if name in ("v-cap", "auto"):
        # Two ranks leave no choice between V-Min's memory and 1F1B's.
        flags += ["--pp-memory-cap", "0.9" if pp > 2 else "1"]
    if name in _LOOPED:
        flags += ["--num-virtual-stages-per-pipeline-rank", "2"]
    return flags


def command(feature: Feature, name: str, checkpoint: Path | None) -> list[str]:
    """Arguments of the training script for one run."""
    words, dropped = [], feature.drop.split()
    skip = False
    for word in BASE.split():
        if word.startswith("--"):
            skip = word in dropped
        if not skip:
            words.append(word)
    words += feature.model.split()
    if checkpoint is None:
        return words
    words += feature.run.split()
    words += ["--pipeline-model-parallel-size", str(feature.pp)]
    words += ["--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]
    ours = schedule_flags(name, feature.pp)
    more = feature.ours.split() if ours else []
    listed = {*_LAYOUTS, "--hybrid-layer-pattern"} & {*words}
    if listed and "--num-virtual-stages-per-pipeline-rank" in ours:
        ours = ours[:-2]  # the layout says how many
    if "--hybrid-layer-pattern" in words:
        at = words.index("--hybrid-layer-pattern") + 1
        words[at] = _pattern(name, words[at])
    words += ours + more
    values = {
        "TENSORBOARD": lambda: str(checkpoint.parent / "board"),
        "TRACE": lambda: str(checkpoint.parent / f"trace-{name}"),
        **{kind: functools.partial(_layout, name, feature.pp, kind) for kind in _LAYOUTS},
    }
    return [values[word]() if word in values else word for word in words]


def _pattern(name: str, text: str) -> str:
    """A hybrid model's eight layers on two ranks; 1F1B gets them without stages."""
    if name == "1f1b":
        return text
    ends = (2, 3, 6) if name in _LOOPED else (5,)
    for end in reversed(ends):
        text = f"{text[:end]}|{text[end:]}"
    return text


def _layout(name: str, pp: int, kind: str) -> str:
    """Eight layers over the stages, some empty; STANDALONE: with one for multi-token prediction."""
    assert pp == 4, "written for four ranks"
    looped = name in _LOOPED or name.startswith("v-")
    if kind == "STANDALONE":
        return "Et|t|t|t|tt|tt|m|L" if looped else "Ettt|ttttt|m|L"
    # Two stages are empty, the first of a rank and the second of another one.
    counts = [0, 0, 2, 1, 0, 2, 1, 2] if looped else [1, 3, 2, 2]
    stages = ["t" * n for n in counts]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


_NOT_STOCKS = ("time", "throughput", "pipeline bubble", "peak activations")


def logged(outcome: Outcome, world: int) -> list[dict[str, str]]:
    """What Megatron logged, by iteration: every ``name: value`` that is no time and not ours."""
    lines = outcome.log(world - 1).splitlines()
    shown = (x for x in lines if re.search(r"iteration +\d+/", x) or "validation loss" in x)
    return [
        {k: v for k, v in values(line).items() if not any(word in k for word in _NOT_STOCKS)}
        for line in shown
    ]


def compare(feature: Feature, stock: Outcome, ours: Outcome) -> tuple[str, str]:
    """(result, detail) of a run that ended well."""
    worst = 0.0
    mine, theirs = ours.losses(), stock.losses()
    if len(mine) != len(theirs):
        return "DIFFERENT", f"{len(mine)} iterations logged, stock {len(theirs)}"
    for a, b in zip(mine, theirs, strict=True):
        if a["losses"].keys() != b["losses"].keys():
            return "DIFFERENT", f"losses named {list(a['losses'])}, stock {list(b['losses'])}"
        for name, value in a["losses"].items():
            worst = max(worst, _relative(float.fromhex(value), float.fromhex(b["losses"][name])))
    if worst > feature.tolerance:
        return "DIFFERENT", f"losses differ by {worst:.2e}"
    lines, wanted = logged(ours, feature.world), logged(stock, feature.stock.world)
    if len(lines) != len(wanted) or not wanted:
        return "DIFFERENT", f"{len(lines)} lines logged, stock {len(wanted)}"
    for a, b in zip(lines, wanted, strict=True):
        for name in a.keys() | b.keys():
            within = max(_LOSSES if _LOSS.match(name) else _PRINTED, feature.tolerance)
            if name not in a or name not in b or not _same(a[name], b[name], within):
                return "DIFFERENT", f"log: {name} {a.get(name)}, stock {b.get(name)}"
    return ("equal", "") if worst == 0.0 else (f"~{worst:.0e}", feature.why)


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _same(a: str, b: str, within: float) -> bool:
    try:
        return _relative(float(a), float(b)) <= within
    except ValueError:
        return a == b


def reason(outcome: Outcome, world: int) -> str:
    """Why a run failed: our refusal of a flag, or what else ended it."""
    found = error_of(outcome, world)
    refused = "--pp-schedule" in found and not found.startswith("rank ")
    return f"rejected: {found}" if refused else found


def run_cell(
    server: ScriptServer, feature: Feature, name: str, stock: Outcome, folder: Path, start: Path
) -> Cell:
    """Train one schedule with one feature and compare it."""
    run = functools.partial(server.run, script=feature.script)
    outcome = run(command(feature, name, start), feature.world, folder)
    if feature.repeat and outcome.status == "ok":
        stock, again = outcome, folder.with_name(f"{name}-again")
        outcome = run(command(feature, name, start), feature.world, again)
    if outcome.status == "hung":
        return Cell(feature.name, name, "HUNG", str(folder), outcome.seconds)
    why = reason(outcome, feature.world) if outcome.status == "failed" else ""
    if why.startswith("rejected: "):
        return Cell(feature.name, name, "rejected", why[10:], outcome.seconds)
    if outcome.status == "failed" or stock.status != "ok":
        if stock.status != "ok":
            return Cell(feature.name, name, "no stock", reason(stock, feature.stock.world))
        return Cell(feature.name, name, "FAILED", why, outcome.seconds)
    return Cell(feature.name, name, *compare(feature, stock, outcome), outcome.seconds)


def run_feature(
    server: ScriptServer, feature: Feature, schedules: Sequence[str], folder: Path
) -> list[Cell]:
    """One row: a checkpoint by stock on one rank, a stock run, and every schedule."""
    start = folder / "weights"
    run = functools.partial(server.run, script=feature.script)
    made = run(
        [
            *command(feature, "stock", None),
            *f"--train-iters 1 --save {start} --save-interval 1".split(),
        ],
        1,
        folder / "start",
    )
    if made.status != "ok":
        why = "no checkpoint: " + reason(made, 1)
        print(f"{feature.name:36} {why[:200]}", flush=True)
        return [Cell(feature.name, name, "no stock", why) for name in schedules]
    alike = feature.stock
    stock = run(command(alike, "stock", start), alike.world, folder / "stock")
    cells = []
    for name in schedules:
        cells.append(run_cell(server, feature, name, stock, folder / name, start))
        cell = cells[-1]
        print(f"{feature.name:36} {name:15} {cell.result:10} {cell.detail[:200]}", flush=True)
    return cells
