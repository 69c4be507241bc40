"""``--moe-pipeline-chunks``: MPipeMoE layers in chunks of tokens, with memory reuse."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from ....plan.moe_conflicts import CONFLICTS
from ....schedule.effects import peak_calls, peak_sets
from ...callbacks import Callback
from ...feature import Feature, Flag, Needs, Run
from ...hooks import bound, hooked
from ...targets import PARALLEL_STATE
from ...utils import file_contents, most_microbatches
from . import queues
from .choice import ChosenMoE
from .flags import FLAGS, RULES, MoERequest, check_budget, of_whole, stock_sets
from .host import HostArenas
from .layer import FixedPolicy, LayerStep, PipelinedMoE

logger = logging.getLogger(__name__)

CHUNKS = ("off", "auto", "1", "2", "4", "8")
STRATEGIES = ("none", "s0", "s1", "s2", "s3", "s4", "auto")
_ON = Needs({FLAGS[0]: ()}, f"{FLAGS[0]} 2 (1 is the whole batch at once)")
_CHOOSES = Needs(
    {FLAGS[0]: ("auto",), FLAGS[1]: ("auto",)},
    f"{FLAGS[0]} auto or {FLAGS[1]} auto to choose by it",
)


class MoE(Feature):
    """On with ``--moe-pipeline-chunks``, with or without a schedule of ours."""

    flags = (
        Flag(
            FLAGS[0],
            "chunks of tokens in which every MoE layer runs dispatch, experts and combine, so that "
            "communication and computation overlap; auto tries them in training, with Megatron's "
            "own layer; default: off",
            alone=True,
            choices=CHUNKS,
        ),
        Flag(
            FLAGS[1],
            "how the experts' input and the tensors inside are restored for the backward pass: "
            "s0 computes the activation function again, s1 copies both from the host, s2 sends the "
            "input again, s3 computes the inside again, s4 does both, auto takes the fastest that "
            "keeps the budget; default: none, both are kept",
            alone=True,
            choices=STRATEGIES,
            needs=_ON,
            idle="none",
        ),
        Flag(
            FLAGS[2],
            "device memory that a rank's MoE layers may take, e.g. 8GiB; auto chooses within it",
            "BYTES",
            alone=True,
            needs=_CHOOSES,
            not_in_library="how many passes keep tensors of the experts at a time follows from "
            "Megatron's arguments; name chunks and strategy",
        ),
        Flag(
            FLAGS[3],
            "file with the log of an earlier run with auto, whose trials this run then skips",
            "FILE",
            alone=True,
            needs=_CHOOSES,
            compared=lambda value, args: file_contents(value),
        ),
        Flag(
            FLAGS[4],
            "host memory that a rank pins for what s1 to s3 copy, e.g. 32GiB; with auto, the most "
            "that it may pin; what does not fit stays on the device; default: the need of balanced "
            "routing and a quarter more",
            "BYTES",
            alone=True,
            needs=_ON,
        ),
    )
    conflicts = CONFLICTS
    rules = RULES

    def check_flags(self, run: Run) -> None:
        request = MoERequest.of(run.args)
        if request is not None:
            run.experts_in_chunks = not request.stock
            if request.chunks != "1":
                queues.set_default()

    def check(self, run: Run) -> None:
        request = MoERequest.of(run.args)
        if request is not None and not run.library:  # there each layer is checked by its own
            request.check(run.args, _splits(run))

    def validating(self, run: Run) -> AbstractContextManager[None]:
        request = MoERequest.of(run.args)
        if request is None or request.chunks == "1" or queues.one_queue():
            return nullcontext()
        return queues.without_demand(run.args.rank)

    def start(self, run: Run) -> Sequence[Callback]:
        request, schedule = MoERequest.of(run.args), run.schedule
        if request is None:
            return ()

        def most(
            peak: Callable[..., list[int]],
            whole: bool,
            pp: int,
            chunks: int,
            microbatches: int,
            plan: Any,
        ) -> list[int]:
            if plan is None or plan.microbatches < microbatches:
                if schedule is None:
                    return stock_sets(pp, chunks, microbatches)
                plan = schedule.plan(microbatches)
            found = peak(plan.ranks)
            return of_whole(found, plan) if whole else found

        # Passes in flight: as they are, and as so many of whole microbatches.
        sets = functools.partial(most, peak_sets, False)
        whole_sets = functools.partial(most, peak_sets, True)
        calls = functools.partial(most, peak_calls, True)

        if not request.chooses:
            policy = FixedPolicy(request.plan)
        else:
            if request.budget_bytes is not None:
                check_budget(run.args, request.space(), request.budget_bytes, whole_sets)
            policy = ChosenMoE(request.space(), request.budget_bytes, sets, request.costs)
        if run.args.rank == 0:
            level = logging.INFO if run.schedule is None else logging.DEBUG  # few lines at a start
            logger.log(level, "%s on megatron-core %s", request.text(run.args), run.version)
            if request.chunks not in ("1", "2") and queues.one_queue():
                logger.warning("%s", queues.ONE_QUEUE)
        store = run.store if _splits(run) else None
        layers = PipelinedMoE(policy, store, scheduled=run.request is not None)
        callbacks: list[Callback] = [layers]
        if request.copying():
            step = 0 if run.library else most_microbatches(run.args)
            strategies, budget = request.copying(), request.host_bytes
            callbacks.append(HostArenas(layers, policy, strategies, calls, budget, step))
        self._request, self._said = request, False
        if run.library:
            layers.at_steps.append(self._note_dense)
        return (*callbacks, self)

    @hooked(
        PARALLEL_STATE,
        "messages of MoE chunks would wait for the experts' kernels",
        when=lambda self: not self._request.stock,
    )
    def _with_priority(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Messages of experts go on a stream of high priority.

        Transformer Engine runs grouped products on streams of priority -1; a message of priority 0
        would wait until no block of theirs is pending.
        """
        given = bound(original, *args, **kwargs).arguments
        # Megatron makes options of NCCL for these groups, whatever the backend is.
        if given.get("expert_model_parallel_size", 1) > 1 and queues.nccl():
            groups = given.get("high_priority_stream_groups") or []
            given["high_priority_stream_groups"] = [*groups, *({"ep"} - set(groups))]
        return original(**given)  # by name: what it wraps may replace one of them

    def _note_dense(self, step: LayerStep) -> None:
        """Say once that the flag has no effect on a model without experts; others may come."""
        from megatron.core.utils import get_model_config

        config = get_model_config(step.models[0])
        if not self._said and not getattr(config, "num_moe_experts", None):
            self._said = True
            if dist.get_rank() == 0:
                logger.warning(
                    "%s %s has no effect on a model without MoE layers (num_moe_experts is not "
                    "set), which is trained as it is; drop it if no other model comes",
                    FLAGS[0],
                    self._request.chunks,
                )


def _splits(run: Run) -> bool:
    """True if weight gradients may wait for a pass of their own."""
    return run.request is not None and run.request.splits_backward
