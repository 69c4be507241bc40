"""CUDA graphs of layers, captured in the order of our lists.

Megatron's own (``--cuda-graph-impl local``) record the order of the first step and are captured at
its end. Transformer Engine's get the order beforehand. A graph is found by its place among those of
its layer, or by the microbatch that Megatron's ``forward_step`` is given, and they share memory by
the order of the passes: that must stay the same from step to step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ....schedule.actions import AnyAction, Op
from ....schedule.effects import passes
from ....schedule.generators import GENERATORS
from ....schedule.placement import Placement
from ...callbacks import Callback, Step
from ...errors import ConfigError
from ...feature import Run
from ...hooks import Hook

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
WITHOUT_W = tuple(n for n, generator in GENERATORS.items() if not generator.split_backward)
# Our flags that change the order later on, or what a pass keeps and runs.
_OURS = {
    "pp_profile_steps": "it makes the order anew after the graphs are captured",
    "pp_offload": "replayed passes save no tensors that could be moved",
    "pp_cheap_recompute": "what it recomputes would be captured",
    "pp_post_validation": "an undone step would have to undo replays",
}


def graphs(run: Run) -> str | None:
    """The implementation in use, as ``--cuda-graph-impl``; None if there are no graphs."""
    found = getattr(run.args, "cuda_graph_impl", None)
    return None if found in (None, "none") else str(found)


def require_graphs(run: Run, splits_backward: bool) -> None:
    """Refuse graphs that the schedule cannot replay.

    Args:
        run: after Megatron's own validation.
        splits_backward: the schedule has W passes.

    Raises:
        ConfigError: W would be inside a captured backward pass, a whole iteration is captured, or
            another of our flags works on passes.
    """
    kind, args = graphs(run), run.args
    if kind is None:
        return
    scopes = getattr(args, "cuda_graph_scope", None) or ()
    whole = any(str(scope).endswith("full_iteration") for scope in scopes)
    if kind not in (LOCAL, TRANSFORMER_ENGINE) or whole:
        raise ConfigError(
            "--pp-schedule does not support CUDA graphs of a full iteration: the host decides "
            "between passes what comes next; use --cuda-graph-impl local or transformer_engine "
            "for layers"
        )
    if splits_backward:
        assert run.request is not None
        raise ConfigError(
            f"--pp-schedule {run.request.name} does not support --cuda-graph-impl {kind}: a "
            "captured backward pass computes weight gradients too, and W is a pass of its own; "
            f"drop the flag, or use a schedule without W: {', '.join(WITHOUT_W)}"
        )
    for name, why in _OURS.items():
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does not support --cuda-graph-impl {kind}: {why}; drop one")


def capture_order(row: Iterable[AnyAction], placement: Placement) -> list[int]:
    """A rank's passes as ``make_graphed_callables`` of Transformer Engine takes them: c for a
    forward pass of the c-th chunk (from 1), -c for a backward one."""
    order = []
    for op, stage, _ in passes(row):
        if op in (Op.F, Op.B, Op.BW):
            chunk = placement.chunk_of(stage) + 1
            order.append(chunk if op is Op.F else -chunk)
    return order


class CudaGraphs(Callback):
    """Has graphs captured in our order, where the model's configuration has some."""

    def __init__(self) -> None:
        self._order: list[int] | None = None

    def hooks(self) -> Sequence[Hook]:
        return (
            Hook(
                ("megatron.core.transformer.cuda_graphs:convert_schedule_table_to_order",),
                self._ours,
                ("num_warmup_microbatches", "num_model_chunks", "schedule_table"),
                "graphs would be captured for the order of stock's schedule",
            ),
        )

    def begin(self, step: Step) -> None:
        if step.training:
            self._order = capture_order(step.plan.ranks[step.rank], step.plan.placement)

    def returning(self, step: Step) -> None:
        """Where stock's functions do it: Megatron's graphs are captured after the first step."""
        if getattr(step.call.iteration.config, "cuda_graph_impl", None) == LOCAL:
            from megatron.core.transformer import cuda_graphs

            cuda_graphs.create_cudagraphs()

    def _ours(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def convert_schedule_table_to_order(
            num_warmup_microbatches: Any, num_model_chunks: Any, schedule_table: Any
        ) -> list[int]:
            if self._order is None:
                raise ConfigError(
                    "CUDA graphs of Transformer Engine are captured in the order of the last "
                    "training step, but there was none; give --cuda-graph-warmup-steps 1 or more"
                )
            return list(self._order)

        return convert_schedule_table_to_order
