"""Lower bounds on the makespan, to say how good a schedule is."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

from .costs import Costs, Durations
from .placement import Placement


def makespan_bound(
    placement: Placement, microbatches: int, costs: Costs, memory_cap: int | None = None
) -> Fraction:
    """Least makespan of any order on ``placement``, in the units of the costs.

    The largest of: the way to a rank and all its work; one microbatch's whole way, all others
    passing one of its stages; and with a memory cap, what waiting for memory takes: before its
    first B a rank runs no more F's than fit ("Zero Bubble Pipeline Parallelism", arXiv 2401.10241,
    section 3), and while at most ``memory_cap`` sets are resident each stays for its own way to
    the loss and back (Little's law).

    Args:
        placement: where the stages lie.
        microbatches: of one iteration, >= 1.
        costs: of the passes and hops.
        memory_cap: most activation sets (one chunk's for one microbatch) on a rank, counted from
            F's start to W's end; None for no cap.

    Raises:
        ValueError: per-stage costs for another number of stages.
    """
    d = costs.durations(placement)
    n = placement.num_stages
    hops = [d.hop * (placement.rank_of(s) != placement.rank_of(s + 1)) for s in range(n - 1)]
    # Of microbatch 0, as early as data allows: start of F, from there to the start of B, and from
    # a B's start to the end of all B's after it, in the first stages, and the last W.
    f_start = list(accumulate((f + hop for f, hop in zip(d.forward, hops)), initial=0))
    b_start = [0] * n
    b_start[-1] = f_start[-1] + d.forward[-1]
    for s in range(n - 2, -1, -1):
        b_start[s] = b_start[s + 1] + d.backward_input[s + 1] + hops[s]
    rest = [0] * n  # from the end of a stage's B to the last end after it
    for s in range(n):
        below = hops[s - 1] + d.backward_input[s - 1] + rest[s - 1] if s else 0
        rest[s] = max(d.backward_weight[s], below)
    bounds = [0]
    for s in range(n):
        # All F's of a stage, then the last microbatch's way on; the same for all B's.
        after = (b_start[s] - f_start[s] - d.forward[s]) + d.backward_input[s] + rest[s]
        bounds.append(f_start[s] + microbatches * d.forward[s] + after)
        bounds.append(b_start[s] + microbatches * d.backward_input[s] + rest[s])
    exact = Fraction(max(bounds))
    for row in placement.stages:
        exact = max(exact, _rank_bound(row, microbatches, d, f_start, b_start, memory_cap))
    return exact / d.scale


def _rank_bound(
    row: tuple[int, ...],
    microbatches: int,
    d: Durations,
    f_start: list[int],
    b_start: list[int],
    memory_cap: int | None,
) -> Fraction:
    """What one rank needs, from the first start of all to its own last end."""
    begin = f_start[row[0]]
    work = microbatches * sum(
        d.forward[s] + d.backward_input[s] + d.backward_weight[s] for s in row
    )
    if memory_cap is None:
        return Fraction(begin + work)
    # Before the first B only F's run, and each keeps a set.
    first_b = min(b_start[s] for s in row)
    longest = sorted((d.forward[s] for s in row for _ in range(microbatches)), reverse=True)
    waiting = first_b + work - sum(longest[:memory_cap])
    stays = sum(b_start[s] - f_start[s] + d.backward_input[s] + d.backward_weight[s] for s in row)
    little = begin + Fraction(microbatches * stays, memory_cap)
    return max(Fraction(begin + work), Fraction(waiting), little)
