"""V placement: rank r holds stages r and 2p-1-r, so rank 0 holds both ends of the model.

Megatron derives a stage's role from its rank and virtual stage in several places, each written
for its own loop order. These hooks give the V answer in each of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...building import FirstChunk
from ...callbacks import Callback, Step
from ...errors import ConfigError
from ...feature import Feature, Run
from ...hooks import bound, hooked
from ...layout import vee_layout
from ...model_classes import (
    generates,
    refuse_text,
)
from ...support import TIED, require
from ...targets import (
    BRIDGE_EMBEDDINGS,
    CONFIG_POST_INIT,
    GPT_FORWARD,
    GPT_INIT,
    PARALLEL_SAVE,
    PARALLEL_STATE,
    TIED_GRADIENTS,
)
from ...utils import chunks_of, has_second_embedding, tied_embeddings, unwrapped
from .relay import Relay
from .roles import CHUNKS, Roles, is_first_stage, is_last_stage, pp_rank

_PLACED = "_megatron_ext_placed"  # attribute of a model chunk that was built for a V


class VPlacement(Roles, Feature):
    """On for schedules with V placement. It brings what rank 0 computes to where Megatron expects
    it."""

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.request.vee:
            return ()
        self._name = run.request.name
        self._relay = Relay()
        self.training = run.training or "megatron.training" in sys.modules
        self._first_chunk = FirstChunk("a model with tied weights under V placement")
        # Models with tied embeddings, and those whose gradients of both copies are not added yet.
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._apart: weakref.WeakSet[Any] = weakref.WeakSet()
        return (self,)

    # --- where Megatron builds a model ---

    @hooked(CONFIG_POST_INIT, "layers and checkpoint keys would be in loop order")
    def _config_post_init(self, original: Callable[..., None], config: Any) -> None:
        layout, pp = config.pipeline_model_parallel_layout, config.pipeline_model_parallel_size
        # A string is what our validation made of the flags. Without one (a library's own config)
        # the layers are spread evenly.
        if pp > 1 and layout is None:
            per_stage, rest = divmod(config.num_layers, CHUNKS * pp)
            if rest:
                raise ConfigError(
                    f"a V on {pp} ranks has {CHUNKS * pp} stages, and num_layers is "
                    f"{config.num_layers}; make it a multiple, or set a layout"
                )
            stages = ["t" * per_stage] * (CHUNKS * pp)
            layout = "E" + "|".join(stages) + "m" * (config.mtp_num_layers or 0) + "L"
        if pp > 1 and isinstance(layout, str):
            config.pipeline_model_parallel_layout = vee_layout(pp, layout)
        original(config)

    @hooked(PARALLEL_STATE, "the embedding all-reduce would wait for a rank without an embedding")
    def _initialize_model_parallel(
        self, original: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        # Scripts pass a function of their own that names the first and the last rank.
        kwargs["get_embedding_ranks"] = _embedding_ranks
        original(*args, **kwargs)

    @hooked(GPT_INIT, "no embedding or output layer on the ranks that need them")
    def _model_init(
        self, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
    ) -> None:
        call = bound(original, model, *args, **kwargs)
        vp_stage = call.arguments.get("vp_stage")
        if vp_stage is None:
            original(model, *args, **kwargs)
            return
        setattr(model, _PLACED, True)
        rank = pp_rank()
        call.arguments["pre_process"] = is_first_stage(rank, vp_stage)
        call.arguments["post_process"] = is_last_stage(rank, vp_stage)
        original(*call.args, **call.kwargs)
        if model.pre_process:
            self._first_chunk.set(model)
        elif model.post_process and has_second_embedding(model):
            # Megatron starts the second copy at zero and fills it by an all-reduce between first
            # and last rank; here both copies are on this rank, and chunk 0 was built just before.
            first = self._first_chunk.get()
            with torch.no_grad():
                mine = model.shared_embedding_or_output_weight()
                mine.copy_(first.shared_embedding_or_output_weight())

    @hooked(GPT_FORWARD, "inference would pass tensors between the wrong stages")
    def _model_forward(
        self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Inference passes tensors from rank to rank itself, in the order of Megatron's placement.
        if generates(kwargs):
            raise refuse_text("--pp-schedule")
        return original(model, *args, **kwargs)

    @hooked(
        BRIDGE_EMBEDDINGS,
        "the output layer of a model with tied embeddings would not be loaded",
        when=lambda self: BRIDGE_EMBEDDINGS.loaded,
    )
    def _broadcast_shared_embeddings(
        self, original: Callable[..., None], bridge: Any, megatron_model: Any
    ) -> None:
        # The original has the embedding on one rank and the output layer on another; here it
        # would fill rank 0's output layer from memory that nobody has written.
        chunks = [unwrapped(model) for model in chunks_of(megatron_model)]
        found = tied_embeddings(pp_rank(), chunks)
        if found is not None:
            found[1].data.copy_(found[0].data)

    @hooked(PARALLEL_SAVE, "a checkpoint with tied embeddings would not be saved")
    def _apply_saving_parallelization(
        self, original: Callable[..., Any], strategy: Any, state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Megatron has a tensor saved by one data-parallel rank, which here has it twice.
        once = without_second_copies(state, set())
        state.clear()  # the strategy itself goes on with this object
        state.update(once)
        return original(strategy, state, *args, **kwargs)

    def _require_placed(self, models: Sequence[Any]) -> None:
        """Raises:
        ConfigError: stages lie as Megatron places them, or the model is another one.
        """
        for chunk in map(unwrapped, models):
            if not hasattr(chunk, _PLACED):
                raise ConfigError(
                    f"--pp-schedule {self._name} needs a GPTModel that is built after "
                    f"megatron_ext.enable(), but this {type(chunk).__name__} was not; use zb-h1 or "
                    "interleaved-zb for other models"
                )

    # --- an iteration ---

    def begin(self, step: Step) -> None:
        self._require_placed(step.call.iteration.models)
        self._require_equal_copies(step)
        self.running = True

    def _require_equal_copies(self, step: Step) -> None:
        """Once a model, and after a step whose gradients were not added: rank 0 has both copies of
        tied embeddings, and their gradients are added, so they would stay apart."""
        chunks = [unwrapped(model) for model in step.call.iteration.models]
        found: Any = tied_embeddings(pp_rank(), chunks)
        alike = found is None or found[0].requires_grad == found[1].requires_grad
        fix = "freeze all of them or none"
        require(TIED, alike, found="one of them is frozen", fix=fix)
        trained = chunks[0] in self._apart
        if step.training:
            self._apart.add(chunks[0])
        if chunks[0] in self._checked and not trained:
            return
        self._checked.add(chunks[0])
        fix = "load a torch_dist checkpoint"
        if trained:
            fix = "finalize gradients by Megatron's finalize_model_grads"
        require(TIED, found is None or torch.equal(*found), found="they differ", fix=fix)

    def passes_done(self, step: Step, watchdog: Any) -> None:
        self._relay.start(
            step.plan.placement,
            step.call.group,
            step.runner,
            step.channel.device,
            watchdog,
            step.channel.options,
        )

    def returning(self, step: Step) -> None:
        losses = self._relay.losses()
        self.running = False
        if losses is not None:
            step.losses = losses
        elif step.rank != step.call.group.size() - 1:
            step.losses = []  # as in stock, so that a sum over the pipeline has them once

    @hooked(TIED_GRADIENTS, "copies of tied weights would drift apart where a trainer finalizes")
    def _reduce_tied(
        self, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(model, *args, **kwargs)
        self._add_tied(chunks_of(model))

    def gradients_reduced(self, step: Step) -> None:
        self._add_tied(step.call.iteration.models)  # by a trainer's function, not of Megatron's

    def _add_tied(self, models: Sequence[Any]) -> None:
        """Once after a step."""
        chunks = [unwrapped(model) for model in models]
        if chunks[0] in self._apart:
            self._apart.remove(chunks[0])
            reduce_tied_gradients(chunks)

    def dropped(self, step: Step) -> None:
        self._apart.discard(unwrapped(step.call.iteration.models[0]))
        self._relay = Relay()  # the peer may have ended

    def close(self) -> None:
        self.running = True


def _embedding_ranks(pp_ranks: list[int], *unused: Any) -> list[int]:
    return [pp_ranks[0]]


def without_second_copies(state: Any, seen: set[Any]) -> Any:
    """A sharded state without tensors that it has already: tied weights and their optimizer states.

    Args:
        state: nested dictionaries and lists.
        seen: keys and offsets of the tensors before it.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    def first(value: Any) -> bool:
        if not isinstance(value, ShardedTensor):
            return True
        place = value.key, value.global_offset
        known = place in seen
        seen.add(place)
        return not known

    if isinstance(state, dict):
        kept = {name: value for name, value in state.items() if first(value)}
        return {name: without_second_copies(value, seen) for name, value in kept.items()}
    if isinstance(state, list):
        return [without_second_copies(value, seen) for value in state if first(value)]
    return state


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
