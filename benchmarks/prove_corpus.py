"""Megatron's functional tests and Megatron-Bridge's recipes, shrunk, compared with one process.

    python3 -m benchmarks.prove_corpus [--part gpt/...] [--output DIR] [--date YYYY-MM-DD]

Every ``model_config.yaml`` below ``tests/functional_tests/test_cases`` of the newest supported
checkout. Those that are
the same after shrinking are run once; pipelines run a second time with a schedule of ours. Results
are kept in a file of JSON lines, so that a run can go on.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import page as pages
from megatron_ext.prove.patterns import stages_of
from megatron_ext.prove.server import ScriptServer
from megatron_ext.prove.session import Check, Session
from megatron_ext.prove.shrink import LAYOUT_OF_CHUNKS, PP, Shrinker, Shrunk
from megatron_ext.prove.sources import from_text
from tests.campaigns.prove_mutations import Mutation, copy, inject
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
        fix: with this changed in a copy of Megatron, it is equal.
    """

    flags: str
    uneven: bool
    why: str
    fix: Mutation


_FACTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FINDINGS = [Finding(**one | {"fix": Mutation(**one["fix"])}) for one in _FACTS["findings"]]
REPORTS: list[list[str]] = _FACTS["reports"]
"""Reports in Megatron-LM's tracker, and what `prove` says of them."""


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


def ours(case: Case, known: Collection[str]) -> Shrunk | None:
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
                rows = _rows(server, case, known, fixed=False)
                append(results, rows)
                for one in rows:
                    result = f"{one['run']:6} {one['status']:9} {one['seconds']:5} s"
                    name, text = case.names[0][:50], one["text"][:90]
                    print(f"{index:3} {result}  {name:50} {text}", flush=True)


@contextlib.contextmanager
def fixed(root: Path) -> Iterator[Path]:
    """A copy of Megatron without the errors of ``FINDINGS``."""
    with tempfile.TemporaryDirectory(prefix="fixed-") as folder:
        copy(root, Path(folder))
        for one in FINDINGS:
            inject(Path(folder), one.fix)
        yield Path(folder)


def run_fixed(root: Path, results: Path) -> None:
    """Run what differs once more, in a copy of Megatron without the errors of ``FINDINGS``."""
    rows = read(results)
    done = {one["names"] for one in rows if one["run"] == "fixed"}
    left = {one["names"] for one in rows if one["status"] == "different"} - done
    every = [case for case in cases(root, "") if " ".join(case.names) in left]
    for script in dict.fromkeys(case.script for case in every):
        with fixed(root) as tree, ScriptServer(tree / script, double=True) as server:
            known = server.flags()
            for case in (case for case in every if case.script == script):
                append(results, _rows(server, case, known, fixed=True))


def _rows(
    server: ScriptServer, case: Case, known: Collection[str], fixed: bool
) -> list[dict[str, Any]]:
    """Results of a configuration under stock, and under a schedule of ours."""
    names = " ".join(case.names)
    if isinstance(case.shrunk, str):
        return [row(names, "stock", Check("stock", "failed", case.shrunk))]
    shrunk = case.shrunk.known(known)
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        session = Session(server, shrunk, Path(scratch))
        rows = [row(names, "fixed" if fixed else "stock", session.check("stock", shrunk.stock))]
        if rows[0]["status"] == "equal" and not fixed and (mine := ours(case, known)) is not None:
            rows.append(row(names, "ours", session.check("ours", mine.flags)))
    return rows


def run_findings(root: Path, results: Path) -> None:
    """Run every finding that ``results`` has not yet: its first difference, the smallest set of
    flags, and what it is in a copy of Megatron without it."""
    done = {one["names"] for one in read(results) if one["run"] == "finding"}
    left = [one for one in FINDINGS if one.flags not in done]
    if not left:
        return
    with (
        fixed(root) as tree,
        ScriptServer(root / "pretrain_gpt.py", double=True) as server,
        ScriptServer(tree / "pretrain_gpt.py", double=True) as without,
        tempfile.TemporaryDirectory(prefix="finding-") as scratch,
    ):
        for number, one in enumerate(left):
            shrunk = Shrinker(f"{_MODEL} {one.flags}".split()).shrink()
            session = Session(server, shrunk, Path(scratch, str(number)), uneven=one.uneven)
            found = row(one.flags, "finding", session.check("stock", shrunk.stock))
            if found["status"] == "different":
                found["needed"] = " ".join(session.smallest(shrunk.stock, lambda text: None))
                again = Session(without, shrunk, Path(scratch, f"{number}b"), uneven=one.uneven)
                found["fixed"] = again.check("fixed", shrunk.stock).status
            append(results, [found])


def _finding(one: Finding, found: dict[str, Any] | None) -> list[str]:
    """Paragraphs of a page."""
    if found is None or found["status"] != "different":
        status = "not run" if found is None else f"{found['status']} {found['text']}"
        return [f"- `{one.flags}`: {status}"]
    uneven = " --uneven-masks" * one.uneven
    return [
        f"### `{found['needed']}`",
        f"{one.why} Fixed there (`{one.fix.file}`): {found['fixed']}.",
        f"    megatron-ext prove{uneven} -- pretrain_gpt.py $MODEL {one.flags}\n"
        f"    {found['text']}",
    ]


def read(results: Path) -> list[dict[str, Any]]:
    """The lines of a results file."""
    return [json.loads(x) for x in results.read_text().splitlines()] if results.exists() else []


def append(results: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add lines to a results file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


def page(results: Path, date: str, every: int) -> str:
    """The results in Markdown.

    Args:
        every: configurations in all.
    """
    rows = read(results)
    ran = sum(one["run"] == "stock" for one in rows)
    shown = {one["names"]: one for one in rows if one["run"] == "finding"}
    again = {one["names"]: one["status"] for one in rows if one["run"] == "fixed"}
    rows = [one for one in rows if one["run"] in ("stock", "ours")]
    counts = []
    for kind in ("stock", "ours"):
        own = [one for one in rows if one["run"] == kind]
        largest = max((one["largest"] for one in own if one["status"] == "equal"), default=0.0)
        found = Counter(one["status"] for one in own).most_common()
        counts.append(
            f"- **{kind}**: {len(own)} configurations of "
            f"{sum(len(one['names'].split()) for one in own)} tests and recipes: "
            + ", ".join(f"{number} {status}" for status, number in found)
            + f"; largest difference of an equal one {largest:.1e}"
        )
    parts: list[Any] = [
        "# Megatron's functional tests and Megatron-Bridge's recipes, proved",
        f"Made {date} by `python3 -m benchmarks.prove_corpus` on CPU ranks with Megatron "
        f"{MAIN_TAG}, in float64, three steps each. *equal*: every output, gradient, weight and "
        "moment is one process's within rounding. A configuration that several share after "
        f"shrinking is run once. All rows: [results/{results.name}](results/{results.name}).",
        f"Not complete: {ran} of {every} configurations ran." if ran < every else "",
        counts,
        "## Errors of stock that commands show",
        f"`MODEL='{' '.join(_MODEL.split())}'`",
        *(text for one in FINDINGS for text in _finding(one, shown.get(one.flags))),
        "## Reports in Megatron-LM's tracker",
        pages.grid(("report", "`prove`"), REPORTS),
    ]
    for status, title in (("different", "Different"), ("failed", "Do not run"), ("hung", "Hang")):
        own: dict[tuple[str, str], list[str]] = {}  # tests by what they report
        for one in rows:
            if one["status"] == status:
                text = one["text"].replace("|", "\\|").replace("one process: ", "")
                if status == "different":
                    text += f"; without the errors above: {again.get(one['names'], 'not run')}"
                own.setdefault((text, one["run"]), []).extend(one["names"].split())
        if own:
            cells = ((*what, ", ".join(names)) for what, names in own.items())
            parts += [f"## {title}", pages.grid(("what", "run", "tests"), cells)]
    return pages.text_of(*parts)


def main() -> int:
    """Run the corpus, go on where its results end, and write the page."""
    args = pages.parser_of(
        __doc__,
        part=("", "only tests with this in their name"),
        no_findings=(False, "leave the errors of stock out"),
    ).parse_args()
    root = existing(MAIN_TAG)
    results = args.output / "results" / f"{args.date}-prove-corpus.jsonl"
    if args.page_of is None:
        run(root, args.part, results)
        run_fixed(root, results)
        if not args.no_findings:
            run_findings(root, results)
    else:
        results, args.date = args.page_of, args.page_of.name[:10]
    text = page(results, args.date, len(cases(root, args.part)))
    (args.output / "prove_corpus.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
