"""Roles under V placement: rank 0 holds the first and the last stage, so it alone feeds the model
and computes the loss; the last rank gets what the loss function returned.

Megatron and the trainers on it ask for a role in two ways. ``parallel_state`` answers for rank and
virtual stage at once, process groups answer for each by itself, and the asker joins both answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...hooks import hooked
from ...targets import (
    BATCH,
    LAST_STAGE,
    LAST_STAGE_OF_GROUP,
    LAST_VIRTUAL_STAGE,
)

CHUNKS = 2


def pp_rank() -> int:
    """This process's rank in the pipeline."""
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def is_first_stage(rank: int, vp_stage: int | None) -> bool:
    """True for the model's first stage under V placement (the embedding)."""
    return rank == 0 and vp_stage == 0


def is_last_stage(rank: int, vp_stage: int | None) -> bool:
    """True for the model's last stage under V placement (final norm, output layer, loss)."""
    return rank == 0 and vp_stage == CHUNKS - 1


class Roles:
    """Gives every asker the roles of a V.

    Attributes:
        training: Megatron's training package is in use.
        running: nothing has been returned yet, or passes run; else a call has returned. "The last
            rank", asked for by itself, is that of labels and the loss before, and that of the
            returned values then.
    """

    training = False
    running = True

    @hooked(LAST_STAGE, "no labels where the loss is computed")
    def _is_pipeline_last_stage(
        self,
        original: Callable[..., bool],
        ignore_virtual: bool = True,
        vp_stage: int | None = None,
    ) -> bool:
        if ignore_virtual or vp_stage is None:
            # "The last rank", which logs; the executor brings the losses there.
            return original(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
        return is_last_stage(pp_rank(), vp_stage)

    @hooked(
        LAST_STAGE_OF_GROUP, "no labels where the loss is computed, for callers with process groups"
    )
    def _is_pp_last_stage(self, original: Callable[..., bool], pp_group: Any) -> bool:
        from megatron.core.pipeline_parallel.utils import is_pp_first_stage

        # A model may be built, or called, between two steps: then it is the end of the model.
        both = self.running or _joined_with_the_chunk()
        return original(pp_group) or (both and is_pp_first_stage(pp_group))

    @hooked(
        LAST_VIRTUAL_STAGE,
        "an output layer, or labels, on the last rank too, for callers with process groups",
    )
    def _is_vp_last_stage(
        self, original: Callable[..., bool], vp_stage: int | None, vp_size: int | None
    ) -> bool:
        last = original(vp_stage=vp_stage, vp_size=vp_size)
        return last and (vp_size != CHUNKS or is_last_stage(pp_rank(), vp_stage))

    @hooked(BATCH, "no labels on rank 0 with tensor parallelism", lambda self: self.training)
    def _batch_on_this_tp_rank(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        # Stock broadcasts only tokens on the first rank and only labels on the last; rank 0 of a
        # V needs both, which is what Megatron does for a rank with multi-token prediction.
        if pp_rank() == 0:
            kwargs["mtp_on_this_rank"] = True
        return original(*args, **kwargs)


def _joined_with_the_chunk() -> bool:
    """The code that asks joins the answer with ``is_vp_last_stage``, which is true of a V's last
    stage alone; either may be asked first, and the second not at all."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("megatron_ext."):
        frame = frame.f_back
    if frame is None:
        return False
    code = frame.f_code
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    return any(name.endswith("is_vp_last_stage") for name in names)
