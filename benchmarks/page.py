"""What all benchmarks share: options, files of results, and pages of tables and verdicts.

A ``Benchmark`` writes ``results/DATE-NAME.json`` and ``NAME.md``; with ``--page-of FILE`` it writes
the page of earlier results. Needs a bare Python.
"""

from __future__ import annotations

import argparse
import json
import numbers
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
Key = TypeVar("Key")
Found = TypeVar("Found")
# A column's cells: a format string of a row's fields, or a function of the row.
Columns = Mapping[str, str | Callable[[Any], object]]


class Claim(NamedTuple):
    """One line of verdicts. ``holds`` is None for what is only measured."""

    what: str
    measured: str
    holds: bool | None
    expected: str = ""
    group: str = ""


def parser_of(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """The options of a benchmark: its own, where results go, what they say of the run.

    Args:
        doc: the benchmark's docstring.
        options: default, or default and help, by name; False is a switch.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", maxsplit=1)[0])
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--machine", default=f"{os.cpu_count()} shared cores", help="in words")
    parser.add_argument(
        "--page-of",
        type=Path,
        metavar="FILE",
        help="earlier results; runs nothing",
    )
    return parser


@dataclass(frozen=True)
class Benchmark:
    """One command with a page.

    Attributes:
        name: of its results and, with ``_`` for ``-``, of its module and page.
        doc: of its module.
        title: of its page.
        what: what was run, for the page's first line, by the results.
        body: the rest of the page, by the results: paragraphs and tables.
        measure: the results alone. Numbers and words among its arguments are added.
        options: as of ``parser_of``.
        packages: whose versions matter; with one, the priority of processes does, too.
        claims: by the results; ``--check`` then exits with 1 if one does not hold.
    """

    name: str
    doc: str | None
    title: str
    what: Callable[[Row], str]
    body: Callable[[Row], Iterable[str | Iterable[str]]]
    measure: Callable[[argparse.Namespace], Row]
    options: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()
    claims: Callable[[Row], list[Claim]] | None = None

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure, write results and page; returns the exit status."""
        return self.run(self.parser().parse_args(argv))

    def parser(self) -> argparse.ArgumentParser:
        """Of the command line."""
        parser = parser_of(self.doc, **self.options)
        if self.claims is not None:
            parser.add_argument("--check", action="store_true", help="exit with 1 on a miss")
        return parser

    def run(self, args: argparse.Namespace) -> int:
        """As ``main``, with parsed arguments."""
        if args.page_of is None:
            (args.output / "results").mkdir(parents=True, exist_ok=True)
            started, before = time.perf_counter(), load()
            found = self.measure(args)
            data = about(args, self.packages) | found
            data.setdefault("load", f"{before} before and {load()} after")
            data.setdefault("seconds", round(time.perf_counter() - started, 1))
            save(args, self.name, data)
        else:
            data = json.loads(args.page_of.read_text(encoding="utf-8"))
            data["results"] = f"results/{args.page_of.name}"
        self.write(args.output, data)
        return 0 if self.claims is None else missed(args, self.claims(data))

    def write(self, folder: Path, data: Row) -> None:
        """The page of results; ``body`` finds other results in ``data["folder"]``."""
        data, name = {**data, "folder": folder}, self.name.replace("-", "_")
        text = text_of(head(self.title, data, name, self.what(data)), *self.body(data))
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def about(args: argparse.Namespace, packages: Sequence[str] = ()) -> Row:
    """What results say of their run."""
    words = ("check", "output", "page_of", "resume")
    given = {key: value for key, value in vars(args).items() if key not in words}
    found: Row = {"python": platform.python_version()}
    found |= {name.removesuffix("-core"): metadata.version(name) for name in packages}
    if packages:
        found["priority"] = _priority()
    for key, value in given.items():
        if isinstance(value, (str, int, float)):
            found[key] = value
        elif isinstance(value, numbers.Real):
            found[key] = float(value)
    return found


def save(args: argparse.Namespace, name: str, data: Row) -> None:
    """Write results/DATE-NAME.json; ``data`` gets its name."""
    data["results"] = f"results/{args.date}-{name}.json"
    target = args.output / data["results"]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(lines(data), encoding="utf-8")


def lines(data: Row) -> str:
    """JSON with one line an item of a list, so that two runs can be compared with diff."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, (list, tuple)) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def newest(folder: Path, name: str) -> Row | None:
    """The newest results with a name below ``folder``; None if there are none."""
    found = sorted((folder / "results").glob(f"????-??-??-{name}.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def load() -> str:
    """Average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _priority() -> str:
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return "real-time priority"
    return f"nice {os.nice(0)}"


def alternating(
    steps: Mapping[Key, Callable[[], Found]], rounds: int, warm: int = 1
) -> dict[Key, list[Found]]:
    """What ``steps`` return, in turn, round by round; ``warm`` rounds before do not count."""
    found: dict[Key, list[Found]] = {key: [] for key in steps}
    for number in range(warm + rounds):
        for key, step in steps.items():
            result = step()
            if number >= warm:
                found[key].append(result)
    return found


def ratio(ours: list[float], base: list[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(ours, base))


def head(title: str, data: Row, command: str, what: str) -> list[str]:
    """A page's title, and the line that says what was run, when and on what."""
    versions = {"python": "Python", "torch": "torch", "megatron": "megatron-core"}
    on = [f"{text} {data[key]}" for key, text in versions.items() if data.get(key)]
    on += [data["machine"]] if "machine" in data else []
    on += [f"ranks at {data['priority']}"] if "priority" in data else []
    on += [f"load {data['load']}"] if "load" in data else []
    on += [f"{data['seconds']:.0f} s"] if "seconds" in data else []
    rows = f" All rows: [{data['results']}]({data['results']})." if "results" in data else ""
    line = f"`python -m benchmarks.{command}`, {data['date']}: {what}; {', '.join(on)}.{rows}"
    return [f"# {title}", "", line]


_NUMBER = re.compile(r"([-+*~]*\d[-+\d.,e]*( ?%)?\**( \([-+\d.,% ]+\))?)?")


def grid(heads: Sequence[str], cells: Iterable[Sequence[object]]) -> list[str]:
    """A table; columns of numbers are aligned to the right."""
    lines = [[str(cell) for cell in line] for line in cells]
    marks = [
        "--:" if lines and all(_NUMBER.fullmatch(line[at]) for line in lines) else "---"
        for at in range(len(heads))
    ]
    return [f"| {' | '.join(line)} |" for line in (list(heads), marks, *lines)]


def table(columns: Columns, rows: Iterable[Any]) -> list[str]:
    """A table with ``columns`` of ``rows``."""
    cells = [cell.format_map if isinstance(cell, str) else cell for cell in columns.values()]
    return grid(list(columns), ([cell(row) for cell in cells] for row in rows))


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """A table of claims."""
    marks = {True: "holds", False: "**missed**", None: "measured"}
    expected = any(claim.expected for claim in claims)
    heads = ["to be shown", *["expected"] * expected, "measured", ""]
    return grid(
        heads,
        ((one.what, *[one.expected] * expected, one.measured, marks[one.holds]) for one in claims),
    )


def missed(args: argparse.Namespace, claims: Iterable[Claim]) -> int:
    """Print the claims that do not hold; the exit status, which is 0 without ``--check``."""
    failed = [claim for claim in claims if claim.holds is False]
    for claim in failed:
        group = f", {claim.group}" if claim.group else ""
        print(f"missed{group}: {claim.what}: {claim.measured}")
    return int(args.check and bool(failed))


def text_of(*parts: str | Iterable[str]) -> str:
    """A page: paragraphs as they are, tables line by line, an empty line between."""
    found = (part if isinstance(part, str) else "\n".join(part) for part in parts)
    return "\n\n".join(filter(None, found)) + "\n"
