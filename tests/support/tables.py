"""Random tables of tasks."""

from __future__ import annotations

import random

from megatron_ext.schedule import Placement
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.tasks import Tasks, UnitCosts


def random_tasks(rng: random.Random) -> Tasks:
    """Slices, sizes, costs of every unit and stage, and hops."""
    pp, chunks = rng.randint(2, 6), rng.choice((1, 2, 2, 3))
    placement = (
        Placement.vee(pp) if chunks == 2 and rng.random() < 0.6 else Placement.loop(pp, chunks)
    )
    stages = range(placement.num_stages)

    def factors(most: int) -> tuple[int, ...]:
        return tuple(rng.randint(1, most) for _ in range(3))

    times = [tuple(rng.choice((1, 1, 2, 5)) for _ in stages) for _ in range(3)]
    durations = Durations(*times, hop=rng.choice((0, rng.randint(1, 500))), scale=1)
    microbatches = [
        [UnitCosts(*factors(400), rng.randint(1, 5)) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(1, 8))
    ]
    return Tasks(placement, durations, microbatches)
