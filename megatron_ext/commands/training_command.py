"""``--from-args``: a training command as people have it, read in one way for every command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._input import read_text, reason, shown
from .common import InputError

if TYPE_CHECKING:
    from ..prove.sources import Command

FORMS = (
    "a command line with its flags, or a file: a shell or batch script (read, never run; its "
    "arguments may follow it, as in 'train.sh 4 8'), or YAML of Megatron's tests"
)


def read_command(given: str, arguments: Sequence[str] | None = None) -> Command:
    """The training command that ``--from-args`` names; also an argparse type.

    Args:
        given: a line, or the path of a file; behind a script's, its arguments.
        arguments: of a script; None: not known.

    Raises:
        InputError: it is neither, or what decides the run is not known from it.
    """
    from ..prove.sources import from_line, from_text

    file = given if os.path.isfile(given) else ""
    try:
        words = [] if file else shlex.split(given.replace("\\\n", " "), comments=True)
        script = words[1:] if words[:1] in (["bash"], ["sh"], ["sbatch"]) else words
        if script and not script[0].endswith(".py") and os.path.isfile(script[0]):
            file, arguments = script[0], script[1:] or arguments
        if file:
            return from_text(read_text(file), arguments)._replace(given=given)
    except OSError as error:
        raise InputError(f"cannot read --from-args {file}: {reason(error)}") from None
    except ValueError as error:
        what = file or "cannot be split into words"
        raise InputError(f"--from-args {what}: {error}") from None
    if words and not any(word.startswith("--") for word in words):
        raise InputError(f"--from-args {shown(given)} is no file, and no flag (--name) is in it")
    if arguments:
        raise InputError(f"{arguments[0]!r}: only a shell script has arguments of its own after --")
    return from_line(words)._replace(given=given)
