"""What ``plan`` leaves out of a search because training refuses it beside the user's own flags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ..plan.lengths import FLAG, LENGTHS, refusal, wanted
from ..plan.model import Job, PlanError
from ..plan.overlap import FLAG as PAIRS
from ..schedule.select import IN_PAIRS

OFFLOAD = ("half", "full", "auto")


class Allowed(NamedTuple):
    """What is left to search.

    Attributes:
        job: without pairs, where training refuses them.
        offload: kinds of it, or the one that is asked for.
        vocabulary: it may be sharded.
    """

    names: tuple[str, ...]
    job: Job
    offload: tuple[str, ...]
    vocabulary: bool


def allowed(
    names: tuple[str, ...], job: Job, offload: str | None, beside: SimpleNamespace, *, named: bool
) -> Allowed:
    """What training takes beside the user's flags.

    Args:
        names: of schedules; ``named``: the user gave them.
        offload: as ``--offload``.
        beside: the user's flags.

    Raises:
        PlanError: something else is asked for.
    """
    always = offload in OFFLOAD
    if job.overlap_moe_expert_parallel_comm and always:
        raise PlanError(f"--offload {offload} cannot be combined with {PAIRS}; drop one")
    kinds = {None: OFFLOAD, "any": OFFLOAD, "off": ()}.get(offload, (str(offload),))
    if not wanted(beside):
        return Allowed(names, job, kinds, True)
    why = refusal(
        beside,
        pp_vocab_parallel=job.vocab_parallel,
        pp_offload=offload if always else None,
        overlap_moe_expert_parallel_comm=job.overlap_moe_expert_parallel_comm,
    )
    if why is None and named and (wrong := [name for name in names if name in IN_PAIRS]):
        why = f"{FLAG} {LENGTHS} does not support --schedules {wrong[0]}; drop it"
    if why is not None:
        raise PlanError(why)
    if refusal(beside, overlap_moe_expert_parallel_comm=True) is not None:
        job = job.with_(overlap_moe_expert_parallel_comm=False)
    return Allowed(
        tuple(name for name in names if name not in IN_PAIRS),
        job,
        tuple(kind for kind in kinds if refusal(beside, pp_offload=kind) is None),
        refusal(beside, pp_vocab_parallel=True) is None,
    )
