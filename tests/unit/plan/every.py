"""All that a search may choose from, nothing pruned."""

from __future__ import annotations

from megatron_ext.plan.candidate import Candidate, Units, candidates_of
from megatron_ext.plan.cases import cases
from megatron_ext.plan.space import SearchSpace


def candidates(where: SearchSpace) -> list[Candidate]:
    """Of one division, without offload, with likely times."""
    units = Units()
    every = (one for case in cases(where, 1 << 30) for one in candidates_of(case, units))
    return [one.refined(units) for one in every]
