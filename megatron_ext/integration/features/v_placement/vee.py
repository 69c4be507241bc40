"""V placement inside Megatron: rank r holds stages r and 2p-1-r, so rank 0 holds both ends.

Megatron derives a stage's role from its rank and virtual stage in several places, each written
for its own loop order. These hooks give the V answer in each of them.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....runtime.watchdog import Watchdog
from ....schedule.placement import Placement
from ...building import Building
from ...callbacks import Callback, Step
from ...errors import ConfigError
from ...hooks import Hook, around
from ...layout import LayerPattern, vee_layout
from ...model_classes import hybrid_model_has_chunks, require_placed
from ...targets import (
    CONFIG_POST_INIT,
    GPT_FORWARD,
    GPT_INIT,
    HYBRID_FORWARD,
    HYBRID_INIT,
    HYBRID_SEGMENT,
    PARALLEL_STATE,
)
from ...utils import has_second_embedding, tied_embeddings, unwrapped
from .relay import Relay
from .roles import (
    CHUNKS,
    is_first_stage,
    is_last_stage,
    pp_rank,
    results_on_both,
    role_hooks,
    set_running,
)

_PLACED = "_megatron_ext_placed"  # attribute of a model chunk that was built for a V


def _config_post_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        layout, pp = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        # A string is what our validation made of the flags. Without one (a library's own config)
        # the layers are spread evenly. Hybrid models have a pattern of layers instead.
        if pp > 1 and layout is None and not self.is_hybrid_model:
            per_stage, rest = divmod(self.num_layers, CHUNKS * pp)
            if rest:
                raise ConfigError(
                    f"V placement on {pp} ranks has {CHUNKS * pp} stages, but num_layers is "
                    f"{self.num_layers}; make it a multiple or set pipeline_model_parallel_layout "
                    "(is_hybrid_model for a hybrid model)"
                )
            stages = ["t" * per_stage] * (CHUNKS * pp)
            layout = "E" + "|".join(stages) + "m" * (self.mtp_num_layers or 0) + "L"
        if pp > 1 and isinstance(layout, str):
            self.pipeline_model_parallel_layout = vee_layout(pp, layout)
        original(self)

    return __post_init__


def _initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # Scripts pass a function of their own that names the first and the last rank.
    kwargs["get_embedding_ranks"] = _embedding_ranks
    original(*args, **kwargs)


def _embedding_ranks(pp_ranks: list[int], *unused: Any) -> list[int]:
    return [pp_ranks[0]]


def _model_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    if "vp_stage" not in signature.parameters:
        refused: Callable[..., None] = around(_one_chunk)(original)
        return refused
    first_chunk: weakref.ref[Any] | None = None

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal first_chunk
        bound = signature.bind(self, *args, **kwargs)
        vp_stage = bound.arguments.get("vp_stage")
        if vp_stage is None:
            original(self, *args, **kwargs)
            return
        setattr(self, _PLACED, True)
        rank = pp_rank()
        bound.arguments["pre_process"] = is_first_stage(rank, vp_stage)
        bound.arguments["post_process"] = is_last_stage(rank, vp_stage)
        original(*bound.args, **bound.kwargs)
        if self.pre_process:
            first_chunk = weakref.ref(self)
        elif self.post_process and has_second_embedding(self):
            # Megatron starts the second copy at zero and fills it by an all-reduce between first
            # and last rank; here both copies are on this rank, and chunk 0 was built just before.
            model = first_chunk() if first_chunk is not None else None
            if model is None:
                raise RuntimeError("tied weights under V placement need chunk 0 built first")
            with torch.no_grad():
                mine = self.shared_embedding_or_output_weight()
                mine.copy_(model.shared_embedding_or_output_weight())

    return __init__


def _one_chunk(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"this Megatron's {type(self).__name__} has one chunk a rank and cannot be placed as a "
        "V; use a schedule with one chunk, e.g. --pp-schedule zb-h1, or megatron-core 0.17 or "
        "newer"
    )


def _select_pipeline_segment(
    original: Callable[..., Any],
    main_pattern: str,
    pp_group: Any,
    vp_stage: int | None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    **kwargs: Any,
) -> tuple[list[str], int]:
    first, last = first_stage_layers, last_stage_layers
    if vp_stage is None:
        whole: tuple[list[str], int] = original(
            main_pattern, pp_group, vp_stage, first, last, **kwargs
        )
        return whole
    pp, rank = pp_group.size(), pp_group.rank()
    stages = LayerPattern(main_pattern).stages(CHUNKS * pp, first, last)
    stage = Placement.vee(pp).stages[rank][vp_stage]
    return list(stages[stage]), sum(map(len, stages[:stage]))


def _model_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    # Inference passes tensors from rank to rank itself, in the order of Megatron's placement.
    if any(kwargs.get(name) is not None for name in ("inference_context", "inference_params")):
        raise ConfigError(
            "a model in V placement cannot generate text: inference runs its own pipeline in "
            "Megatron's order of stages; start it without --pp-schedule (a torch_dist "
            "checkpoint loads there)"
        )
    return original(self, *args, **kwargs)


HOOKS = (
    Hook(CONFIG_POST_INIT, _config_post_init, "layers and checkpoint keys would be in loop order"),
    Hook(
        PARALLEL_STATE,
        around(_initialize_model_parallel),
        "the embedding all-reduce would wait for a rank without an embedding",
    ),
    Hook(GPT_INIT, _model_init, "no embedding or output layer on the ranks that need them"),
    Hook(
        GPT_FORWARD, around(_model_forward), "inference would pass tensors between the wrong stages"
    ),
    Hook(
        HYBRID_INIT,
        _model_init,
        "no embedding or output layer of a hybrid model on the ranks that need them",
    ),
    Hook(
        HYBRID_FORWARD,
        around(_model_forward),
        "inference with a hybrid model would pass tensors between the wrong stages",
    ),
)
# Before core_v0.17 Megatron lacks it: its hybrid models have one chunk a rank, which
# ``_model_init`` refuses.
SEGMENT_HOOKS = (
    Hook(
        HYBRID_SEGMENT, around(_select_pipeline_segment), "layers of a hybrid model in loop order"
    ),
)


def require_embedding_ranks(name: str) -> None:
    """Megatron's group for embeddings must have been made with the hook on it in force.

    Raises:
        ConfigError: it reduces tied embeddings over a rank that has none.
    """
    from megatron.core import parallel_state

    # Megatron keeps the group's list of ranks when it destroys the group.
    group = parallel_state._EMBEDDING_GROUP
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    if parallel_state.model_parallel_is_initialized() and len(ranks) > 1:
        raise ConfigError(
            f"--pp-schedule {name} has embedding and output layer on one rank, but Megatron's "
            f"embedding group was made for ranks {ranks}; call megatron_ext.enable() before "
            "initialize_model_parallel()"
        )


def reduce_tied_gradients(chunks: list[Any]) -> None:
    """Share the sum of the two gradients of tied weights, as stock's embedding all-reduce does.

    Both copies lie on rank 0, in buckets of their own that are sharded alike, so this may follow
    the data-parallel reduction and needs no communication.

    Args:
        chunks: this rank's unwrapped model chunks, in order.
    """
    found: Any = tied_embeddings(pp_rank(), chunks)
    if found is not None:
        first, last = (getattr(weight, "main_grad", weight.grad) for weight in found)
        if first is not None and last is not None:  # not frozen
            last.copy_(first.add_(last))


class VeeCallback(Callback):
    """Brings what rank 0 computes to where Megatron expects it.

    Args:
        training: Megatron's training package is in use.
    """

    def __init__(self, training: bool, name: str) -> None:
        self._training, self._name = training, name
        self._relay = Relay()

    def hooks(self) -> Sequence[Hook]:
        found = [*HOOKS, *(SEGMENT_HOOKS if hybrid_model_has_chunks() else ())]
        found += role_hooks(self._training)
        if self._training:
            why = "a model that cannot be placed as a V would be loaded before it is refused"
            found += Building(why, built=self._require_placed).hooks()
        return found

    def _require_placed(self, models: Sequence[Any]) -> None:
        chunks = [unwrapped(m) for m in models]
        require_placed(chunks, self._name)
        for chunk in chunks:
            if not hasattr(chunk, _PLACED):
                raise ConfigError(
                    f"--pp-schedule {self._name} places stages as a V, but this "
                    f"{type(chunk).__name__} was built in Megatron's own order of stages; call "
                    "megatron_ext.enable() before the model is built"
                )

    def begin(self, step: Step) -> None:
        self._require_placed(step.call.iteration.models)
        set_running(True)

    def passes_done(self, step: Step, watchdog: Watchdog) -> None:
        self._relay.start(
            step.plan.placement,
            step.call.group,
            step.runner,
            step.channel.device,
            watchdog,
            step.plan.is_extended,
            step.channel.options,
        )

    def returning(self, step: Step) -> None:
        losses = self._relay.losses()
        set_running(False)
        if losses is not None:
            step.losses = losses
        elif step.rank != step.call.group.size() - 1 and not results_on_both():
            step.losses = []  # as in stock, so that a sum over the pipeline has them once

    def gradients_reduced(self, step: Step) -> None:
        reduce_tied_gradients([unwrapped(m) for m in step.call.iteration.models])

    def dropped(self, step: Step, failed: bool) -> None:
        if failed:  # the peer may have ended
            self._relay = Relay()

    def close(self) -> None:
        self._relay.finish()
        set_running(True)
