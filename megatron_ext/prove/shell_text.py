"""The text of a shell script: its statements, and what its ``#SBATCH`` lines say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Statement(NamedTuple):
    operator: str  # before it: "", "&&", "||"
    text: str
    line: int


def is_script(word: str) -> bool:
    """True for the name of a training script."""
    return word == "pretrain_gpt" or (word.endswith(".py") and not word.startswith("-"))


def directives(text: str) -> dict[str, int]:
    found = {}
    short = {"N": "nodes", "n": "ntasks"}
    for line in re.findall(r"^#SBATCH\s+(.*)", text, re.M):
        for name, value in re.findall(r"(?:^|\s)--?([\w-]+)(?:\s*=\s*|\s+)(\S+)", line):
            number = re.fullmatch(r"(?:\w+:)*(\d+)", value)
            if number:
                found[short.get(name, name)] = int(number[1])
    return found


def slurm_variables(found: Mapping[str, int]) -> dict[str, str]:
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
        "gres": ("SLURM_GPUS_ON_NODE",),
        "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    }
    return {name: str(n) for key, n in found.items() for name in names.get(key, ())}


def without_documents(text: str) -> str:
    """The text without here-documents, but for those that hold a command."""

    def kept(match: re.Match[str]) -> str:
        body = match[3]
        command = re.search(r"\.py\b|\b(?:srun|torchrun|python3?)\s", body)
        return match[1] + (body if command else "\n" * body.count("\n"))

    return re.sub(
        r"^([^#\n]*?)<<-?\s*['\"]?(\w+)['\"]?[^\n]*(\n.*?\n)\s*\2\s*$",
        kept,
        text,
        flags=re.M | re.S,
    )


def statements_of(text: str) -> list[Statement]:
    """Statements of a script, at newlines, ``;``, ``&&`` and ``||`` outside of quotes."""
    found: list[Statement] = []
    held, before, quote = "", "", ""
    at, line, start, depth, test = 0, 1, 1, 0, False

    def end(sign: str) -> None:
        nonlocal held, before
        if held.strip():
            found.append(Statement(before, held.strip(), start))
        # A line may end in ``&&``.
        before = sign or ("" if held.strip() else before)
        held = ""

    while at < len(text):
        one, two = text[at], text[at : at + 2]
        if not held.strip():
            start = line
        line += one == "\n"
        if one == "\\" and quote != "'":
            line += two == "\\\n"
            held += " " if two == "\\\n" else two
            at += 2
            continue
        if quote:
            quote = "" if one == quote else quote
        elif one in "'\"`":
            quote = one
        elif one == "#" and (not held or held[-1] in " \t\n(;"):
            at = len(text) if (next_line := text.find("\n", at)) < 0 else next_line
            continue
        elif two in ("[[", "]]"):
            test = two == "[["
        elif one in "()":
            depth = max(0, depth + (1 if one == "(" else -1))
        elif not depth and not test:
            if one in "\n;":
                end("")
                if two == ";;":
                    found.append(Statement("", ";;", line))
                at += 2 if two == ";;" else 1
                continue
            if two in ("&&", "||"):
                end(two)
                at += 2
                continue
        held += one
        at += 1
    end("")
    return found


def without_redirections(words: Sequence[str]) -> list[str]:
    """The words before a pipe, without files that output goes to."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("|", "&", "|&", ";"):
            if any(is_script(one) for one in kept):
                break
        elif re.fullmatch(r"(?:\d*|&)(?:>>?|<)&?", word):
            next(rest, None)
        elif word != "&&" and not re.match(r"(?:\d*|&)>", word):
            kept.append(word)
    return kept
