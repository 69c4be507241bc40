"""The planner's verdict on Megatron-Bridge's performance recipes with a pipeline; writes a page.

    python -m benchmarks.bridge_recipes [--json]

``bridge_recipes.json`` has the facts: each recipe's device, model sizes and division as Megatron's
flags. Every one is read as ``megatron-ext plan --from-args`` reads it, with stock's own schedule
(1F1B, or interleaved 1F1B), and its fullest rank is compared with the device's memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import page as pages
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import split_of
from megatron_ext.plan.memory import RankBytes, message_bytes, rank_bytes, stage_bytes
from megatron_ext.plan.model import PlanError
from megatron_ext.schedule import generate

FACTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).with_name("bridge-recipes.md")
RESERVE = 6 * 2**30  # plan's own, for libraries, communicators and fragmentation
# Not in the planner's table: no public number of what a process finds on them.
STANDS_FOR = {"VR200": "GB300", "R100": "GB300"}


@dataclass(frozen=True)
class Verdict:
    """One recipe.

    Attributes:
        fact: its row of the facts.
        device: bytes of the device's memory.
        worst: the fullest rank; None if the planner refuses the recipe.
        refusal: why.
    """

    fact: dict[str, Any]
    device: int
    worst: RankBytes | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """The planner calls it feasible: with its reserve."""
        return self.worst is not None and self.worst.total <= self.device - RESERVE


def verdict(fact: dict[str, Any], models: dict[str, str]) -> Verdict:
    """The planner's answer for one recipe."""
    device = gpu_of(STANDS_FOR.get(fact["gpu"], fact["gpu"])).memory_bytes
    try:
        if "frozen" in fact:
            raise PlanError(f"{fact['frozen']}, which no flag of a pretraining script says")
        job = job_of(read(f"{models[fact['model']]} {fact['flags']}".split())[0])
        pp, chunks = job.pipeline_model_parallel_size, fact["chunks"]
        split = split_of(job, pp * chunks)
        if split is None:
            raise PlanError(
                f"{job.num_layers} layers do not divide over {pp * chunks} stages; Megatron "
                "refuses that too"
            )
        # Memory is at its peak long before so many microbatches.
        few = min(job.microbatches(), 4 * pp)
    except PlanError as error:
        return Verdict(fact, device, None, str(error))
    schedule = generate("1f1b" if chunks == 1 else "interleaved", pp, few, chunks)
    ranks = rank_bytes(schedule, stage_bytes(job, split), message_bytes(job))
    return Verdict(fact, device, max(ranks, key=lambda rank: rank.total))


def verdicts() -> list[Verdict]:
    """Of all recipes."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    return [verdict(fact, facts["models"]) for fact in facts["recipes"]]


def main() -> None:
    """Print or write the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows, write nothing")
    args = parser.parse_args()
    found = verdicts()
    if args.json:
        print(json.dumps([row(one) for one in found]))
    else:
        PAGE.write_text(page(found), encoding="utf-8")


def row(one: Verdict) -> dict[str, Any]:
    """One answer for machines."""
    data: dict[str, Any] = {"recipe": one.fact["recipe"], "fits": one.fits, "why": one.refusal}
    if one.worst is not None:
        worst = one.worst
        data |= {"bytes": worst.total, "rank": worst.rank, "device_bytes": one.device}
        data |= {"states": worst.states.total, "activations": worst.kept, "pass": worst.passing}
    return data


def page(found: list[Verdict]) -> str:
    """The whole page."""
    answered = [one for one in found if one.worst is not None]
    misses = [one for one in answered if not one.fits]
    published = [one for one in answered if "published" in one.fact]
    refused = [(f"`{one.fact['recipe']}`", one.refusal) for one in found if one.worst is None]
    introduction = _INTRODUCTION.format(
        *(len(found), json.loads(FACTS.read_text(encoding="utf-8"))["commit"][:12]),
        *(len(answered), len(answered) - len(misses)),
        *(len(published), sum(one.fits for one in published)),
    )
    return pages.text_of(
        "# Megatron-Bridge's recipes with a pipeline, by the planner",
        introduction,
        "## Called infeasible",
        _MISSES if misses else "None.",
        _table(misses) if misses else "",
        "## Not answered",
        pages.grid(("recipe", "why"), refused),
        "## Called feasible",
        _table([one for one in answered if one.fits]),
    )


def _table(rows: list[Verdict]) -> list[str]:
    def flag(one: Verdict, name: str) -> str:
        words = one.fact["flags"].split()
        return words[words.index(name) + 1] if name in words else "1"

    def division(one: Verdict) -> str:
        sizes = (flag(one, f"--{kind}-model-parallel-size") for kind in ("tensor", "pipeline"))
        return " x ".join((*sizes, str(one.fact["chunks"])))

    def gib(nbytes: Callable[[RankBytes], int]) -> Callable[[Verdict], str]:
        return lambda one: f"{nbytes(one.worst) / 2**30:.1f}" if one.worst is not None else ""

    columns: dict[str, Callable[[Verdict], object]] = {
        "recipe": lambda one: f"`{one.fact['recipe']}`",
        "device": lambda one: one.fact["gpu"],
        "TP x PP x VP": division,
        "CP": lambda one: flag(one, "--context-parallel-size"),
        "EP": lambda one: flag(one, "--expert-model-parallel-size"),
        "states": gib(lambda worst: worst.states.total),
        "sets": gib(lambda worst: worst.kept),
        "pass": gib(lambda worst: worst.passing),
        "worst rank GiB": gib(lambda worst: worst.total),
        "device GiB": lambda one: f"{one.device / 2**30:.1f}",
        "feasible": lambda one: "yes" if one.fits else "no",
        "published": lambda one: one.fact.get("published", "-"),
    }
    return pages.table(columns, rows)


_INTRODUCTION = """\
`python -m benchmarks.bridge_recipes` writes this page from `bridge_recipes.json`: all {0}
performance recipes of NVIDIA-NeMo/Megatron-Bridge at commit {1} with a pipeline, as
Megatron's flags. Their settings are what each recipe function sets, run with stand-ins for
everything but the recipes' own modules; the models' sizes are those of the published
configurations. Each is read as `plan --from-args` reads it, under stock's own schedule (1F1B, or
interleaved 1F1B), and its fullest rank is compared with the device's memory less plan's default
reserve of 6 GiB.

**{2} can be answered, {3} of them are called feasible.** Of those for which NVIDIA publishes a
throughput with the same model, device, number of devices, precision, TP, PP, CP, VP and EP (column
"published": the container in `docs/performance-summary*.md`), **{5} of {4} are called feasible**.

Assumptions beside plan's own: memory of CUDA graphs, of the dispatchers' buffers and of the paged
stash is not counted; nor are the additional sets that stock keeps where it overlaps the
expert-parallel exchange; tensorwise FP8 weights count twice (Hopper does, Blackwell has one copy);
of vision-language models only the language model counts; for VR200 and R100 the memory of GB300 is
assumed, because no public number says what a process finds there."""
_MISSES = """\
None of these has a published measurement. They are Llama 3.1 405B in 16 bits, or on half as many
devices as the published rows of that model: 128 devices divide a rank's optimizer states by 2 and
not by 4. Interleaved 1F1B keeps 143 sets of one layer on rank 0 (TP 4, PP 16, VP 8), 31.75 bytes
per `s*b*h/t` or 1 GiB each, which leaves no room on 178 or 185 GiB. We found nothing that is
counted too often, so the planner keeps its answer."""


if __name__ == "__main__":
    main()
