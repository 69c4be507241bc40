"""Write a schedule of your own: order, check, simulation, picture, training.

    torchrun --nproc-per-node 2 examples/custom_schedule.py [--output custom.svg]

An order is one list of actions for each rank: ``F`` is a forward pass, ``B`` computes the gradient
of a stage's input, ``W`` that of its weights. Messages, checks and execution follow from the lists.
"""

import argparse
from pathlib import Path

import tiny  # before Megatron: it prepares the CPU
import torch

import megatron_ext
from megatron_ext.schedule import Action, Op, Placement, Schedule, ScheduleError
from megatron_ext.schedule import check, generate, save, simulate
from megatron_ext.view import svg, timeline
from train_v_half import train

PP, M = 2, tiny.MICROBATCHES


def delayed_w(pp: int, m: int, ahead: int, delay: int) -> Schedule:
    """1F1B with split backward passes, in which later ranks put their ``W`` off.

    Args:
        pp: ranks.
        m: microbatches.
        ahead: forward passes of the last rank before its first ``B``; each rank before it has one
            more.
        delay: microbatches by which rank r is later with ``W`` than rank r - 1.
    """
    ranks = []
    for rank in range(pp):
        warmup, late = min(m, ahead + pp - 1 - rank), delay * rank
        row = [Action(Op.F, rank, j) for j in range(warmup)]
        for j in range(m + late):
            row += [Action(Op.B, rank, j)] if j < m else []
            row += [Action(Op.W, rank, j - late)] if late <= j else []
            row += [Action(Op.F, rank, j + warmup)] if j + warmup < m else []
        ranks.append(tuple(row))
    return Schedule("delayed-w", Placement.loop(pp, 1), m, tuple(ranks))


def main() -> None:
    """Choose the best member of the family, draw it, train with it, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, help="where to write the picture")
    args = parser.parse_args()
    plain = tiny.Plain()
    traces = tiny.folder()

    # The checker finds what would hang, before anything runs.
    good = delayed_w(PP, M, ahead=1, delay=1)
    hanging = good.with_ranks([good.ranks[0], delayed_w(PP, M, ahead=3, delay=1).ranks[1]])
    refused = ""
    try:
        check(hanging)
    except ScheduleError as error:
        refused = str(error).splitlines()[0]
    tiny.require(f"refused: {refused}", bool(refused))

    # The family's fastest member that needs no more memory than 1F1B.
    stock = simulate(generate("1f1b", PP, M))
    runs = [simulate(delayed_w(PP, M, a, d)) for a in (1, 2) for d in (0, 1, 2)]
    fitting = [run for run in runs if max(run.peak_sets) <= max(stock.peak_sets)]
    best = min(fitting, key=lambda run: run.makespan)
    check(best.schedule)
    tiny.require(
        f"simulated: {float(best.makespan):g} units, bubble {float(best.bubble):.1%}; 1F1B "
        f"{float(stock.makespan):g}, {float(stock.bubble):.1%}; the same peak of activations",
        best.makespan < stock.makespan,
    )
    file = traces / "custom.json"
    if torch.distributed.get_rank() == 0:
        save(best.schedule, file)
        if args.output:
            args.output.write_text(svg.render(timeline.planned(best)))
            print(f"picture: {args.output}")
    torch.distributed.barrier()

    megatron_ext.enable(schedule=str(file), trace=str(traces))
    train(PP, 1, plain.initial).require_equal(plain)
    lines = tiny.traced(traces)
    ran = [[event["action"] for event in line["events"]] for line in lines]
    planned = [[str(action) for action in row] for row in best.schedule.ranks]
    passes = [[name for name in row if name[0] in "FBW"] for row in ran]
    tiny.require("the passes ran in the order that was written", passes == planned)
    tiny.finish()


if __name__ == "__main__":
    main()
