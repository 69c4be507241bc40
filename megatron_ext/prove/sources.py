"""Where a training command comes from: words, a batch script, a test's YAML.

Nothing is executed. What a script's command needs and cannot be known so is an error.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from .flags import Flags
from .shell import words_of
from .shell_text import is_script


class Command(NamedTuple):
    """A training command.

    Attributes:
        script: its path; empty: not known.
        flags: of the script.
        world: ranks; 0: not known.
        other: it was written for another front end or version, whose flags may be unknown here.
        notes: what was assumed in reading it.
        given: the line or the file that it was read from, as the user named it.
    """

    script: str
    flags: list[str]
    world: int = 0
    other: bool = False
    notes: tuple[str, ...] = ()
    given: str = ""

    def __str__(self) -> str:
        return self.given


def launched(command: Command) -> Command:
    """``command`` without ``--world-size``, which ``plan`` takes and no training script does: its
    ranks.

    Raises:
        ValueError: its value is no number.
    """
    flags = Flags(command.flags)
    if "--world-size" not in flags:
        return command
    world = flags.number("--world-size", command.world)
    flags.drop("--world-size")
    return command._replace(flags=flags.words, world=world)


def from_line(words: Sequence[str]) -> Command:
    """As ``from_words``; a line may also begin with its first flag."""
    if any(map(is_script, words)):
        return from_words(words)
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return Command("", list(words[first:]))


def from_words(words: Sequence[str]) -> Command:
    """``[torchrun ... | srun ... | python -m megatron_ext.launch ...] SCRIPT FLAGS...``.

    Raises:
        ValueError: there is no script in it.
    """
    at = next((i for i, word in enumerate(words) if is_script(word)), None)
    if at is None:
        raise ValueError("no training script (a word that ends in .py, or pretrain_gpt) in it")
    return Command(words[at], list(words[at + 1 :]), _world(words[:at]))


def _world(words: Sequence[str]) -> int:
    """Ranks as torchrun or srun are given them; 0: not known."""
    found = {}
    text = " ".join(words)
    for name, value in re.findall(
        r"(?:^|\s)--?(nproc[-_]per[-_]node|nnodes|ntasks|n)[= ](\S+)", text
    ):
        if not value.isdigit():
            return 0
        found[name.replace("_", "-")] = int(value)
    if "nproc-per-node" in found:
        return found["nproc-per-node"] * found.get("nnodes", 1)
    return found.get("ntasks", found.get("n", 0))


def from_text(text: str, arguments: Sequence[str] | None = None) -> Command:
    """A file's command: Megatron's test YAML, or a shell script.

    Args:
        text: the file's.
        arguments: those of a shell script; None: not known.

    Raises:
        ValueError: it is none of them, or what decides the run is not known from it.
    """
    test = re.search(r"^MODEL_ARGS:\s*$", text, re.M)
    if test and arguments:
        raise ValueError(f"{arguments[0]!r}: only a shell script has arguments of its own after --")
    if test:
        return from_yaml(text)
    return from_shell(text, arguments)


def from_yaml(text: str) -> Command:
    """The ``MODEL_ARGS`` of a configuration of Megatron's functional tests, and its ranks."""
    sections: dict[str, list[str]] = {}  # by key, and by anchor
    flags: list[str] = []
    world = 0
    for line in text.splitlines():
        if match := re.match(r"([A-Z_0-9]+):\s*(?:&(\w+))?", line):
            flags = sections[match.group(1)] = []
            sections[match.group(2) or ""] = flags
        elif match := re.match(r"\s+(?:WORLD_SIZE|N_GPUS|NPROC_PER_NODE): *(\d+)", line):
            world = int(match.group(1))
        elif match := re.match(r"\s+<<: *\*(\w+)", line):
            flags += sections.get(match.group(1), [])
        elif match := re.match(r"\s+(--[^:\s]+):\s*(.*?)\s*$", line):
            name, value = match.group(1), re.sub(r"(?:^|\s)#.*$", "", match.group(2))
            value = value.strip("'\"")
            if value.lower() != "false":
                flags += [name] if value.lower() == "true" else [name, *_words(name, value)]
    if not sections.get("MODEL_ARGS"):
        raise ValueError("no flags under MODEL_ARGS")
    return Command("", sections["MODEL_ARGS"], world, True)


def _words(name: str, value: str) -> list[str]:
    """The words of a YAML value; a list of frequencies is one, as Megatron reads it."""
    if name.endswith("-freq"):
        return [value]
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1].replace(",", " ")
    return shlex.split(value)


def from_shell(text: str, arguments: Sequence[str] | None = None) -> Command:
    """The command of a shell or batch script that runs a training script.

    Args:
        text: the script's.
        arguments: the script's own; None: not known.

    Raises:
        ValueError: no command in it does, or what decides the run is not known.
    """
    words, slurm, notes = words_of(text, os.environ, arguments)
    command = from_words(words)._replace(notes=notes)
    each = slurm.get("ntasks-per-node", slurm.get("gpus-per-node", 0))
    return command._replace(
        world=command.world or slurm.get("ntasks", slurm.get("nodes", 1) * each)
    )
