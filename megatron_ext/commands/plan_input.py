"""Models of ``plan`` from files."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from .._input import flag_of
from ..plan.divisions import SIZES
from ..plan.inputs.arguments import read_checkpoint, read_recipe
from ..plan.inputs.huggingface import read_config
from ..plan.model import PlanError

_READERS = {
    "hf_config": read_config,
    "bridge_config": read_recipe,
    "checkpoint": read_checkpoint,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the model comes from, beside Megatron's flags."""
    parser.add_argument(
        "--hf-config", metavar="FILE", help="a Hugging Face model's config.json; flags win"
    )
    parser.add_argument(
        "--bridge-config", metavar="FILE", help="a Megatron-Bridge recipe's settings: "
        "ConfigContainer.to_dict() as JSON; flags win"
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="what --save named: the arguments saved there; "
        "flags win"
    )  # fmt: skip


def read_file(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Megatron's arguments of the file that was given, and a note; both empty without one.

    Raises:
        PlanError: as the readers of ``plan.inputs``; or several files are given.
    """
    files = {name: getattr(args, name) for name in _READERS if getattr(args, name) is not None}
    if len(files) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in files)
        raise PlanError(f"{flags} each describe a model; give one of them")
    for name, path in files.items():
        found, notes = _READERS[name](path)
        return {key: value for key, value in found.items() if value is not None}, notes
    return {}, []


def model_flags(args: argparse.Namespace, given: dict[str, Any]) -> list[str]:
    """Megatron's flags of a model from a file; empty for one that was given as flags."""
    if all(getattr(args, name) is None for name in _READERS):
        return []
    words = []
    for name, value in given.items():
        if name in (*SIZES, *_OURS) or value is False:
            continue
        if isinstance(value, list):
            value = " ".join(map(str, value))
        text = "" if value is True else f" {shlex.quote(str(value))}"
        words.append(flag_of(name) + text)
    return words


# What the answer's own flags say, or a launcher.
_OURS = ("micro_batch_size", "world_size", "sequence_parallel", "use_distributed_optimizer")
