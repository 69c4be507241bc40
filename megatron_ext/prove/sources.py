"""Where a training command comes from: words, a batch script, a test's YAML, a recipe's JSON.

Nothing is executed. Of a shell script, assignments and arrays are followed, conditions and loops
are not: the last assignment counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ext._input import parse_json

MOST_WORDS = 5000


class Command(NamedTuple):
    """A training command.

    Attributes:
        script: its path; empty: not known.
        flags: of the script.
        world: ranks; 0: not known.
        other: it was written for another front end or version, whose flags may be unknown here.
    """

    script: str
    flags: list[str]
    world: int = 0
    other: bool = False


def from_words(words: Sequence[str]) -> Command:
    """``[torchrun ... | srun ... | python -m megatron_ext.launch ...] SCRIPT FLAGS...``.

    Raises:
        ValueError: there is no script in it.
    """
    at = next((i for i, word in enumerate(words) if _is_script(word)), None)
    if at is None:
        raise ValueError("no training script (a word that ends in .py, or pretrain_gpt) in it")
    return Command(words[at], list(words[at + 1 :]), _world(words[:at]))


def _is_script(word: str) -> bool:
    return word == "pretrain_gpt" or (word.endswith(".py") and not word.startswith("-"))


def _world(words: Sequence[str]) -> int:
    """Ranks as torchrun or srun are given them."""
    found = {}
    text = " ".join(words)
    for name, value in re.findall(r"--?(nproc[-_]per[-_]node|nnodes|ntasks|n)[= ](\d+)", text):
        found[name.replace("_", "-")] = int(value)
    if "nproc-per-node" in found:
        return found["nproc-per-node"] * found.get("nnodes", 1)
    return found.get("ntasks", found.get("n", 0))


def from_text(text: str) -> Command:
    """A file's command: JSON of a recipe, YAML of one of Megatron's tests, or a shell script.

    Raises:
        ValueError: it is none of them.
    """
    if text.lstrip().startswith("{"):
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError("a recipe's JSON is an object")
        return from_settings(value)
    if re.search(r"^MODEL_ARGS:\s*$", text, re.M):
        return from_yaml(text)
    return from_shell(text)


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


_ARRAY = re.compile(r"\s*(?:export\s+|local\s+)?(\w+)(\+?)=\((.*)\)\s*", re.S)
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+)?(\w+)(\+?)=(\S.*?|)\s*;?\s*", re.S)


def from_shell(text: str) -> Command:
    """The command of a shell or batch script that runs a training script.

    Raises:
        ValueError: no command in it does, or a variable of it is not known.
    """
    variables: dict[str, list[str]] = {}
    tasks = {
        name: int(n)
        for name, n in re.findall(
            r"^#SBATCH.*?--(nodes|ntasks|ntasks-per-node|gpus-per-node)[= ](\d+)", text, re.M
        )
    }
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    found: list[str] | None = None
    for line in _lines(text):
        if match := _ARRAY.fullmatch(line):
            name, more, body = match.groups()
            body = re.sub(r"(?:^|\s)#.*$", " ", body, flags=re.M)
            own = _expand(body.replace("\n", " "), variables)
            variables[name] = (variables.get(name, []) if more else []) + own
        elif match := _ASSIGNMENT.fullmatch(line):
            name, more, body = match.groups()
            own = _expand(body.replace("\n", " "), variables)
            variables[name] = (variables.get(name, []) if more else []) + [" ".join(own)]
        else:
            words = [
                one
                for word in _expand(line.replace("\n", " "), variables)
                # As in ``bash -c "python train.py ..."``.
                for one in (shlex.split(word) if re.search(r"\.py\s", word) else [word])
            ]
            if any(_is_script(word) for word in words):
                found = words
    if found is None:
        raise ValueError("no command in it runs a training script (a word that ends in .py)")
    command = from_words([word for word in found if word not in ("&", "|", ";", "&&")])
    nodes = tasks.get("nodes", 1)
    each = tasks.get("ntasks-per-node", tasks.get("gpus-per-node", 0))
    return command._replace(world=command.world or tasks.get("ntasks", nodes * each))


def _lines(text: str) -> list[str]:
    """Lines, with those together that an open quote or bracket joins."""
    lines, held = [], ""
    for line in text.splitlines():
        held = f"{held}\n{line}" if held else line
        bare = re.sub(r"\\.|'[^']*'|\"[^\"]*\"", "", held, flags=re.S)
        if "'" in bare or '"' in bare or re.search(r"=\([^)]*$", bare):
            continue
        lines.append(held)
        held = ""
    return [*lines, held] if held else lines


_VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\]|\[\*\])?(?::?-([^}]*))?\}|\$(\w+)")


def _expand(text: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words of a line, variables replaced; an unknown one is an empty text."""
    # ``"${A[@]}"`` is as many words as the array has.
    whole = re.compile(r'"\$\{(\w+)\[@\]\}"')
    text = whole.sub(lambda m: " ".join(map(shlex.quote, variables.get(m.group(1), []))), text)

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2) or ""
        return " ".join(variables[name]) if name in variables else default

    for _ in range(5):
        text = _VARIABLE.sub(value, text)
    text = re.sub(r"\$\(\((.*?)\)\)", _arithmetic, text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    if len(words) > MOST_WORDS:
        raise ValueError(f"a command of more than {MOST_WORDS} words")
    return words


def _arithmetic(match: re.Match[str]) -> str:
    """Products and quotients of whole numbers; anything else stays as it stands."""
    parts = re.split(r"([*/])", match.group(1).replace(" ", ""))
    if not all(part.isdigit() or part in "*/" for part in parts) or not parts[0].isdigit():
        return match.group(0)
    result = int(parts[0])
    for sign, part in zip(parts[1::2], parts[2::2], strict=False):
        result = result * int(part) if sign == "*" else result // max(1, int(part))
    return str(result)


# Settings of a model provider or its neighbours whose flag is not their name with hyphens.
_NAMES = {
    "num_moe_experts": "--num-experts",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "layernorm_epsilon": "--norm-epsilon",
}
_ONLY_TRUE = {
    "qk_layernorm": "--qk-layernorm",
    "add_qkv_bias": "--add-qkv-bias",
    "gated_linear_unit": "--swiglu",
}
_ONLY_FALSE = {
    "add_bias_linear": "--disable-bias-linear",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}


def from_settings(settings: Mapping[str, Any]) -> Command:
    """A Megatron-Bridge recipe's settings (``model``, ``train``, ``ddp``, ``optimizer`` ...).

    Fields become the flags of their names; fields that hold functions or classes are left out.
    """
    flags: list[str] = []
    fields: dict[str, Any] = {}
    for part in ("model", "train", "ddp", "optimizer"):
        one = settings.get(part, {})
        if isinstance(one, Mapping):
            fields |= {name: value for name, value in one.items() if name not in fields}
    if not fields:
        fields = dict(settings)
    for name, value in fields.items():
        if name.startswith("_") or value is None or isinstance(value, dict):
            continue
        if name in _ONLY_FALSE or name in _ONLY_TRUE:
            wanted = name in _ONLY_TRUE
            if value is wanted:
                flags.append(_ONLY_FALSE.get(name) or _ONLY_TRUE[name])
            continue
        flag = _NAMES.get(name, "--" + name.replace("_", "-"))
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, str(value)] if "freq" in name else [flag, *map(str, value)]
        elif value is not False and isinstance(value, int | float | str):
            flags += [flag, str(value)]
    if "--num-query-groups" in flags:
        flags.append("--group-query-attention")
    world = settings.get("world_size", 0)
    return Command("", flags, world if isinstance(world, int) else 0, True)
