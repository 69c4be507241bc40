"""Megatron's functional tests and Megatron-Bridge's recipes, shrunk, compared with one process.

    python3 -m benchmarks.prove_corpus [--part gpt/...] [--output benchmarks/prove_corpus.md]

Every ``model_config.yaml`` below ``tests/functional_tests/test_cases`` of the newest supported
checkout, and the performance recipes with a pipeline of ``bridge_recipes.json``. Those that are
the same after shrinking are run once; pipelines run a second time with a schedule of ours. Results
are kept in a file of JSON lines, so that a run can go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.prove.flags import Flags
from megatron_ext.prove.patterns import stages_of
from megatron_ext.prove.server import ScriptServer
from megatron_ext.prove.session import Check, Session
from megatron_ext.prove.shrink import LAYOUT_OF_CHUNKS, PP, Shrinker, Shrunk
from megatron_ext.prove.sources import from_text
from tests.support.checkouts import MAIN_TAG, existing

CASES = "tests/functional_tests/test_cases"
SCRIPTS = {
    "gpt": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "mixtral": "pretrain_gpt.py",
    "nemotron": "pretrain_gpt.py",
    "hybrid": "pretrain_hybrid.py",
}
_GPUS = 8  # that the tests are made for
_MODEL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
--seq-length 4096 --max-position-embeddings 4096 --swiglu --position-embedding-type rope
--normalization RMSNorm --disable-bias-linear --micro-batch-size 1 --global-batch-size 64
--untie-embeddings-and-output-weights --bf16"""


class Finding(NamedTuple):
    """Something of stock's that differs from one process.

    Attributes:
        flags: beside ``_MODEL``.
        uneven: samples have different numbers of tokens that count.
        why: what was found in Megatron's code, or in its issues.
    """

    flags: str
    uneven: bool
    why: str


FINDINGS = (
    Finding(
        "--tensor-model-parallel-size 2 --softmax-type learnable --clip-grad 0.05",
        False,
        "Learnable attention sinks are split over TP, but the clipping norm takes them for copies "
        "and counts one rank's (issue 7452, number 8).",
    ),
    Finding(
        "--context-parallel-size 2 --mtp-num-layers 1",
        False,
        "The scale of the loss of multi-token prediction lacks the factor CP that auxiliary losses "
        "of experts have (pull request 3959, closed).",
    ),
    Finding(
        "--tensor-model-parallel-size 2 --multi-latent-attention --q-lora-rank 1536 "
        "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128",
        False,
        "With Megatron's own layers (not Transformer Engine's) the positional part of the keys is "
        "gathered over TP and used by each rank's heads; the gather's backward pass keeps a part "
        "of a gradient that has these heads' share only (`multi_latent_attention.py`, "
        "`get_query_key_value_tensors`).",
    ),
    Finding(
        "--context-parallel-size 2",
        True,
        "Without `--calculate-per-token-loss` each context-parallel rank divides by the tokens "
        "that count in its own part of a sample: known, and of no effect on even masks.",
    ),
)


REPORTS = (
    (
        "7452, number 2: a loss of gathered logits",
        "no command line asks for it: `gpt_builders.py` never gathers the logits",
    ),
    (
        "7452, number 3: multi-token prediction divides by a microbatch's tokens",
        "equal: one process divides by the same numbers (`--uneven-masks`, DP 2)",
    ),
    ("7452, number 8: the norm of attention sinks", "found; see above"),
    (
        "7452, number 10: the router's counts with a padding mask",
        "no command line asks for it: `pretrain_gpt.py` has no padding mask",
    ),
    (
        "7336, 5271: messages change places at PP 2 without overlap",
        "Megatron's arguments refuse that; exchanged messages, seeded, are found",
    ),
    ("7398: a reload overtakes its own offload", "needs streams, so a GPU"),
)
"""Reports in Megatron-LM's tracker, and what `prove` says of them. Of number 7452, only the
reproductions of these four were at hand."""


class Case(NamedTuple):
    """A configuration: script, names that share it, flags, ranks, and it shrunk, or why not."""

    script: str
    names: list[str]
    flags: list[str]
    world: int
    shrunk: Shrunk | str


def cases(root: Path, part: str) -> list[Case]:
    """Every different configuration."""
    found: dict[Any, Case] = {}
    for script, name, flags, world in _every(root):
        if part not in name:
            continue
        try:
            shrunk: Shrunk | str = Shrinker(flags, world).shrink()
        except ValueError as error:
            shrunk = str(error)
        key: Any = name
        if isinstance(shrunk, Shrunk):
            key = script, shrunk.world, tuple(sorted(shrunk.flags.words))
        found.setdefault(key, Case(script, [], flags, world, shrunk)).names.append(name)
    return list(found.values())


def _every(root: Path) -> Iterator[tuple[str, str, list[str], int]]:
    """(script, name, flags, ranks) of tests and recipes."""
    for file in sorted((root / CASES).glob("*/*/model_config.yaml")):
        kind = file.parent.parent.name
        if kind in SCRIPTS:
            with contextlib.suppress(ValueError):  # it has no flags of its own
                flags = from_text(file.read_text()).flags
                yield SCRIPTS[kind], f"{kind}/{file.parent.name}", flags, _GPUS
    facts = json.loads(Path(__file__).with_name("bridge_recipes.json").read_text())
    for fact in facts["recipes"]:
        words = Flags(f"{facts['models'][fact['model']]} {fact['flags']}".split())
        world = words.number("--world-size", 0)
        words.drop("--world-size")
        yield "pretrain_gpt.py", f"bridge/{fact['recipe']}", words.words, world


def ours(case: Case, known: list[str]) -> Shrunk | None:
    """The same configuration with a schedule of ours, if it is a pipeline."""
    shrunk = Shrinker(case.flags, case.world).shrink()
    if shrunk.flags.number(PP, 1) < 2:
        return None
    chunks = any(name in shrunk.flags for name in LAYOUT_OF_CHUNKS)
    layout = shrunk.flags.values("--pipeline-model-parallel-layout")
    one = bool(layout) and len(stages_of(layout[0])) == shrunk.flags.number(PP, 1)
    schedule = "zb-h1" if one else "interleaved-zb" if chunks else "v-half"
    return Shrinker([*case.flags, "--pp-schedule", schedule], case.world).shrink().known(known)


def row(names: str, run: str, check: Check) -> dict[str, Any]:
    """A line of the results."""
    text = check.detail
    if check.comparison is not None and check.comparison.differences:
        text = check.comparison.differences[0].text
    largest = max(check.comparison.largest.values(), default=0.0) if check.comparison else 0.0
    return {
        "names": names,
        "run": run,
        "status": check.status,
        "text": textwrap.shorten(text, 400, placeholder=" …"),
        "largest": largest,
        "tensors": check.comparison.tensors if check.comparison else 0,
        "seconds": round(check.seconds, 1),
        "flags": " ".join(check.flags),
    }


def run(root: Path, part: str, results: Path) -> None:
    """Run what ``results`` has not yet, and add to it."""
    done = {(one["names"], one["run"]) for one in read(results)}
    every = cases(root, part)
    for script in dict.fromkeys(case.script for case in every):
        with ScriptServer(root / script, double=True) as server:
            known = server.flags()
            for index, case in enumerate(every):
                if case.script != script or (" ".join(case.names), "stock") in done:
                    continue
                rows = _rows(server, case, known)
                with results.open("a") as file:
                    for one in rows:
                        file.write(json.dumps(one) + "\n")
                        result = f"{one['run']:6} {one['status']:9} {one['seconds']:5} s"
                        name, text = case.names[0][:50], one["text"][:90]
                        print(f"{index:3} {result}  {name:50} {text}", flush=True)


def _rows(server: ScriptServer, case: Case, known: list[str]) -> list[dict[str, Any]]:
    """Results of a configuration under stock, and under a schedule of ours."""
    names = " ".join(case.names)
    if isinstance(case.shrunk, str):
        return [row(names, "stock", Check("stock", "failed", case.shrunk))]
    rows = []
    shrunk = case.shrunk.known(known)
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        session = Session(server, shrunk, Path(scratch, "stock"))
        rows.append(row(names, "stock", session.check("stock", shrunk.stock)))
        if rows[0]["status"] == "equal" and (mine := ours(case, known)) is not None:
            session = Session(server, mine, Path(scratch, "ours"))
            rows.append(row(names, "ours", session.check("ours", mine.flags)))
    return rows


def findings(root: Path) -> list[str]:
    """Lines of a page: each finding's command, first difference and smallest set of flags."""
    lines = []
    with ScriptServer(root / "pretrain_gpt.py", double=True) as server:
        for one in FINDINGS:
            shrunk = Shrinker(f"{_MODEL} {one.flags}".split()).shrink()
            with tempfile.TemporaryDirectory(prefix="finding-") as scratch:
                session = Session(server, shrunk, Path(scratch), uneven=one.uneven)
                check = session.check("stock", shrunk.stock)
                if check.comparison is None or check.comparison.equal:
                    lines.append(f"- `{one.flags}`: {check.status} {check.detail}")
                    continue
                needed = " ".join(session.smallest(shrunk.stock, lambda text: None))
            options = " --uneven-masks" * one.uneven
            lines += [
                f"### `{needed}`",
                "",
                one.why,
                "",
                f"    megatron-ext prove{options} -- pretrain_gpt.py $MODEL {one.flags}",
                f"    {check.comparison.differences[0].text}",
                "",
            ]
    return lines


def read(results: Path) -> list[dict[str, Any]]:
    """The lines of a results file."""
    return [json.loads(x) for x in results.read_text().splitlines()] if results.exists() else []


def page(rows: list[dict[str, Any]], shown: list[str], tag: str) -> str:
    """The results as Markdown."""
    lines = [
        "# Megatron's functional tests and Megatron-Bridge's recipes, proved",
        "",
        f"Made by `python3 -m benchmarks.prove_corpus` with Megatron {tag}, in float64, three",
        "steps each. *equal*: every output, gradient, weight and moment is one process's within",
        "rounding. A configuration that several share after shrinking is run once.",
        "",
    ]
    for kind in ("stock", "ours"):
        own = [one for one in rows if one["run"] == kind]
        count = Counter(one["status"] for one in own)
        largest = max((one["largest"] for one in own if one["status"] == "equal"), default=0.0)
        tests = sum(len(one["names"].split()) for one in own)
        lines.append(
            f"- **{kind}**: {len(own)} configurations of {tests} tests and recipes: "
            + ", ".join(f"{number} {status}" for status, number in count.most_common())
            + f"; largest difference of an equal one {largest:.1e}"
        )
    lines += [
        "",
        "## Errors of stock that commands show",
        "",
        f"`MODEL='{' '.join(_MODEL.split())}'`",
        "",
        *shown,
        "",
        "## Reports in Megatron-LM's tracker",
        "",
        "Of the thirteen errors of number 7452, four were read.",
        "",
        "| report | `prove` |",
        "| --- | --- |",
        *(f"| {report} | {answer} |" for report, answer in REPORTS),
    ]
    for status, title in (("different", "Different"), ("failed", "Do not run"), ("hung", "Hang")):
        own = [one for one in rows if one["status"] == status]
        if not own:
            continue
        lines += ["", f"## {title}", "", "| test | run | what |", "| --- | --- | --- |"]
        for one in own:
            first, *others = one["names"].split()
            more = f" and {len(others)} more" if others else ""
            text = one["text"].replace("|", "\\|")
            lines.append(f"| {first}{more} | {one['run']} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the corpus and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="", help="only tests with this in their name")
    parser.add_argument("--results", type=Path, default=Path("prove_corpus.jsonl"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    start = time.monotonic()
    run(existing(MAIN_TAG), options.part, options.results)
    text = page(read(options.results), findings(existing(MAIN_TAG)), MAIN_TAG)
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
