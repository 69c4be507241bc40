"""Layers of each stage: Megatron's layout object and layer pattern, for the stages of a V.

Stock Megatron has four ways to say how many layers a stage gets (evenly, fewer on the first and
last, embedding and loss counted as layers, or a layout string). Under V placement all of them
become one layout string in *model* order, which Megatron's own validation reads, and one layout
object. A hybrid model has a pattern instead; it keeps Megatron's own placement.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .._input import attribute
from ..plan.layout import spread
from ..schedule.placement import Placement
from .arguments import MegatronArgs
from .errors import ConfigError, named_errors

_LAYOUT = "--pipeline-model-parallel-layout"


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

    with named_errors(f"{_LAYOUT} {text}", AssertionError):
        stages: list[list[Any]] = PipelineParallelLayerLayout.parse_str_to_list(text)
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
        early = any(layer.name == "mtp" for stage in parsed[:-1] for layer in stage)
        if early or len(parsed) != stages:
            raise ConfigError(
                f"a V on {pp} ranks has {stages} stages, with multi-token prediction on the last, "
                f"but {_LAYOUT} is {given}"
            )
        return str(given)
    counts = _counts(args, stages)
    texts = ["t" * count for count in counts]
    texts[0] = "E" + texts[0]
    texts[-1] += "m" * (args.mtp_num_layers or 0) + "L"
    return "|".join(texts)


def layer_counts(args: MegatronArgs, stages: int, *, loop: bool = False) -> list[int]:
    """Layers of each of ``stages`` stages, in model order, as Megatron's flags say.

    Args:
        loop: these are placed as Megatron does, several on a rank.

    Raises:
        ConfigError: the layers do not fit the stages.
    """
    pattern = LayerPattern.of(args)
    if pattern is not None:
        return pattern.counts(args, stages)
    given = args.pipeline_model_parallel_layout
    given = getattr(given, "input_data", given)  # Megatron's validation makes an object of it
    if given is None:
        chunks = stages // args.pipeline_model_parallel_size if loop else 1
        return _counts(args, stages, chunks)
    parsed = _parsed(given)
    if len(parsed) != stages:
        raise ConfigError(f"the schedule has {stages} stages, but {_LAYOUT} {given} {len(parsed)}")
    return [sum(layer.name == "decoder" for layer in stage) for stage in parsed]


def _counts(args: MegatronArgs, stages: int, chunks: int = 1) -> list[int]:
    """Transformer layers of each stage; ``chunks`` as ``spread``."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    taken = (
        int(bool(args.account_for_embedding_in_pipeline_split)),
        int(bool(args.account_for_loss_in_pipeline_split)),
    )
    counts = spread(args.num_layers or 0, stages, first, last, taken, chunks)
    if counts is None:
        raise ConfigError(
            f"--num-layers {args.num_layers} do not spread evenly over {stages} stages; make it a "
            f"multiple of {stages}, or list them with {_LAYOUT}"
        )
    return counts


@dataclass(frozen=True)
class LayerPattern:
    """A hybrid model's layers: one symbol a layer, ``|`` between pipeline stages.

    Attributes:
        main: of the decoder, in model order.
        flag: that it was given with.
    """

    main: str
    flag: str

    @classmethod
    def of(cls, args: MegatronArgs) -> LayerPattern | None:
        """The pattern in Megatron's arguments; None if the model has none."""
        # Megatron itself makes the first of the second, later.
        for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
            text = getattr(args, attribute(flag), None)
            if text:
                return cls(text.partition("/")[0], flag)
        return None

    @property
    def listed(self) -> int | None:
        """How many stages it lists; None without ``|``: Megatron spreads the layers evenly."""
        return self.main.count("|") + 1 if "|" in self.main else None

    def counts(self, args: MegatronArgs, number: int) -> list[int]:
        """Layers of each of so many stages.

        Raises:
            ConfigError: another number of stages is listed, or the layers do not spread.
        """
        first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        counts: list[int] | None = [len(stage) for stage in self.main.split("|")]
        if self.listed is None:
            counts = spread(len(self.main), number, first, last)
        if counts is None or len(counts) != number:
            raise ConfigError(
                f"the schedule needs {number} stages; list them in {self.flag} {self.main}"
            )
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
