"""What ``plan`` leaves out of a search because training refuses it beside the user's own flags."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from .._input import meant
from ..plan import lengths, refusals
from ..plan.model import Job, PlanError
from ..plan.overlap import FLAG as PAIRS
from ..schedule.generators import NAMES
from ..schedule.select import IN_PAIRS

OFFLOAD = ("half", "full", "auto")
# What an answer replaces in the user's flags.
DECIDED = (
    *("pp_schedule", "pp_offload", "pp_offload_chunks", "pp_cheap_recompute", "pp_profile"),
    *("pp_vocab_parallel", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    "fp8_recipe",
)


class Allowed(NamedTuple):
    """What is left to search.

    Attributes:
        job: without pairs, where training refuses them.
        offload: kinds of it, or the one that is asked for.
        vocabulary: it may be sharded.
        cheap: cheap recompute may be on.
    """

    names: tuple[str, ...]
    job: Job
    offload: tuple[str, ...]
    vocabulary: bool
    cheap: bool


def schedules(text: str | None) -> tuple[str, ...]:
    """Of ``--schedules``; all without it.

    Raises:
        PlanError: one of them is unknown.
    """
    names = tuple(text.split(",")) if text else NAMES
    for name in names:
        if name not in NAMES:
            raise PlanError(
                f"unknown schedule {name!r}; give some of {', '.join(NAMES)}{meant(name, NAMES)}"
            )
    return names


def allowed(
    names: tuple[str, ...],
    job: Job,
    offload: str | None,
    beside: SimpleNamespace,
    *,
    named: bool,
    cheap: bool,
) -> Allowed:
    """What training takes beside the user's flags.

    Args:
        names: of schedules; ``named``: the user gave them.
        offload: as ``--offload``.
        cheap: ``--cheap-recompute on``.
        beside: the user's flags.

    Raises:
        PlanError: something else is asked for.
    """
    always = offload in OFFLOAD
    if job.overlap_moe_expert_parallel_comm and always:
        raise PlanError(f"--offload {offload} cannot be combined with {PAIRS}; drop one")
    asked = {
        "pp_vocab_parallel": job.vocab_parallel,
        "pp_cheap_recompute": job.cheap_recompute or cheap,
        "pp_offload": offload if always else None,
    }
    beside = SimpleNamespace(
        **{name: value for name, value in vars(beside).items() if name not in DECIDED},
        fp8_recipe=job.recipe,
    )
    why = refusals.of_options(beside, **asked) or lengths.refusal(
        beside, **asked, overlap_moe_expert_parallel_comm=job.overlap_moe_expert_parallel_comm
    )
    if why is None and named:
        why = _of_names(names, beside)
    if why is not None:
        raise PlanError(why)
    if lengths.refusal(beside, overlap_moe_expert_parallel_comm=True) is not None:
        job = job.with_(overlap_moe_expert_parallel_comm=False)
    kinds = {None: OFFLOAD, "any": OFFLOAD, "off": ()}.get(offload, (str(offload),))
    return Allowed(
        tuple(name for name in names if _of_names([name], beside) is None),
        job,
        tuple(kind for kind in kinds if _takes(beside, pp_offload=kind)),
        _takes(beside, pp_vocab_parallel=True),
        _takes(beside, pp_cheap_recompute=True),
    )


def _of_names(names: Sequence[str], beside: SimpleNamespace) -> str | None:
    wrong = [name for name in names if name in IN_PAIRS] if lengths.wanted(beside) else []
    if wrong:
        return f"{lengths.FLAG} {lengths.LENGTHS} does not support --schedules {wrong[0]}; drop it"
    return refusals.of_names(names, beside)


def _takes(beside: SimpleNamespace, **options: Any) -> bool:
    return not (refusals.of_options(beside, **options) or lengths.refusal(beside, **options))
