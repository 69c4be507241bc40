"""Models of ``plan`` from flags and from a file."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from .._input import attribute, flag_of, values_of
from ..plan.divisions import SIZES
from ..plan.flags import FLAGS, add_flags, read
from ..plan.huggingface import read_config
from . import training_command
from .parser import Options, Parser


def declare(parser: Parser) -> None:
    """Megatron's flags, one by one or as a line, and files that describe a model."""
    training_command.declare(parser)
    _FILES.declare(parser)
    add_flags(parser.add_argument_group("model and division"))


_FILES = Options(
    {
        "--hf-config FILE": "a Hugging Face model's config.json; flags win",
    }
)


def given(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[str]]:
    """Megatron's arguments by name, flags that were ignored, and where the model is from."""
    found, notes = ({}, []) if args.hf_config is None else read_config(args.hf_config)
    line, ignored = from_line(args)
    found |= line
    if args.pp is not None:
        found["pipeline_model_parallel_size"] = args.pp
    return found, ignored, notes


def from_line(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Of ``--from-args`` and the flags beside it; and the names of the flags that were ignored."""
    command = args.from_args
    found, rest = read(command.flags if command else [])
    ignored = [flag for flag in rest if attribute(flag) not in _READ]
    found |= {n: v for n, v in vars(args).items() if n in _KNOWN}
    if command and command.world:
        found.setdefault("world_size", command.world)
    return found, ignored


_KNOWN = {attribute(name) for name in FLAGS}


def values_given(args: argparse.Namespace) -> dict[str, Any]:
    """Values by name of the flags that ``--from-args`` has; none without it."""
    return {} if args.from_args is None else values_of(args.from_args.flags)


VIRTUAL = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
# Of the user's own run, though no job has them.
_READ = (*VIRTUAL, "pp_schedule")
# Megatron takes none of these beside a layout.
UNEVEN = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def model_flags(args: argparse.Namespace, given: dict[str, Any]) -> list[str]:
    """Megatron's flags of a model from a file; empty for one that was given as flags."""
    if args.hf_config is None:
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
