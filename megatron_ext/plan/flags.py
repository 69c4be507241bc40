"""Megatron's own flags, as far as memory and time depend on them, and the job they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from .._input import attribute, flag_of, values_of
from .defaults import job_with_defaults
from .layout import check_stages
from .model import Job, PlanError
from .moe_job import check

# Fields of the job that have no flag of their own name.
_COMPUTED = {
    *("layers", "mtp_layers", "window", "recipe", "quantized_parameters"),
    *("add_bias_linear", "flash_attention", "transformer_engine", "data_parallel_size"),
    *(
        "cp_comm_type",
        "params_dtype",
        "grads_in_fp32",
        "cheap_recompute",
        "recompute_modules",
        "layout",
    ),
    *("assumptions", "vocab_parallel"),
}
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}

# Flag -> type of its value; bool is a switch. Names are pretrain_gpt.py's: those of the job's
# fields, and those that fields follow from.
FLAGS: dict[str, Any] = {
    **{
        flag_of(each.name): _TYPES[str(each.type).split(" |")[0]]
        for each in fields(Job)
        if each.name not in _COMPUTED
    },
    "--group-query-attention": bool,
    "--quick-geglu": bool,
    "--use-rotary-position-embeddings": bool,
    "--disable-bias-linear": bool,
    "--vocab-size": int,
    "--make-vocab-size-divisible-by": int,
    "--attention-backend": str,
    "--apply-query-key-layer-scaling": bool,
    "--use-flash-attn": bool,
    "--transformer-impl": str,
    "--moe-layer-freq": str,
    "--moe-layer-recompute": bool,
    "--mtp-num-layers": int,
    "--window-size": str,
    "--world-size": int,
    "--bf16": bool,
    "--fp16": bool,
    "--fp8-format": str,
    "--fp8-recipe": str,
    "--fp8-param-gather": bool,
    "--accumulate-allreduce-grads-in-fp32": bool,
    "--cp-comm-type": list,
    "--recompute-activations": bool,
    "--recompute-modules": list,
    "--pipeline-model-parallel-layout": str,
    "--pp-cheap-recompute": bool,
    "--pp-vocab-parallel": bool,
    "--overlap-grad-reduce": bool,
    "--overlap-param-gather": bool,
}

# With these the model is another one, and every number here would be wrong.
NOT_MODELLED = (
    *("--use-megatron-fsdp", "--use-torch-fsdp2", "--use-legacy-models"),
    *("--cpu-offloading", "--cpu-offloading-num-layers", "--fp32-residual-connection"),
    *("--enable-mhc-connections", "--enable-hyper-connections"),
    *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
    *("--hybrid-layer-pattern", "--hybrid-override-pattern", "--experimental-attention-variant"),
)


def add_flags(parser: argparse._ActionsContainer) -> None:
    """Add Megatron's flags; what is not given is not among the parsed arguments at all."""
    for flag, kind in FLAGS.items():
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = "store_true"
        elif kind is list:
            options.update(nargs="*", type=str)
        else:
            options["type"] = kind
        parser.add_argument(flag, **options)


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(message)


def read(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Megatron's flags of a command line, and the names of the flags that were ignored.

    Args:
        tokens: as the shell splits them; what stands before the first flag (``torchrun``, a
            script) is skipped too.

    Returns:
        Values by Megatron's argument name, and ignored flags in their order.

    Raises:
        PlanError: a value of the wrong kind, or a flag that makes the model another one.
    """
    parser = _Quiet(allow_abbrev=False, add_help=False)
    add_flags(parser)
    known, rest = parser.parse_known_args(list(tokens))
    ignored = [token.split("=", 1)[0] for token in rest if token.startswith("--")]
    why = not_modelled({**vars(known), **values_of(rest)}.get)
    if why is not None:
        raise PlanError(why)
    return vars(known), ignored


def not_modelled(value: Callable[[str], Any]) -> str | None:
    """The flags with which the model is another one than plan's; None: there are none.

    Args:
        value: of one of Megatron's arguments, by name; None: it is not given.
    """
    found = [flag for flag in NOT_MODELLED if value(attribute(flag))]
    return f"not modelled: {', '.join(found)}" if found else None


def job_of(given: dict[str, Any]) -> Job:
    """The job that Megatron's flags describe, with Megatron's defaults for what is missing.

    Args:
        given: values by Megatron's argument name, as ``read`` returns them.

    Raises:
        PlanError: a flag that is needed is missing, or two of them contradict each other.
    """
    missing = [f for f in _NEEDED if given.get(attribute(f)) is None]
    if missing:
        raise PlanError(f"plan needs {', '.join(missing)} too, as pretrain_gpt.py has them")
    job = job_with_defaults(dict(given))
    check(job)
    check_stages(job)
    return job


_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
