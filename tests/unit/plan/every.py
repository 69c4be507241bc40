"""All that a search may choose from, nothing left out."""

from __future__ import annotations

from megatron_ext.plan.rows import Families, Row, rows
from megatron_ext.plan.short import Candidate
from megatron_ext.plan.short import candidates as of_row
from megatron_ext.plan.space import SearchSpace


def every_row(where: SearchSpace) -> list[Row]:
    """Of one division, without offload but where that is asked for."""
    return [row for found in rows(where, float("inf"), Families()) for row in found]


def candidates(where: SearchSpace) -> list[Candidate]:
    """Of one division, with the times of short orders."""
    families = Families()
    return [one for row in every_row(where) for one in of_row(row, families)]
