"""The user's own flags in ``plan``: the pipeline they run, and how an answer differs from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._input import attribute, flag_of
from ..plan.collectives import Overlap
from ..plan.divisions import SIZES, divisions
from ..plan.flags import job_of
from ..plan.gpu import Gpu
from ..plan.layout import read_layout
from ..plan.model import Job, PlanError
from ..schedule import GENERATORS, Placement, ScheduleSpec
from .plan_input import GROUP, UNEVEN, VIRTUAL, values_given


@dataclass(frozen=True)
class Given:
    """The pipeline of the user's own command line.

    Attributes:
        schedule: that it runs.
        chunks: model chunks a rank.
        overlap: which data-parallel exchange its passes hide.
        searches: parallel sizes are searched.
    """

    schedule: str
    chunks: int
    overlap: Overlap
    searches: bool

    @classmethod
    def of(cls, args: argparse.Namespace, given: dict[str, Any]) -> Given:
        """As ``--from-args`` has it; Megatron's 1F1B where it says nothing.

        Args:
            given: Megatron's arguments by name.
        """
        values = values_given(args)
        pp, layers = given.get(SIZES[1]) or 1, given.get("num_layers") or 0
        chunks, each = (str(values.get(name, "")) for name in VIRTUAL)
        count = 1
        if chunks.isdigit() and int(chunks):
            count = int(chunks)
        elif each.isdigit() and int(each):
            ends = sum(bool(given.get(name)) for name in UNEVEN[2:])  # count as layers
            count = (layers + ends) // (pp * int(each)) or 1
        elif "|" in (layout := str(given.get(_LAYOUT) or "")) and pp > 1:
            count = _stages(layout, layers) // pp or 1
        overlap = Overlap(
            bool(given.get("overlap_grad_reduce")), bool(given.get("overlap_param_gather"))
        )
        searches = searches_sizes(args, given)
        name = values.get("pp_schedule")
        if name in GENERATORS:
            default = GENERATORS[name].default_chunks
            return cls(name, count if count > 1 else default, overlap, searches)
        if count == 1:
            return cls("1f1b", count, overlap, searches)
        return cls("interleaved", count, overlap, searches)

    def placement(self, pp: int) -> Placement:
        """Where its stages lie, on so many ranks."""
        return ScheduleSpec(self.schedule, pp, 1, self.chunks).placement


_LAYOUT = "pipeline_model_parallel_layout"


def _stages(layout: str, layers: int) -> int:
    try:
        return len(read_layout(layout, layers).counts)
    except PlanError:
        return 0


def freed(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with the sizes that ``--grid`` searches left open: those of ``--from-args``, and
    the stages that they divide the layers over. What stands beside it stays."""
    if not args.grid or args.from_args is None:
        return given
    beside = vars(args)
    line = values_given(args)
    names = [*SIZES, _LAYOUT, *UNEVEN]
    open_ = {name for name in names if name in line and beside.get(name) is None}
    if args.pp is not None:
        open_.discard(SIZES[1])
    return {name: value for name, value in given.items() if name not in open_}


def searches_sizes(args: argparse.Namespace, given: dict[str, Any]) -> bool:
    """True if parallel sizes are to be searched."""
    alone = given.get("pipeline_model_parallel_size") is None and bool(given.get("world_size"))
    return alone or bool(args.grid)


def jobs(args: argparse.Namespace, given: dict[str, Any], gpu: Gpu) -> list[Job]:
    """The job of every division that is searched, or of the one that is given.

    Args:
        given: Megatron's arguments by name; sizes that it lacks are searched.

    Raises:
        PlanError: there is none.
    """
    if searches_sizes(args, given):
        return divisions(given, gpu.devices_per_node)
    return [job_of(given)]


# Ours, where an answer decides them.
_OURS = tuple(
    f"pp_{name}"
    for name in (
        *("schedule", "memory_cap", "offload", "cheap_recompute", "vocab_parallel", "cost"),
        *("slices", "slice_tokens", "slice_weights"),
    )
)
_OF_TENSOR = ("sequence_parallel", "tp_comm_overlap")  # need tensor-parallel ranks


def replaced(args: argparse.Namespace, given: dict[str, Any], flags: Sequence[str]) -> list[str]:
    """Flags of the user's own that contradict ``flags``, which a plan prints, or that these make
    idle."""
    printed = {words.split()[0] for words in flags}
    names = {**values_given(args), **given}
    layout = "--pipeline-model-parallel-layout" in printed
    alone = "--pipeline-model-parallel-size 1" in flags
    clash = [*VIRTUAL, GROUP, *(UNEVEN if layout or alone else ()), *SIZES, *_OURS]
    clash += [_LAYOUT] if alone or _is_open(args, given) else []
    clash += _OF_TENSOR if "--tensor-model-parallel-size 1" in flags else ()
    return [
        flag_of(n)
        for n in clash
        if names.get(n) and flag_of(n) not in printed and not (n in SIZES and names[n] in (1, "1"))
    ]


def _is_open(args: argparse.Namespace, given: dict[str, Any]) -> bool:
    return _LAYOUT in given and _LAYOUT not in freed(args, given)


def difference(args: argparse.Namespace, given: dict[str, Any], flags: Sequence[str]) -> list[str]:
    """What to take from the user's command line and to add to it: ``- FLAG VALUE``, ``+ FLAG
    VALUE``; what both have is left out.

    Args:
        given: Megatron's arguments by name.
        flags: that a plan prints.
    """
    names = {**values_given(args), **given}
    out = [f"- {flag}{_value(names, flag)}" for flag in replaced(args, given, flags)]
    for words in flags:
        for part in _split(words):
            flag, _, value = part.partition(" ")
            own = names.get(attribute(flag))
            if own is not None and own is not False:
                if str(own) == value.strip("'") or (own is True and not value):
                    continue
                out.append(f"- {flag}{_value(names, flag)}")
            out.append(f"+ {part}")
    return out


def _split(words: str) -> list[str]:
    """Several flags in one text, apart."""
    parts = [part for part in words.split(" --") if part]
    return [part if part.startswith("--") else f"--{part}" for part in parts]


def _value(names: dict[str, Any], flag: str) -> str:
    value = names.get(attribute(flag))
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "" if value is True or value is None else f" {value}"
