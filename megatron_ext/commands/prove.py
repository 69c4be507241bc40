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

from .common import InputError, output, positive, user_input
from .training_command import FORMS, read_command

if TYPE_CHECKING:
    from ..prove.report import Report
    from ..prove.shrink import Shrunk

_EXAMPLES = """examples:
  megatron-ext prove -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
  megatron-ext prove --from-args train.sbatch --page report.html
  megatron-ext prove --races 5 -- pretrain_gpt.py ... --pp-schedule v-half
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "prove",
        help="shrink a training command, run it on CPU ranks, name the first tensor that differs",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_prove)
    parser.add_argument("--from-args", metavar="LINE|FILE", help=FORMS)
    parser.add_argument("--script", help="training script, where the command has none")
    parser.add_argument("--world-size", type=positive, default=0, metavar="N", help="ranks of the "
                        "command, where it does not say (decides data parallelism)")  # fmt: skip
    parser.add_argument("--ranks", type=positive, default=16, metavar="N",
                        help="CPU ranks to use at most (default: 16)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="training steps "
                        "(default: 3)")  # fmt: skip
    parser.add_argument("--precision", choices=("double", "single"), default="double",
                        help="of the runs (default: double, in which nothing hides)")  # fmt: skip
    parser.add_argument("--races", type=int, default=0, metavar="N",
                        help="also run it N times with late messages and copies")  # fmt: skip
    parser.add_argument("--uneven-masks", action="store_true", help="give samples different "
                        "numbers of tokens that count, as fine-tuning data has")  # fmt: skip
    parser.add_argument("--no-bisect", action="store_true", help="do not look for the flags that "
                        "a difference needs")  # fmt: skip
    parser.add_argument("--show", action="store_true", help="print what would be run, no more")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--page", metavar="FILE", help="write an HTML page")
    parser.add_argument("--folder", metavar="DIR", help="keep logs and tensors here")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- WORDS",
                        help="the command, or the arguments of the script in FILE")  # fmt: skip


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
