"""Layers of each stage: Megatron's layout object, for the stages of a V.

Stock Megatron has four ways to say how many layers a stage gets (evenly, fewer on the first and
last, embedding and loss counted as layers, or a layout string). Under V placement all of them
become one layout string in *model* order, which Megatron's own validation reads, and one layout
object.
"""

from __future__ import annotations

import functools
from typing import Any

from ..schedule.placement import Placement
from .arguments import MegatronArgs
from .errors import ConfigError


def count_stages(text: str) -> int:
    """Number of stages in a string for ``--pipeline-model-parallel-layout``.

    Raises:
        ConfigError: Megatron cannot read it.
    """
    return len(_parsed(text))


def _parsed(text: str) -> list[list[Any]]:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    try:
        stages: list[list[Any]] = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError as error:
        raise ConfigError(f"--pipeline-model-parallel-layout {text}: {error}") from None
    return stages


def vee_layout_text(args: MegatronArgs, pp: int) -> str:
    """The layout of a V of ``pp`` ranks that Megatron's flags in ``args`` ask for, in model order.

    ``--decoder-first-pipeline-num-layers`` and ``...-last-...`` mean the first and last of the
    2 * pp stages, as they mean the first and last pipeline rank without virtual stages.

    Raises:
        ConfigError: the layers do not fit the stages.
    """
    given, stages = args.pipeline_model_parallel_layout, 2 * pp
    if given is not None:
        parsed = _parsed(given)
        layers = sum(layer.name == "decoder" for stage in parsed for layer in stage)
        if len(parsed) != stages or layers != args.num_layers:
            raise ConfigError(
                f"--pp-schedule {args.pp_schedule}: --pipeline-model-parallel-layout has "
                f"{len(parsed)} stages with {layers} layers, but a V on {pp} ranks has 2 * {pp} = "
                f"{stages} stages and --num-layers is {args.num_layers}; list the stages in model "
                "order"
            )
        if any(layer.name == "mtp" for stage in parsed[:-1] for layer in stage):
            raise ConfigError(
                f"--pp-schedule {args.pp_schedule}: --pipeline-model-parallel-layout {given} has "
                "multi-token prediction outside the last stage; under V placement put it there, "
                "on the rank that holds the embedding"
            )
        return str(given)
    counts = _counts(args, stages)
    texts = ["t" * count for count in counts]
    texts[0] = "E" + texts[0]
    texts[-1] += "m" * (args.mtp_num_layers or 0) + "L"
    return "|".join(texts)


def layer_counts(args: MegatronArgs, stages: int) -> list[int]:
    """Transformer layers of each of ``stages`` stages, in model order, as Megatron's flags say.

    Raises:
        ConfigError: the layers do not fit the stages.
    """
    given = args.pipeline_model_parallel_layout
    given = getattr(given, "input_data", given)  # Megatron's validation makes an object of it
    if given is None:
        return _counts(args, stages)
    parsed = _parsed(given)
    if len(parsed) != stages:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {given} has {len(parsed)} stages, but the schedule "
            f"has {stages}; list {stages}"
        )
    return [sum(layer.name == "decoder" for layer in stage) for stage in parsed]


def _counts(args: MegatronArgs, stages: int) -> list[int]:
    """Transformer layers of each stage."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    taken = [
        -1 if args.account_for_embedding_in_pipeline_split else 0,
        -1 if args.account_for_loss_in_pipeline_split else 0,
    ]
    layers = args.num_layers or 0
    middle = layers - sum(taken) - (first or 0) - (last or 0)
    even = stages - (first is not None) - (last is not None)
    if any(taken) and (first is not None or last is not None):
        raise ConfigError(
            f"--pp-schedule {args.pp_schedule}: --account-for-*-in-pipeline-split cannot be "
            "combined with --decoder-first/last-pipeline-num-layers; use one of them"
        )
    if layers < 1 or middle < 0 or middle % even or (even and middle // even + min(taken) < 0):
        raise ConfigError(
            f"--pp-schedule {args.pp_schedule} splits the layers evenly over {stages} stages, but "
            f"{middle} layers (--num-layers {args.num_layers}, embedding and loss as asked) are "
            f"left for {even} of them; make --num-layers a multiple of {stages}, or set "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or "
            f"--pipeline-model-parallel-layout with {stages} stages"
        )
    counts = [middle // even] * stages
    counts[0] = counts[0] + taken[0] if first is None else first
    counts[-1] = counts[-1] + taken[1] if last is None else last
    return counts


@functools.cache
def vee_layout(pp: int, text: str) -> Any:
    """Megatron's layout object for a V: ``text`` lists the 2 * pp stages in model order.

    Everything that asks Megatron for layer counts, offsets or ids goes through this object:
    construction, layer numbers, ``sharded_state_dict``.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    placement = Placement.vee(pp)
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)

    class VeeLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
        """``layout[rank][chunk]`` holds the V's stages; offsets count in stage order."""

        def __init__(self) -> None:
            in_loop_order = [
                stages[row[chunk]] for chunk in range(placement.chunks) for row in placement.stages
            ]
            super().__init__(in_loop_order, pp)
            self.flatten_layout = [layer for stage in stages for layer in stage]
            self.input_data = text

        def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
            super().validate_layer_layout(num_layers, mtp_num_layers)
            # Stock calls it standalone where multi-token prediction is not on the last rank, and
            # then exchanges shapes. Here it is on rank 0 together with the loss.
            return False

        def get_layer_offset(
            self,
            layer_type: Any = LayerType.decoder,
            vp_stage: int | None = None,
            pp_rank: int | None = None,
        ) -> int:
            rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
            stage = placement.stages[rank][vp_stage or 0]
            return sum(layers.count(layer_type) for layers in stages[:stage])

    return VeeLayout()
