"""Layers of each stage: Megatron's layout object and layer pattern, for the stages of a V.

Stock Megatron has four ways to say how many layers a stage gets (evenly, fewer on the first and
last, embedding and loss counted as layers, or a layout string). Under V placement all of them
become one layout string in *model* order, which Megatron's own validation reads, and one layout
object. A hybrid model has a pattern instead, which lists its layers and may list its stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from .._input import attribute
from ..plan.layout import spread
from ..schedule.placement import Placement
from .arguments import MegatronArgs
from .errors import named_errors
from .rules import Rule

_LAYOUT = "--pipeline-model-parallel-layout"
OF_VEE = Rule(
    "--pp-schedule {schedule} needs 2 * {pp} = {stages} stages with --num-layers {layers}",
    f"{_LAYOUT} has {{found}} stages with {{found_layers}} layers",
    "list the stages in model order",
)
PREDICTION_LAST = Rule(
    "{flag} needs multi-token prediction on the last stage",
    f"{_LAYOUT} {{layout}} has its layers (m) before that",
    "put them on the last stage, as in 'tmL'",
)
STAGES = Rule(
    "the schedule needs {stages} stages",
    "{flag} {text} lists {found}",
    "list {stages} in model order{example}",
)
ONE_WAY = Rule(
    "--account-for-*-in-pipeline-split does not support --decoder-first/last-pipeline-num-layers",
    "both say what the first and the last stage have",
    "use one of them",
)
EVEN_LAYERS = Rule(
    "--pp-schedule {schedule} needs layers that spread evenly over {stages} stages",
    "{middle} (of --num-layers {layers}, embedding and loss as asked) are left for {even} of them",
    "make --num-layers a multiple of {stages}, or set --decoder-first-pipeline-num-layers and "
    f"--decoder-last-pipeline-num-layers, or {_LAYOUT} with {{stages}} stages",
)
EVEN_PATTERN = Rule(
    "the schedule needs layers that spread evenly over {stages} stages",
    "{flag} {text} has {layers}",
    "list the stages in model order, e.g. {example}",
)
RULES = (PREDICTION_LAST, STAGES, ONE_WAY, EVEN_LAYERS, EVEN_PATTERN)


def count_stages(text: str) -> int:
    """Number of stages in a string for ``--pipeline-model-parallel-layout``.

    Raises:
        ConfigError: Megatron cannot read it.
    """
    return len(_parsed(text))


def require_prediction_last(flag: str, layout: str) -> None:
    """Refuse a layout with layers of multi-token prediction before its last stage.

    Args:
        flag: that needs them there.

    Raises:
        ConfigError: it has some, or Megatron cannot read it.
    """
    early = any(layer.name == "mtp" for stage in _parsed(layout)[:-1] for layer in stage)
    PREDICTION_LAST.require(not early, flag=flag, layout=layout)


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
        layers = sum(layer.name == "decoder" for stage in parsed for layer in stage)
        OF_VEE.require(
            len(parsed) == stages and layers == args.num_layers,
            schedule=args.pp_schedule,
            pp=pp,
            stages=stages,
            layers=args.num_layers,
            found=len(parsed),
            found_layers=layers,
        )
        require_prediction_last(f"--pp-schedule {args.pp_schedule} under V placement", given)
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
        return [len(stage) for stage in pattern.stages_of(args, stages)]
    given = args.pipeline_model_parallel_layout
    given = getattr(given, "input_data", given)  # Megatron's validation makes an object of it
    if given is None:
        chunks = stages // args.pipeline_model_parallel_size if loop else 1
        return _counts(args, stages, chunks)
    parsed = _parsed(given)
    kept, found = len(parsed) == stages, len(parsed)
    STAGES.require(kept, stages=stages, flag=_LAYOUT, text=given, found=found, example="")
    return [sum(layer.name == "decoder" for layer in stage) for stage in parsed]


def _counts(args: MegatronArgs, stages: int, chunks: int = 1) -> list[int]:
    """Transformer layers of each stage; ``chunks`` as ``spread``."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    taken = (
        int(bool(args.account_for_embedding_in_pipeline_split)),
        int(bool(args.account_for_loss_in_pipeline_split)),
    )
    both = any(taken) and (first is not None or last is not None)
    ONE_WAY.require(not both)
    counts = spread(args.num_layers or 0, stages, first, last, taken, chunks)
    if counts is None:
        middle = (args.num_layers or 0) + sum(taken) - (first or 0) - (last or 0)
        even = stages - (first is not None) - (last is not None)
        facts = {"schedule": args.pp_schedule, "stages": stages, "layers": args.num_layers}
        raise EVEN_LAYERS.broken(**facts, middle=middle, even=even)
    return counts


@dataclass(frozen=True)
class LayerPattern:
    """A hybrid model's layers: one symbol a layer, ``|`` between pipeline stages.

    Attributes:
        main: of the decoder, in model order.
        mtp: what follows it, from the first ``/`` on: multi-token prediction, on the last stage.
        flag: that it was given with.
    """

    main: str
    mtp: str = ""
    flag: str = "--hybrid-layer-pattern"

    @classmethod
    def of(cls, args: MegatronArgs) -> LayerPattern | None:
        """The pattern in Megatron's arguments; None if the model has none."""
        # The second is deprecated since core_v0.17, and the only one before.
        for flag in (cls.flag, "--hybrid-override-pattern"):
            text = getattr(args, attribute(flag), None)
            if text:
                main, slash, mtp = text.partition("/")
                return cls(main, slash + mtp, flag)
        return None

    @property
    def text(self) -> str:
        """As Megatron takes it."""
        return self.main + self.mtp

    @property
    def layers(self) -> int:
        """Of the decoder."""
        return len(self.main.replace("|", ""))

    @property
    def listed(self) -> int | None:
        """How many stages it lists; None without ``|``: Megatron spreads the layers evenly."""
        return self.main.count("|") + 1 if "|" in self.main else None

    def stages(self, number: int, first: int | None = None, last: int | None = None) -> list[str]:
        """The layers of each stage in model order, as listed or cut by Megatron's own rule.

        Args:
            first, last: layers of the first and the last stage, where none are listed.

        Raises:
            ConfigError: another number of stages is listed, or the layers do not spread.
        """
        facts = {"stages": number, "flag": self.flag, "text": self.text}
        example = self.example(number)
        if self.listed is not None:
            listed = self.listed == number
            STAGES.require(listed, **facts, found=self.listed, example=f", e.g. {example}")
            return self.main.split("|")
        counts = spread(self.layers, number, first, last)
        if counts is None:
            raise EVEN_PATTERN.broken(**facts, layers=self.layers, example=example)
        return self._cut(counts)

    def stages_of(self, args: MegatronArgs, number: int) -> list[str]:
        """``stages`` with the first and last that Megatron's flags ask for."""
        first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        return self.stages(number, first, last)

    def list_stages(self, args: MegatronArgs, number: int) -> None:
        """Write these stages into the pattern in Megatron's arguments.

        Raises:
            ConfigError: see ``stages``.
        """
        pattern = replace(self, main="|".join(self.stages_of(args, number)))
        setattr(args, attribute(self.flag), pattern.text)
        args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None

    def example(self, number: int) -> str:
        """The flag with these layers on ``number`` stages, as evenly as can be."""
        edges = [self.layers * i // number for i in range(number + 1)]
        stages = self._cut([end - start for start, end in pairwise(edges)])
        return f"{self.flag} '{'|'.join(stages)}{self.mtp}'"

    def _cut(self, counts: Sequence[int]) -> list[str]:
        plain = self.main.replace("|", "")
        return [plain[end - count : end] for count, end in zip(counts, accumulate(counts))]


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
