"""Command line: ``megatron-ext`` or ``python -m megatron_ext``.

Runs on a bare interpreter. A command is an entry of ``commands.table`` and a module, which is
imported when the command runs. Bad input, or an answer that cannot be written, ends in
one sentence on stderr and exit status 2, Ctrl-C in one and 130; any other exception is a bug and
stays a traceback. ``run`` returns the exit status; None is 0.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .commands.parser import InputError, Parser
from .commands.table import COMMANDS
from .schedule.generators import BrokenGenerator


def make_parser(only: str | None = None) -> Parser:
    """The parser of all commands; with ``only``, of others than this one no options."""
    parser = Parser(prog="megatron-ext", description="Pipeline schedules for stock Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"megatron-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name, help=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        lines = [f"  {one.prog} {words}".rstrip() for words in command.examples]
        one.epilog = "\n".join(["examples:", *lines])
        if only in (None, name):
            import_module(f".commands.{name}", __package__).declare(one)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` as in ``sys.argv[1:]``. Returns the exit status."""
    name = "megatron-ext"
    if sys.stderr is None:  # closed by the shell
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        return _said(f"{name}: standard output is closed; send it to a file or to /dev/null", 2)
    try:
        argv = sys.argv[1:] if argv is None else argv
        parser = make_parser(argv[0] if argv else "")
        name = " ".join([name, *(word for word in argv[:1] if word in COMMANDS)])
        try:
            if not argv:
                parser.print_help()
                return 0
            words = list(argv)
            at = words.index("--") if "--" in words else len(words)
            args = parser.parse_args(words[:at])
            if at < len(words):
                if not hasattr(args, "words"):
                    raise InputError(f"takes no command after --, got {' '.join(words[at:])!r}")
                args.words = words[at + 1 :]
            status: int | None = args.run(args)
            return status or 0
        finally:
            sys.stdout.flush()  # here, where a failure still has an answer
    except (InputError, BrokenGenerator) as error:
        return _said(f"{name}: {error}", getattr(error, "status", 2))
    except KeyboardInterrupt:
        return _said(f"{name}: interrupted", 130)
    except BrokenPipeError:
        _drop_output()
        return 141  # what the shell reports for a process that SIGPIPE ended
    except OSError as error:
        # Of files that a command reads or writes, it says so itself.
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        _drop_output()
        return _said(f"{name}: cannot write to standard output: {error.strerror}", 2)


# A full disk, quota or file; a device that fails.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _said(text: str, status: int) -> int:
    print(text, file=sys.stderr)
    return status


def _drop_output() -> None:
    """Python would complain again when it flushes stdout at exit; give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
