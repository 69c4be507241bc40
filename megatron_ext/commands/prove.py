"""``megatron-ext prove``: does a training command compute what one process would?"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .common import InputError, output, user_input
from .parser import JSON, Options, Parser, positive
from .training_command import FORMS, read_command

if TYPE_CHECKING:
    from ..prove.report import Report
    from ..prove.shrink import Shrunk


def declare(parser: Parser) -> None:
    parser.set_defaults(run=_prove)
    _OWN.declare(parser)
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- WORDS",
                        help="the command, or the arguments of the script in FILE")  # fmt: skip


_OWN = Options(
    {
        "--from-args LINE|FILE": FORMS,
        "--script SCRIPT": "training script, where the command has none",
        "--world-size N": "ranks of the command, where it does not say (decides data parallelism)",
        "--ranks N": "CPU ranks to use at most (default: 16)",
        "--steps N": "training steps (default: 3)",
        "--precision": "of the runs (default: double, in which nothing hides)",
        "--races N": "also run it N times with late messages and copies",
        "--uneven-masks": "give samples different numbers of tokens that count, as fine-tuning "
        "data has",
        "--no-bisect": "do not look for the flags that a difference needs",
        "--show": "print what would be run, no more",
        **JSON.help,
        "--page FILE": "write an HTML page",
        "--folder DIR": "keep logs and tensors here",
    },
    kinds={
        **dict.fromkeys(("--world-size", "--ranks", "--steps"), positive),
        **{"--races": int, "--precision": ("double", "single")},
    },
    defaults={
        **{"--world-size": 0, "--ranks": 16, "--steps": 3},
        **{"--races": 0, "--precision": "double"},
    },
)


def _prove(args: argparse.Namespace) -> int:
    from ..prove import shrink
    from ..prove.shell_text import is_script
    from ..prove.sources import from_words, launched

    words = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if bool(words) == bool(args.from_args) and (not words or any(map(is_script, words))):
        raise InputError("give the command after --, or with --from-args LINE|FILE")
    if args.steps < 2:
        raise InputError(f"--steps {args.steps}: the checkpoint is resumed after one; 2 or more")
    if args.races < 0:
        raise InputError(f"--races {args.races}: a number of runs, 0 or more")
    if args.from_args:
        # After --, a script's own arguments; without --, they are not known.
        command = read_command(args.from_args, words if args.command_line else None)
    else:
        with user_input():
            command = from_words(words)
    script = _script(args.script or command.script or "pretrain_gpt")
    with user_input():
        command = launched(command)
        world = args.world_size or command.world
        shrunk = shrink.Shrinker(command.flags, world, args.ranks, args.steps).shrink()
    for note in command.notes:
        print(f"assumed: {note}", file=sys.stderr)
    if args.show:
        print(shrunk.given)
        print(f"{shrunk.world} ranks: {script} {' '.join(shrunk.flags.words)}")
        return 0
    with contextlib.ExitStack() as stack:
        if args.folder:
            folder = Path(args.folder)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prove-")))
        if not args.json:
            print(shrunk.given, flush=True)
        report = _run(args, script, shrunk, folder.resolve(), command.other)
    if args.page:
        with output(args.page) as path:
            Path(path).write_text(report.page, encoding="utf-8")
    print(json.dumps(report.json) if args.json else report.text)
    return 0 if report.equal else 1


def _script(text: str) -> Path:
    from ..launch import LaunchError, _resolve_script

    try:
        return _resolve_script(text)
    except LaunchError as error:
        raise InputError(str(error)) from None


def _run(
    args: argparse.Namespace, script: Path, shrunk: Shrunk, folder: Path, other: bool
) -> Report:
    """Start the ranks' server and make the report; ``other``: flags may be unknown here."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("training on CPU ranks needs torch, which is not installed")
    from ..prove.report import make
    from ..prove.server import ScriptServer
    from ..prove.session import Session

    # Megatron warns of every optional package that is not installed.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    start = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    progress(f"importing {script.name}")
    with ScriptServer(script, double=args.precision == "double") as server:
        if other:
            shrunk = shrunk.known(server.flags())
        session = Session(server, shrunk, folder, args.precision, uneven=args.uneven_masks)
        return make(session, shrunk, args.races, not args.no_bisect, progress)
