"""``megatron-ext reproduce``: the papers' tables and figures beside ours."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .._terminal import Progress
from ..reproduce import render
from ..reproduce.papers import ALL, PAPERS, Section, sections, wanted
from .common import InputError, output, user_input
from .parser import Options, Parser


def declare(parser: Parser) -> None:
    parser.set_defaults(run=_reproduce)
    parser.add_argument(
        "paper", nargs="?", default=ALL, choices=(*(p.name for p in PAPERS), ALL), metavar="PAPER",
        help=f"{', '.join(p.name for p in PAPERS)}, or all (default; some minutes)",
    )  # fmt: skip
    _OWN.declare(parser)


_OWN = Options(
    {
        "--figure NAME": "one table or figure, such as fig15; names are in --list",
        "--list": "list the tables and figures",
        "--json": "print the rows as JSON",
        "--output PAGE.md": "write a page, and plots to images/ beside it",
        "--summary": "one line for each table, no rows and no plots",
    },
    needs={"--summary": "--output"},
)


def _reproduce(args: argparse.Namespace) -> None:
    with user_input():
        tables = wanted(args.paper, args.figure)
    if args.list:
        for paper, table in tables:
            print(f"{paper.name:<20} {table.name:<20} {table.title}")
        return
    if args.output is not None and not args.output.endswith(".md"):
        raise InputError(f"--output {args.output}: a page's name ends in .md")
    with Progress("reproduce") as progress:
        found = list(sections(tables, progress))
    if args.summary:
        with output(args.output) as page:
            Path(page).write_text(render.summary_page(found), encoding="utf-8")
    elif args.output is not None:
        write_page(args.output, found)
    if args.json:
        print(json.dumps(render.to_json(found)))
    elif args.output is None:
        print(render.text(found))


def write_page(path: str, found: Sequence[Section]) -> None:
    """The page, and its plots in ``images`` beside it.

    Raises:
        InputError: they cannot be written there.
    """
    images = {}
    with output(path) as page:
        folder = Path(path).parent / "images"
        folder.mkdir(exist_ok=True)
        for section in found:
            if section.table.plot is not None:
                name = f"{section.paper.name}-{section.table.name}"
                images[name] = f"images/{name}.svg"
                drawn = section.table.plot(section.table.title, section.rows)
                (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")
        Path(page).write_text(render.page(found, images), encoding="utf-8")
