"""The options of commands that make or read schedules, and of more than one command."""

from __future__ import annotations

import argparse
from fractions import Fraction

from .._input import fraction, shown
from ..schedule import AUTO, NAMES
from ..schedule.generators.registry import takers as takers
from .parser import Options, Parser, positive

KNOWN = (*NAMES, AUTO)


def taking(option: str) -> str:
    """The schedules that have an option of ``Generator``'s ``takes_...``, in words."""
    return " and ".join([*takers(option), *([AUTO] if option == "takes_memory_cap" else [])])


GROUPED = taking("takes_group_size")


def _share(value: str) -> Fraction:
    """A number from 0 to 1, as an argparse type."""
    try:
        number = fraction(value)
    except ValueError:
        number = Fraction(-1)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {shown(value)}")
    return number


SCHEDULE = Options(
    {
        "--schedule NAME|FILE": f"{', '.join(KNOWN)} (the fastest that fits the cap), or a "
        "schedule file"
    },
)
_RANKS = Options(
    {
        "--pp P": "pipeline ranks",
        "--microbatches M": "microbatches of one iteration",
        "--chunks V": "model chunks per rank",
    },
    kinds=dict.fromkeys(("--pp", "--microbatches", "--chunks"), positive),
)
UNITS = Options(
    {
        "--slices K[,K...]": "cut the sequence of every microbatch into K slices, or into as many "
        "as its number of the list; compare has a row for each number of the list",
        "--attention-share A": "share of core attention in the F of a whole microbatch, 0 "
        "(default) to 1: the later a slice, the more it attends to",
        "--slice-overhead C": "share of a whole microbatch's W that the W of every slice takes "
        "however short it is, as adding to the gradients does (default 0; measured on an H200 at "
        "hidden 4096: 0.17 of 8192 tokens, 0.05 of 32768)",
        "--microbatch-cost W,W,...|FILE": "factors of the costs of each microbatch, and of its "
        "activations; a file has a line for each, with one factor or with those of F, B and W, "
        "or, after a line `tokens`, its length, whose attention costs its square",
        "--reorder-microbatches": "let the microbatches of --microbatch-cost run in another order "
        "where that is faster: short ones at both ends, or first",
    },
    kinds={"--attention-share": _share, "--slice-overhead": _share},
)
_COSTS = Options(
    {
        "--cost F,B,W[,HOP]": "times per rank and microbatch (default 1,1,1,0)",
        "--hop T": "latency of one transfer between ranks",
        "--stage-cost FILE": 'pass times of every stage, as JSON {"stages": [[F, B, W], ...]}; '
        '"exchange": [[F, B], ...] adds the all-to-alls of experts in these',
        "--exchange F,B": "part of F's and of B's time that is spent in all-to-alls of experts, "
        "with only the network busy",
        "--overlap": "run forward and backward passes in pairs that hide --exchange, as training "
        "does with --overlap-moe-expert-parallel-comm",
        "--vocabulary S,T,E,G[,T]": "shard the vocabulary over all ranks: times of a rank's part "
        "of the output layer (S, T) and embedding (E, G) per microbatch, and the latency of a "
        "collective; the other costs are then those without vocabulary layers",
    }
)
SIZES = (_RANKS, UNITS, _COSTS)


def _shape(cap_use: str, group_use: str) -> Options:
    return Options(
        {
            "--memory-cap X": "most activation memory, as a fraction of 1F1B's peak; " + cap_use,
            "--group-size G": "microbatches per group, ceil(P/2) to P (default P); for "
            + group_use,
        },
        kinds={"--group-size": positive},
    )


SHAPE = _shape(
    f"for {taking('takes_memory_cap')}; with --offload for all, of what stays on the device",
    GROUPED,
)
SHAPE_OF_ALL = _shape(
    "what a schedule is made for where it takes a cap; marked where it exceeds it; with --offload "
    "of what stays on the device",
    GROUPED,
)
OFFLOAD = Options(
    {
        "--offload WHAT": "chunks of each rank to offload, longest lifespan first: half, full "
        "(all) or N; auto: what the link carries without a stall; off",
        "--offload-time T[,T2]": "transfer time of one activation set to the host, and back "
        "(default the same), as a fraction of its chunk's F+B+W (PipeOffload's k is T + T2); a "
        "list, such as 0.25x7:1.5, has one number per rank or stage (xN: N equal ones)",
    }
)


def declare_schedule(parser: Parser) -> None:
    """Which schedule: ``--schedule``, its sizes and costs, and what shapes it."""
    parser.declare("schedule", SCHEDULE, *SIZES, SHAPE)
    declare_offload(parser)


def declare_offload(parser: Parser) -> None:
    """Which activation sets leave the device, and how."""
    parser.declare("offload of activations to the host", OFFLOAD)


SEARCHED = Options(
    {
        "--pp P": "pipeline ranks",
        "--microbatches M": "microbatches of one iteration at the job's own --micro-batch-size, in "
        "place of --global-batch-size",
        "--schedules A,B": f"among {', '.join(NAMES)} (default all)",
        "--chunks V,V": "model chunks per rank (default 2,4,8, as far as there are layers)",
        "--micro-batch-sizes B,B": "default 1, 2, 4 and the job's own, if they divide the batch",
        "--cheap-recompute": "auto (default): try both",
        "--offload": "offload in every candidate (half, full, auto), in none (off), or where it "
        "may pay (any, the default: half and full, or auto if the link is too slow for those)",
        "--no-balance": "keep Megatron's even split of the layers",
        "--shard-vocabulary": "auto (default): try --pp-vocab-parallel where training allows it; "
        "off: do not; with --pp-vocab-parallel itself, every candidate has it",
        "--slices K,K": "of every sequence, tried with the likely fastest schedules where "
        "microbatches are few or sequences long: numbers, auto (default: 2,4 where training cuts "
        "such models), or off",
        "--grid": "search all parallel sizes but those given beside --from-args; without --pp they "
        "always are searched, if they are not given",
        "--gpus-per-node N": "devices that the peer link connects: the most tensor-parallel ranks; "
        "more data- or expert-parallel ranks use the network too (default 8; GB200 and GB300 72)",
    },
    kinds={
        **dict.fromkeys(("--pp", "--microbatches", "--gpus-per-node"), positive),
        "--cheap-recompute": ("auto", "on", "off"),
        "--offload": ("auto", "half", "full", "any", "off"),
        "--shard-vocabulary": ("auto", "off"),
    },
    defaults={"--shard-vocabulary": "auto"},
)
