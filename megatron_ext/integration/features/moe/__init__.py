"""``--moe-pipeline-chunks``: MPipeMoE layers in chunks of tokens, with memory reuse."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....plan.moe_conflicts import CONFLICTS
from ...callbacks import Callback
from ...feature import Feature, Flag, Run
from ...utils import file_contents

logger = logging.getLogger(__name__)

CHUNKS = ("off", "auto", "1", "2", "4", "8")
STRATEGIES = ("none", "s0", "s1", "s2", "s3", "s4", "auto")
FLAGS = (
    "--moe-pipeline-chunks",
    "--moe-memory-reuse",
    "--moe-memory-budget",
    "--moe-pipeline-costs",
)


class MoE(Feature):
    """On with ``--moe-pipeline-chunks``, with or without a schedule of ours."""

    flags = (
        Flag(
            FLAGS[0],
            "run dispatch, experts and combine of every MoE layer in so many chunks of tokens, the "
            "communication of one beside the computation of another; auto tries in training, "
            "Megatron's own layer too; default: off",
            "{" + ",".join(CHUNKS) + "}",
            alone=True,
        ),
        Flag(
            FLAGS[1],
            "how the experts' input and what lies inside them are restored for the backward pass: "
            "s0 computes the activation function again, s1 copies both from the host, s2 sends the "
            "input again, s3 computes the inside again, s4 does both, auto takes the fastest that "
            "keeps the budget; default: none, both are kept",
            "{" + ",".join(STRATEGIES) + "}",
            alone=True,
        ),
        Flag(
            FLAGS[2],
            "device memory that a rank's MoE layers may take, e.g. 8GiB; auto chooses within it",
            "BYTES",
            alone=True,
            not_in_library="how many passes keep tensors of the experts at a time follows from "
            "Megatron's arguments; name chunks and strategy",
        ),
        Flag(
            FLAGS[3],
            "what an earlier run with auto logged, so that this one need not try it again",
            "FILE",
            alone=True,
            compared=lambda value, args: file_contents(value),
        ),
    )
    conflicts = CONFLICTS

    def check(self, run: Run) -> None:
        from .flags import MoERequest

        request = MoERequest.of(run.args)
        if request is not None:
            if not run.library:  # there each layer is checked by its own configuration
                request.check(run.args, _splits(run))
            run.experts_in_chunks = not request.stock

    def start(self, run: Run) -> Sequence[Callback]:
        from .flags import MoERequest

        request, schedule = MoERequest.of(run.args), run.schedule
        if request is None:
            return ()
        from ....moe.plan import LayerPlan
        from ....schedule.effects import peak_sets
        from .choice import ChosenMoE
        from .flags import check_budget, stock_sets
        from .layer import FixedPolicy, PipelinedMoE

        def sets(chunks: int, microbatches: int) -> list[int]:
            if schedule is None:
                pp = run.args.pipeline_model_parallel_size
                return stock_sets(pp, chunks, microbatches)
            return peak_sets(schedule.plan(microbatches).ranks)

        if not request.chooses:
            policy = FixedPolicy(LayerPlan.of(int(request.chunks), request.strategy))
        else:
            if request.budget_bytes is not None:
                check_budget(run.args, request.space(), request.budget_bytes, sets)
            policy = ChosenMoE(request.space(), request.budget_bytes, sets, request.costs)
        if run.args.rank == 0:
            logger.warning(
                "megatron_ext: %s on megatron-core %s", request.text(run.args), run.version
            )
        return (PipelinedMoE(policy, run.store if _splits(run) else None),)


def _splits(run: Run) -> bool:
    """True if weight gradients may wait for a pass of their own."""
    return run.request is not None and run.request.splits_backward
