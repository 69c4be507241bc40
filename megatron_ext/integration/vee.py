"""V placement inside Megatron: rank r holds stages r and 2p-1-r, so rank 0 holds both ends.

Megatron derives a stage's role from its rank and virtual stage in several places, each written
for its own loop order. These seams give the V answer in each of them.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..schedule.placement import Placement
from .seams import Seam

CHUNKS = 2


def is_first_stage(pp_rank: int, vp_stage: int | None) -> bool:
    """True for the model's first stage under V placement (the embedding)."""
    return pp_rank == 0 and vp_stage == 0


def is_last_stage(pp_rank: int, vp_stage: int | None) -> bool:
    """True for the model's last stage under V placement (final norm, output layer, loss)."""
    return pp_rank == 0 and vp_stage == CHUNKS - 1


def _pp_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


@functools.cache
def layer_layout(pp: int, num_layers: int) -> Any:
    """Megatron's layout object for a V: equally many layers a stage, first and last on rank 0.

    Everything that asks Megatron for layer counts, offsets or ids goes through this object:
    construction, layer numbers, ``sharded_state_dict``.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    placement = Placement.vee(pp)
    per_stage = num_layers // placement.num_stages
    stages = [[LayerType.decoder] * per_stage for _ in range(placement.num_stages)]
    stages[0].insert(0, LayerType.embedding)
    stages[-1].append(LayerType.loss)

    class VeeLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
        """``layout[rank][chunk]`` holds the V's stages; offsets count in stage order."""

        def __init__(self) -> None:
            in_loop_order = [stages[row[c]] for c in range(CHUNKS) for row in placement.stages]
            super().__init__(in_loop_order, pp)
            self.flatten_layout = [layer for stage in stages for layer in stage]

        def get_layer_offset(
            self,
            layer_type: Any = LayerType.decoder,
            vp_stage: int | None = None,
            pp_rank: int | None = None,
        ) -> int:
            rank = _pp_rank() if pp_rank is None else pp_rank
            stage = placement.stages[rank][vp_stage or 0]
            return sum(layers.count(layer_type) for layers in stages[:stage])

    return VeeLayout()


def _config_post_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        # Configs of other models in the same process (a teacher, a draft) keep their own layout.
        if self.pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_layout is None:
            self.pipeline_model_parallel_layout = layer_layout(
                self.pipeline_model_parallel_size, self.num_layers
            )
        original(self)

    return __post_init__


def _is_pipeline_last_stage(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if ignore_virtual or vp_stage is None:
            # "The last rank", which logs; the executor brings the losses there.
            return original(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
        return is_last_stage(_pp_rank(), vp_stage)

    return is_pipeline_last_stage


def _initialize_model_parallel(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        # Scripts pass a function of their own that names the first and the last rank.
        kwargs["get_embedding_ranks"] = _embedding_ranks
        original(*args, **kwargs)

    return initialize_model_parallel


def _embedding_ranks(pp_ranks: list[int], *unused: Any) -> list[int]:
    return [pp_ranks[0]]


def _gpt_model_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    first_chunk: weakref.ref[Any] | None = None

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal first_chunk
        bound = signature.bind(self, *args, **kwargs)
        vp_stage = bound.arguments.get("vp_stage")
        if vp_stage is None:
            original(self, *args, **kwargs)
            return
        rank = _pp_rank()
        bound.arguments["pre_process"] = is_first_stage(rank, vp_stage)
        bound.arguments["post_process"] = is_last_stage(rank, vp_stage)
        original(*bound.args, **bound.kwargs)
        if self.pre_process:
            first_chunk = weakref.ref(self)
        elif self.post_process and self.share_embeddings_and_output_weights:
            # Megatron starts the second copy at zero and fills it by an all-reduce between first
            # and last rank; here both copies are on this rank, and chunk 0 was built just before.
            model = first_chunk() if first_chunk is not None else None
            if model is None:
                raise RuntimeError("tied weights under V placement need chunk 0 built first")
            with torch.no_grad():
                self.output_layer.weight.copy_(model.shared_embedding_or_output_weight())

    return __init__


def _float16_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        from megatron.core.transformer import module

        if self.vp_stage is None:
            return original(self, *inputs, fp32_output=fp32_output, **kwargs)
        rank = _pp_rank()
        if is_first_stage(rank, self.vp_stage):
            inputs = module.fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        if is_last_stage(rank, self.vp_stage) and fp32_output:
            outputs = module.float16_to_fp32(outputs)
        return outputs

    return forward


def _batch_on_this_tp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        # Stock broadcasts only tokens on the first rank and only labels on the last; rank 0 of a
        # V needs both, which is what Megatron does for a rank with multi-token prediction.
        if _pp_rank() == 0:
            kwargs["mtp_on_this_rank"] = True
        return original(*args, **kwargs)

    return get_batch_on_this_tp_rank


SEAMS = (
    Seam(
        ("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",),
        _config_post_init,
        ("self",),
        "layers and checkpoint keys would be in loop order",
    ),
    Seam(
        ("megatron.core.parallel_state:is_pipeline_last_stage",),
        _is_pipeline_last_stage,
        ("ignore_virtual", "vp_stage"),
        "no labels where the loss is computed",
    ),
    Seam(
        ("megatron.core.parallel_state:initialize_model_parallel",),
        _initialize_model_parallel,
        ("get_embedding_ranks",),
        "the embedding all-reduce would wait for a rank without an embedding",
    ),
    Seam(
        ("megatron.core.models.gpt.gpt_model:GPTModel.__init__",),
        _gpt_model_init,
        ("self", "config", "pre_process", "post_process", "vp_stage"),
        "no embedding or output layer on the ranks that need them",
    ),
    Seam(
        ("megatron.core.transformer.module:Float16Module.forward",),
        _float16_forward,
        ("self", "inputs", "fp32_output"),
        "inputs and outputs cast on the wrong stages",
    ),
)
# Only where the training package is in use: megatron-core's wheel had none before 0.17.
TRAINING_SEAMS = (
    Seam(
        (
            "megatron.core.utils:get_batch_on_this_tp_rank",
            "megatron.training.utils:get_batch_on_this_tp_rank",
        ),
        _batch_on_this_tp_rank,
        ("mtp_on_this_rank",),
        "no labels on rank 0 with tensor parallelism",
    ),
)


def reduce_tied_gradients(chunks: list[Any]) -> None:
    """Share the sum of the two gradients of tied weights, as stock's embedding all-reduce does.

    Both copies lie on rank 0, in buckets of their own that are sharded alike, so this may follow
    the data-parallel reduction and needs no communication.

    Args:
        chunks: this rank's unwrapped model chunks, in order.
    """
    tied = getattr(chunks[0], "share_embeddings_and_output_weights", False)
    if _pp_rank() == 0 and tied:
        first, last = (c.shared_embedding_or_output_weight() for c in (chunks[0], chunks[-1]))
        first.main_grad.add_(last.main_grad)
        last.main_grad.copy_(first.main_grad)
