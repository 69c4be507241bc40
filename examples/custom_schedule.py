"""Run it with: python3 examples/custom_schedule.py

Writes a schedule of your own: order, check, simulation, picture, and a file that training takes as
``--pp-schedule custom.json``. An order is one list of actions for each rank: ``F`` is a forward
pass, ``B`` computes the gradient of a stage's input, ``W`` that of its weights. Messages follow
from the lists. No package is needed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where it is not installed

from megatron_ext.schedule import Action, Op, Placement, Schedule, ScheduleError
from megatron_ext.schedule import check, generate, save, simulate
from megatron_ext.view import svg, timeline

PP, MICROBATCHES = 2, 8


def delayed_w(ahead: int, delay: int) -> Schedule:
    """1F1B with split backward passes, in which later ranks put their ``W`` off.

    Args:
        ahead: forward passes of the last rank before its first ``B``; each rank before it has one
            more.
        delay: microbatches by which rank r is later with ``W`` than rank r - 1.
    """
    ranks = []
    for rank in range(PP):
        warmup, late = min(MICROBATCHES, ahead + PP - 1 - rank), delay * rank
        row = [Action(Op.F, rank, j) for j in range(warmup)]
        for j in range(MICROBATCHES + late):
            row += [Action(Op.B, rank, j)] if j < MICROBATCHES else []
            row += [Action(Op.W, rank, j - late)] if late <= j else []
            row += [Action(Op.F, rank, j + warmup)] if j + warmup < MICROBATCHES else []
        ranks.append(tuple(row))
    return Schedule("delayed-w", Placement.loop(PP, 1), MICROBATCHES, tuple(ranks))


def main() -> None:
    """Choose the best member of the family within 1F1B's memory; write its file and picture."""
    good, late = delayed_w(1, 1), delayed_w(3, 1)
    try:
        check(good.with_ranks([good.ranks[0], late.ranks[1]]))
    except ScheduleError as error:
        print(f"refused before anything runs: {str(error).splitlines()[0]}")
    stock = simulate(generate("1f1b", PP, MICROBATCHES))
    runs = [simulate(delayed_w(ahead, delay)) for ahead in (1, 2) for delay in (0, 1, 2)]
    fitting = [run for run in runs if max(run.peak_sets) <= max(stock.peak_sets)]
    best = min(fitting, key=lambda run: run.makespan)
    check(best.schedule)
    for name, run in (("1f1b", stock), ("delayed-w", best)):
        peak = float(max(run.peak_activation))
        print(f"{name}: bubble {float(run.bubble):.1%}, peak {peak:g} microbatches")
    save(best.schedule, Path("custom.json"))
    Path("custom.svg").write_text(svg.render(timeline.planned(best)))
    print("wrote custom.json and custom.svg")


if __name__ == "__main__":
    main()
