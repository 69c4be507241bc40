"""A training command: ``-- torchrun ... SCRIPT FLAGS``, or a line of flags."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from .parser import InputError, Parser

_RANKS = re.compile(r"(?:^|\s)--?(nproc[-_]per[-_]node|nnodes|ntasks|n)[= ](\S+)")


class Command(NamedTuple):
    """A training command.

    Attributes:
        script: its path; empty: not known.
        flags: of the script.
        world: ranks; 0: not known.
    """

    script: str
    flags: list[str]
    world: int = 0


def declare(parser: Parser) -> None:
    """Take words after ``--``, or ``--from-args``."""
    parser.usage = f"{parser.prog} [options] [-- torchrun ... SCRIPT FLAGS]"
    parser.add_argument(
        "--from-args", metavar="FLAGS", type=from_line,
        help="a line of Megatron's flags, in place of the command after --; in a script write "
        f"`{parser.prog} --` before torchrun or srun",
    )  # fmt: skip
    parser.set_defaults(words=[])


def command_of(args: argparse.Namespace) -> Command | None:
    """The command that the options give; None: there is none.

    Raises:
        InputError: it is given twice, or has no training script.
    """
    given: Command | None = args.from_args
    if args.words and given is not None:
        raise InputError("the command stands after -- and in --from-args; give one of them")
    return from_words(args.words) if args.words else given


def from_line(text: str) -> Command:
    """Flags in one text, which may begin with a launcher and a script; also an argparse type."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"cannot be split into words: {error}") from None
    if any(map(_is_script, words)):
        return _with_world(from_words(words))
    first = next((i for i, word in enumerate(words) if word.startswith("--")), None)
    if words and first is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no flag (--name)")
    return _with_world(Command("", words[first or 0 :]))


def _with_world(command: Command) -> Command:
    """``command`` with the ranks of ``--world-size``, which no training script takes."""
    flags = list(command.flags)
    if "--world-size" in flags[:-1]:
        at = flags.index("--world-size")
        if flags[at + 1].isdigit():
            command = command._replace(world=int(flags[at + 1]))
            del flags[at : at + 2]
    return command._replace(flags=flags)


def from_words(words: Sequence[str]) -> Command:
    """``[torchrun ... | srun ... | python -m torch.distributed.run ...] SCRIPT FLAGS ...``.

    Raises:
        InputError: there is no script in it.
    """
    at = next((i for i, word in enumerate(words) if _is_script(word)), None)
    if at is None:
        raise InputError(
            f"{shlex.join(words[:6])}: no training script (a word that ends in .py, or "
            "pretrain_gpt) is in it"
        )
    return Command(words[at], list(words[at + 1 :]), _world(words[:at]))


def _is_script(word: str) -> bool:
    return word == "pretrain_gpt" or (word.endswith(".py") and not word.startswith("-"))


def _world(words: Sequence[str]) -> int:
    """Ranks as torchrun or srun are given them, or of the Slurm job; 0: not known."""
    found = {name.replace("_", "-"): value for name, value in _RANKS.findall(" ".join(words))}
    if any(not value.isdigit() for value in found.values()):
        return 0
    if "nproc-per-node" in found:
        return int(found["nproc-per-node"]) * int(found.get("nnodes", 1))
    tasks = os.environ.get("SLURM_NTASKS", "") if any(w.endswith("srun") for w in words) else ""
    return int(found.get("ntasks") or found.get("n") or (tasks if tasks.isdigit() else 0))
