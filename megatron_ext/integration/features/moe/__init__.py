"""``--moe-pipeline-chunks``: MPipeMoE layers in chunks of tokens, with memory reuse."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ...callbacks import Callback
from ...feature import Feature, Flag, Run
from ...hooks import bound, hooked
from ...targets import PARALLEL_STATE
from .flags import FLAGS, MoERequest
from .layer import PipelinedMoE

logger = logging.getLogger(__name__)

CHUNKS = ("off", "auto", "1", "2", "4", "8")
STRATEGIES = ("none", "s0", "s1", "s2", "s3", "s4", "auto")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


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
            "fits; default: none, both are kept",
            alone=True,
            choices=STRATEGIES,
        ),
    )

    def check_flags(self, run: Run) -> None:
        request = MoERequest.of(run.args)
        if request is not None:
            run.experts_in_chunks = not request.stock

    def start(self, run: Run) -> Sequence[Callback]:
        self._request = request = MoERequest.of(run.args)
        if request is None:
            return ()
        if run.args.rank == 0:
            level = logging.INFO if run.schedule is None else logging.DEBUG  # few lines at a start
            logger.log(level, "%s on megatron-core %s", request.text(run.args), run.version)
            if not request.stock and os.environ.get(_QUEUES) == "1":
                logger.warning(
                    "%s=1: the experts wait for the messages issued before them; export %s=32 "
                    "where Megatron allows it",
                    *(_QUEUES, _QUEUES),
                )
        splits = run.request is not None and run.request.splits_backward
        store = run.store if splits else None
        layers = PipelinedMoE(request.plans(), store, scheduled=run.request is not None)
        return (layers, self)

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
        nccl = dist.is_nccl_available() and dist.get_backend() != "gloo"
        if given.get("expert_model_parallel_size", 1) > 1 and nccl:
            groups = given.get("high_priority_stream_groups") or []
            given["high_priority_stream_groups"] = [*groups, *({"ep"} - set(groups))]
        return original(**given)  # by name: what it wraps may replace one of them
