"""Megatron's CUDA graphs of single layers, under schedules with whole backward passes.

``--cuda-graph-impl local`` records the order of forward and backward passes in the first step, and
captures in it at the end (``_CudagraphGlobalRecord`` in Megatron's ``cuda_graphs.py``): stock's
schedule functions then call ``create_cudagraphs``, and so do we. ``transformer_engine`` captures
before a step, in an order that Megatron computes from stock's schedule: it gets ours.

All graphs share one memory pool, in which a tensor may be overwritten as soon as the order allows.
Stock waits for its messages; ours are still on their way while later graphs are replayed, hence are
copied out of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...plan import refusals
from ...plan.refusals import GRAPHS, LOCAL, TRANSFORMER_ENGINE, WHOLE, implementation
from ...schedule.actions import Op
from ...schedule.schedule import Schedule
from ..callbacks import Callback, Step
from ..feature import Feature, Run, require_no_conflict
from ..hooks import hooked
from ..rules import Rule
from ..targets import GRAPH_ORDER


def capture_order(plan: Schedule, rank: int) -> list[int]:
    """One rank's passes as Transformer Engine's ``make_graphed_callables`` takes them.

    Returns:
        For each pass in turn the model chunk, from 1; negative for a backward pass.
    """
    order = []
    for action in plan.ranks[rank]:
        for part in action.parts:
            if part.op in (Op.F, Op.BW):
                chunk = plan.placement.chunk_of(part.stage) + 1
                order.append(chunk if part.op is Op.F else -chunk)
    return order


_GRAPHS = "--pp-schedule {schedule} does not support {flag}"
_STOCK = "use 1f1b or interleaved, or drop it"
NO_ITERATION = Rule(
    _GRAPHS,
    refusals.NO_ITERATION,
    "use --cuda-graph-impl local or transformer_engine with 1f1b or interleaved, or drop it",
)
NO_SPLIT = Rule(
    _GRAPHS,
    refusals.NO_SPLIT,
    _STOCK,
)
# Megatron up to 0.18 drops the pool's hold on the last stage's output at once, which is right if
# its backward pass comes next.
NO_FILE = Rule(_GRAPHS, refusals.NO_FILE, _STOCK)
NO_LIBRARY = Rule(
    _GRAPHS,
    "Megatron's training loop captures these graphs",
    "start the run with the launcher, or use local",
)
WARM = Rule(
    _GRAPHS,
    refusals.COLD,
    refusals.WARM_UP,
)
ONE_SHAPE = Rule(
    "a run with CUDA graphs needs messages of one shape",
    "this call's have several",
    "set --cuda-graph-impl none, or keep sequences at one length",
)

TRAINED = Rule(
    "a capture of CUDA graphs for {microbatches} microbatches in {chunks} model chunks needs a "
    "step of them before",
    "none has been trained yet",
    refusals.WARM_UP,
)


class CudaGraphs(Feature):
    """On with ``--cuda-graph-impl local`` or ``transformer_engine``, and their older names."""

    per_model = True
    conflicts = GRAPHS

    rules = (NO_ITERATION, NO_SPLIT, NO_FILE, NO_LIBRARY, WARM, ONE_SHAPE, TRAINED)

    def check(self, run: Run) -> None:
        found, request = implementation(run.args), run.request
        if found is None or request is None:
            return
        kind, flag = found
        engine = kind == TRANSFORMER_ENGINE
        for rule, broken in (
            (NO_ITERATION, kind == WHOLE),
            (NO_SPLIT, request.splits_backward),
            (NO_FILE, request.file is not None),
            (NO_LIBRARY, engine and run.library),
            (WARM, refusals.are_cold(run.args)),
        ):
            rule.require(not broken, schedule=request.name, flag=flag)
        require_no_conflict(run.args, self.conflicts, {"": flag})

    def start(self, run: Run) -> Sequence[Callback]:
        found = implementation(run.args)
        if found is None or run.request is None or run.pipeline is None:
            return ()
        run.pipeline.messages = replace(run.pipeline.messages, buffers=True)
        self._local = found[0] == LOCAL
        self._deallocates: bool | None = None  # as the configuration has it outside of a call
        self._orders: dict[tuple[int, int], list[int]] = {}  # by microbatches and chunks
        return (self,)

    def begin(self, step: Step) -> None:
        ONE_SHAPE.require(step.call.shape is not None)
        if self._local:
            config = step.call.iteration.config
            self._deallocates = config.deallocate_pipeline_outputs
            # A layer's output is a view while it is recorded and then the graph's own tensor.
            # Megatron refuses to free the one (fixed after 0.20.0, NVIDIA/Megatron-LM#6168), and
            # the other is in the pool, which gives nothing back.
            config.deallocate_pipeline_outputs = False
        elif step.training:
            key = step.plan.microbatches, step.plan.chunks
            if key not in self._orders:
                self._orders[key] = capture_order(step.plan, step.rank)

    def dropped(self, step: Step) -> None:
        self._restore(step)

    def returning(self, step: Step) -> None:
        """Let Megatron capture at the end of the first step, as its own schedule functions do."""
        self._restore(step)
        if self._local and step.call.iteration.config.cuda_graph_impl == LOCAL:
            from megatron.core.transformer import cuda_graphs

            cuda_graphs.create_cudagraphs()

    def _restore(self, step: Step) -> None:
        if self._deallocates is not None:
            step.call.iteration.config.deallocate_pipeline_outputs = self._deallocates
            self._deallocates = None

    @hooked(
        GRAPH_ORDER,
        "graphs would be captured in the order of stock's schedule",
        when=lambda self: not self._local,
    )
    def _ours(
        self,
        original: Callable[..., Any],
        num_warmup_microbatches: int,
        num_model_chunks: int,
        schedule_table: Sequence[Any],
    ) -> list[int]:
        microbatches = len(schedule_table) // num_model_chunks
        order = self._orders.get((microbatches, num_model_chunks))
        if order is None:
            raise TRAINED.broken(microbatches=microbatches, chunks=num_model_chunks)
        return list(order)
