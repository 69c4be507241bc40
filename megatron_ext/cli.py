"""Command line: ``megatron-ext`` or ``python -m megatron_ext``.

Runs on a bare interpreter. A command is a module of ``commands`` whose ``add`` declares its parser
and sets ``run``; add it to ``_COMMANDS``. Bad input ends in one sentence on stderr and exit status
2; any other exception is a bug and stays a traceback. ``run`` returns the exit status; None is 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .commands.common import InputError, Parser
from .commands.examples import add_examples

_COMMANDS = (
    *("simulate", "schedule", "compare", "plan", "check", "show", "checkpoint", "patch", "doctor"),
    *("reproduce", "prove", "explore", "completion"),
)


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="megatron-ext", description="Pipeline schedules for stock Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"megatron-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name in _COMMANDS:
        import_module(f".commands.{name}", __package__).add(commands)
        add_examples(commands.choices[name], name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` as in ``sys.argv[1:]``. Returns the exit status."""
    parser, argv = make_parser(), sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    try:
        status: int | None = args.run(args)
        sys.stdout.flush()
    except InputError as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again at exit, when it
        # flushes stdout; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what the shell reports for a process that SIGPIPE ended
    return status or 0
