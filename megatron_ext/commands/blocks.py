"""Building blocks on the command line: ``--block``, its numbers, all blocks side by side."""

from __future__ import annotations

import argparse
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..schedule import Costs, Schedule, simulate
from ..schedule.block_file import block_to_json, load_block
from ..schedule.costs import number_to_json
from ..schedule.generators import MOST_SETS
from ..schedule.generators.blocks import PERIODIC, named_block
from ..schedule.generators.building_block import Block
from ..schedule.lifespan import Lifespans, lifespans, reordered
from ..view import timeline
from ..view.table import columns
from .common import InputError, costs_of, refuse_large, refuse_others, user_input
from .results import short


def block_of(args: argparse.Namespace) -> tuple[Block, int]:
    """The block that ``--block`` names, and the number of microbatches, default 4 a rank."""
    with user_input():
        if not _is_file(args.block):
            return _named(args, f"--block {args.block}", args.block)
        block = load_block(args.block)
        for option in ("pp", "chunks"):
            given, holds = getattr(args, option), getattr(block.placement, option)
            if given not in (None, holds):
                raise InputError(
                    f"--{option} {given} contradicts {args.block}, which is for {option}={holds}; "
                    f"leave --{option} out"
                )
        microbatches = args.microbatches or 4 * block.placement.pp
        _refuse_many(block.placement.num_stages * microbatches)
    return block, microbatches


def block_name(block: str) -> str:
    """What ``--block`` is called in pictures and schedule files."""
    return f"block of {Path(block).stem[:100] if _is_file(block) else block}"


def _is_file(block: str) -> bool:
    return block not in PERIODIC and (block.endswith(".json") or os.sep in block)


def _named(args: argparse.Namespace, what: str, name: str) -> tuple[Block, int]:
    if args.pp is None or args.pp < 2:
        raise InputError(f"{what} needs --pp P, at least 2 pipeline ranks")
    microbatches = args.microbatches or 4 * args.pp
    _refuse_many(args.pp * (args.chunks or 1) * microbatches)
    return named_block(name, args.pp, microbatches, args.chunks), microbatches


def _refuse_many(sets: int) -> None:
    if sets > MOST_SETS:
        raise InputError(
            f"{sets} activation sets, over all ranks, are more than the {MOST_SETS} that orders "
            "are made for; give fewer --microbatches"
        )


def block_schedule(args: argparse.Namespace) -> Schedule:
    """The schedule of ``--block`` for the costs that the options give, squeezed and reordered."""
    refuse_others(args, f"--block {args.block}", _OF_SCHEDULES)
    if args.microbatches is None:
        raise InputError(f"--block {args.block} needs --microbatches M too")
    block, microbatches = block_of(args)
    schedule = Schedule(
        block_name(args.block), block.placement, microbatches, (), costs_of(args, Costs())
    )
    refuse_large(schedule)
    with user_input():
        durations = schedule.costs.durations(block.placement)
    return schedule.with_ranks(reordered(block, microbatches, durations.reduced()))


OF_BLOCKS = ("block", "pp", "microbatches", "chunks", "json")
_OF_SCHEDULES = (
    *(*OF_BLOCKS, "cost", "hop", "stage_cost", "exchange", "output", "lowered", "optimize"),
    "effort",
)


def block_numbers(block: Block, name: str, microbatches: int) -> Lifespans:
    """The numbers of the block that ``--block`` names."""
    return lifespans(block, microbatches, grows=name in PERIODIC and PERIODIC[name].grows)


def block_json(name: str, found: Lifespans) -> str:
    """A block file, with the numbers in ``report``."""
    return json.dumps({**block_to_json(found.block), "report": _json(name, found)})


def _json(name: str, found: Lifespans) -> dict[str, Any]:
    """Lifespans by stage, in passes of one chunk; peaks by rank, in microbatches."""
    placement = found.block.placement
    bound, peak = ([number_to_json(x) for x in each] for each in _peaks(found))
    return {
        "block": name,
        "pp": placement.pp,
        "chunks": placement.chunks,
        "microbatches": found.microbatches,
        "interval": number_to_json(Fraction(found.block.interval, found.block.group)),
        "lifespan": found.lifespan,
        "peak_by_lifespan": bound,
        "peak_activation": peak,
        "peak_activation_vs_1f1b": number_to_json(_share(found)),
        "squeezed_bubble": number_to_json(found.squeezed),
        "bubble": number_to_json(found.reordered),
        "balance": found.balance,
        "why": found.why,
    }


def block_text(found: Lifespans) -> str:
    """The numbers of one block for people."""
    placement = found.block.placement
    rows = [["rank", "stages", "lifespans", "peak by lifespan", "simulated"]]
    for rank, (stages, *peaks) in enumerate(zip(placement.stages, *_peaks(found))):
        cells = [" + ".join(map(str, row)) for row in (stages, [found.lifespan[s] for s in stages])]
        rows.append([str(rank), *cells, *map(short, peaks)])
    return "\n".join(
        [
            "lifespans: from F's start to W's end, in passes of one chunk (a BW is two); a "
            f"microbatch every {short(Fraction(found.block.interval, found.block.group))}",
            *columns(rows),
            f"peak {short(max(_peaks(found)[1]))} microbatches, {_percent(_share(found))} of "
            f"1F1B's; bubble with {found.microbatches} microbatches {_percent(found.squeezed)} "
            f"squeezed, {_percent(found.reordered)} reordered",
            found.why,
        ]
    )


def block_timeline(args: argparse.Namespace, block: Block) -> timeline.Timeline:
    """A building block repeated, or squeezed too. A pass takes 1 in both."""
    name, microbatches = block_name(args.block), args.microbatches or 1
    if not args.squeeze:
        return timeline.stamped(block, name, microbatches)
    ranks = tuple(tuple(row) for row in block.stamp(microbatches))
    whole = Costs.of(*(block.placement.chunks,) * 3)  # a pass of one chunk takes 1
    name += ", squeezed"
    return timeline.planned(simulate(Schedule(name, block.placement, microbatches, ranks, whole)))


def print_blocks(args: argparse.Namespace) -> None:
    """``show --blocks``: all blocks side by side (arXiv 2405.15362, table 1)."""
    found: dict[str, Lifespans] = {}
    for name, named in PERIODIC.items():
        chunks = args.chunks if named.any_chunks else None
        with user_input():
            given = argparse.Namespace(**{**vars(args), "chunks": chunks})
            block, microbatches = _named(given, "--blocks", name)
        found[name] = block_numbers(block, name, microbatches)
    if args.json:
        print(json.dumps({"blocks": [_json(name, each) for name, each in found.items()]}))
        return
    print(f"pp {args.pp}, microbatches {microbatches}; a pass of one chunk takes 1, a BW 2\n")
    print("\n".join(columns([_HEADS, *(_row(name, each) for name, each in found.items())])))
    print(_LEGEND)


_HEADS = (
    *("block", "chunks", "interval", "lifespans", "peak by lifespan", "simulated", "of 1F1B's"),
    *("squeezed", "bubble", "memory"),
)
_LEGEND = """
interval: between two microbatches; lifespans: from F's start to W's end, of all stages
peaks: of the worst rank, in microbatches
squeezed, bubble: idle share in the block's order, and reordered with the same memory
memory: even over the ranks (balanced), even by waiting W's alone, unbalanced, or growing with the
  microbatches; --block NAME gives the reason"""


def _row(name: str, found: Lifespans) -> list[str]:
    return [
        name,
        str(found.block.placement.chunks),
        short(Fraction(found.block.interval, found.block.group)),
        f"{min(found.lifespan)} to {max(found.lifespan)}",
        *(short(max(peaks)) for peaks in _peaks(found)),
        *map(_percent, (_share(found), found.squeezed, found.reordered)),
        found.balance,
    ]


def _peaks(found: Lifespans) -> list[list[Fraction]]:
    """By lifespan and as simulated, by rank, in microbatches."""
    chunks = found.block.placement.chunks
    return [[Fraction(sets, chunks) for sets in each] for each in (found.bound, found.peak)]


def _share(found: Lifespans) -> Fraction:
    return max(_peaks(found)[1]) / found.block.placement.pp


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):.1f} %"
