"""``--moe-pipeline-chunks``: MPipeMoE layers in chunks of tokens, with memory reuse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ...callbacks import Callback, HooksOnly
from ...feature import Conflict, Feature, Flag, Run
from ...utils import file_contents

logger = logging.getLogger(__name__)

CHUNKS = ("off", "auto", "1", "2", "4", "8")
STRATEGIES = ("none", "s1", "s2", "s3", "s4", "auto")
RESTORED = "s1 to s4"
FLAGS = (
    "--moe-pipeline-chunks",
    "--moe-memory-reuse",
    "--moe-memory-budget",
    "--moe-pipeline-costs",
    "--moe-host-budget",
)

_ONE_CALL = "it works on a whole layer at once, which runs in chunks here; drop it"
_SCHEDULE = "its schedule calls the parts of an MoE layer itself and would pass the chunks by"
_THRICE = "the experts would be computed three times"
_QUANTIZED = "each chunk would be scaled and padded on its own; drop one of both"
_GRAPH = "a captured graph has fixed sizes, and chunks have those of the routing; drop it"
_SHARDED = "it gathers and frees parameters around whole layers; use --use-distributed-optimizer"

CONFLICTS = (
    Conflict(
        "--moe-token-dispatcher-type",
        "its communication is inside its kernels, and chunks have their own; set it to alltoall",
        off=("alltoall", "allgather"),
    ),
    Conflict(
        "--moe-pad-expert-input-to-capacity",
        "the capacity is that of the whole batch; drop it (--moe-expert-capacity-factor works)",
    ),
    Conflict("--overlap-moe-expert-parallel-comm", f"{_SCHEDULE}; drop one of both"),
    Conflict("--delay-wgrad-compute", f"{_ONE_CALL}, or use --pp-schedule, which delays them too"),
    Conflict("--overlap-dispatch-backward-with-experts-wgrad", _ONE_CALL),
    Conflict("--moe-shared-expert-overlap", _ONE_CALL),
    Conflict(
        "--recompute-granularity",
        f"{_THRICE}; use --moe-memory-reuse none, or recompute selectively",
        values=("full",),
        only=RESTORED,
    ),
    Conflict(
        "--recompute-modules",
        f"{_THRICE}; drop moe there, or use --moe-memory-reuse none",
        values=("moe",),
        only=RESTORED,
    ),
    Conflict(
        "--moe-layer-recompute",
        f"{_THRICE}; drop it, or use --moe-memory-reuse none",
        only=RESTORED,
    ),
    Conflict(
        "--recompute-modules",
        "its recomputation does not run inside a backward pass of ours; drop moe_act there, "
        "--moe-memory-reuse s3 or s4 saves more",
        values=("moe_act",),
    ),
    Conflict(
        "--offload-modules",
        "it expects each layer's tensors once a pass; drop them there, --moe-memory-reuse s1 "
        "offloads both",
        values=("expert_fc1", "moe_act", "fused_group_mlp"),
    ),
    Conflict("--moe-paged-stash", f"{_ONE_CALL}; --moe-memory-reuse s1 offloads too"),
    Conflict("--cpu-offloading-num-layers", _ONE_CALL + " and use --moe-memory-reuse s1"),
    Conflict("--mlp-chunks-for-training", "it cuts before routing; drop it", off=(1,)),
    Conflict("--enable-cuda-graph", _GRAPH),
    Conflict("--external-cuda-graph", _GRAPH),
    Conflict("--cuda-graph-impl", _GRAPH + ", or set it to none", off=("none",)),
    Conflict("--fp8-format", _QUANTIZED),
    Conflict("--fp4-format", _QUANTIZED),
    Conflict("--moe-router-padding-for-quantization", _QUANTIZED),
    Conflict("--moe-router-padding-for-fp8", _QUANTIZED),
    Conflict("--use-megatron-fsdp", _SHARDED),
    Conflict("--use-torch-fsdp2", _SHARDED),
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
            "s1 copies both from the host, s2 sends the input again, s3 computes the inside again, "
            "s4 does both, auto takes the fastest that keeps the budget; default: none, both are "
            "kept",
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
        Flag(
            FLAGS[4],
            "host memory that a rank pins for what s1 to s3 copy, e.g. 32GiB, and with auto may "
            "pin; what finds no room stays on the device; default: what balanced routing needs, "
            "and a quarter more",
            "BYTES",
            alone=True,
        ),
    )
    conflicts = CONFLICTS

    def check(self, run: Run) -> None:
        from .flags import MoERequest

        request = MoERequest.of(run.args)
        if request is not None:
            if not run.library:  # there each layer is checked by its own configuration
                request.check(run.args)
            run.experts_in_chunks = not request.stock
            if request.chunks != "1":
                from .queues import set_default

                set_default()

    def validating(self, run: Run) -> AbstractContextManager[None]:
        from .flags import MoERequest
        from .queues import one_queue, without_demand

        request = MoERequest.of(run.args)
        if request is None or request.chunks == "1" or one_queue():
            return nullcontext()
        return without_demand(run.args.rank)

    def start(self, run: Run) -> Sequence[Callback]:
        from .flags import MoERequest

        request, schedule = MoERequest.of(run.args), run.schedule
        if request is None:
            return ()
        from ....moe.plan import LayerPlan
        from ....schedule.effects import peak_calls, peak_sets
        from . import queues
        from .choice import ChosenMoE
        from .flags import check_budget, most_microbatches, stock_sets
        from .host import HostArenas
        from .layer import FixedPolicy, PipelinedMoE

        def sets(chunks: int, microbatches: int) -> list[int]:
            if schedule is None:
                return stock_sets(_pp(run), chunks, microbatches)
            return peak_sets(schedule.plan(microbatches).ranks)

        def calls(chunks: int, microbatches: int) -> list[int]:
            if schedule is None:
                return stock_sets(_pp(run), chunks, microbatches)
            return peak_calls(schedule.plan(microbatches).ranks)

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
            if request.chunks not in ("1", "2") and queues.one_queue():
                logger.warning("megatron_ext: %s", queues.ONE_QUEUE)
        layers = PipelinedMoE(policy, run.store)
        callbacks: list[Callback] = [layers]
        if request.copying():
            most = 0 if run.library else most_microbatches(run.args)
            strategies, budget = request.copying(), request.host_bytes
            callbacks.append(HostArenas(layers, policy, strategies, calls, budget, most))
        if not request.stock:
            callbacks.append(HooksOnly((queues.priority_hook(),)))
        return callbacks


def _pp(run: Run) -> int:
    """Pipeline ranks; a library knows them when a step begins."""
    if not run.library:
        return run.args.pipeline_model_parallel_size
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_world_size())
