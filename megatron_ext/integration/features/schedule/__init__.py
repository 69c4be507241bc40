"""``--pp-schedule``: Megatron runs one of our pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....schedule import AUTO, NAMES
from ....schedule.generators.registry import takers
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...feature import Feature, Flag, Run
from ...hooks import hooked
from ...targets import DATASETS, TRAIN_STEP
from ...utils import file_contents


def _compared(value: str, args: MegatronArgs) -> str:
    return value if value in (*NAMES, AUTO) else file_contents(value)


_CAPPED = " and ".join(takers("takes_memory_cap"))
_FLAGS = (
    Flag(
        "--pp-schedule",
        f"pipeline schedule: {', '.join(NAMES)}, {AUTO} (the fastest that "
        "fits the cap, decided once for the full batch), or a schedule file",
        "NAME|FILE",
        compared=_compared,
        not_in_library="it would choose the placement of the model's stages, which must be known "
        "before the model is built; run `megatron-ext compare` for your sizes and name one",
        not_in_library_as=(AUTO, lambda value, args: value == AUTO),
    ),
    Flag(
        "--pp-memory-cap",
        f"cap of {_CAPPED} and auto, as a fraction of 1F1B's peak activation, e.g. 0.6, or as all "
        "bytes of a rank, e.g. 40GiB; auto's default is 1. With offload, of every schedule: what "
        "stays on the device",
        "X",
        not_in_library="bytes need the sizes of the model and its optimizer before they are built; "
        "run `megatron-ext plan` for them and give the cap as a fraction of 1F1B's peak",
        not_in_library_as=("40GiB", lambda value, args: value.strip().endswith("B")),
    ),
    Flag(
        "--pp-cost",
        "times of one microbatch on one rank, in any unit, that shape the order; 1,1,1 for equal "
        "ones. Default: the model's FLOPs, until passes are measured",
        "F,B,W[,HOP]",
    ),
    Flag(
        "--pp-p2p",
        "communicators of messages: edge (default; one for each direction between two ranks) or "
        "pipeline (Megatron's group)",
        choices=("edge", "pipeline"),
    ),
)


class Schedule(Feature):
    """Runs the schedule; most other features work on it."""

    flags = _FLAGS

    def check(self, run: Run) -> None:
        if run.request is not None:
            from .validate import check_facts

            check_facts(run)

    def check_derived(self, run: Run) -> None:
        if run.request is not None:
            from .validate import after_megatron, fails_late

            run.request = run.schedule = after_megatron(run.args, run.request)
            run.chunks = run.schedule.placement.chunks
            run.notices += fails_late(run.args, run.request, run.chunks)

    def start(self, run: Run) -> Sequence[Callback]:
        if run.pipeline is None or run.request is None:
            return ()
        self._run, self._pipeline, self._name = run, run.pipeline, run.request.name
        return (self,)

    @hooked(
        TRAIN_STEP,
        "a rank that waits before or behind its passes would not be watched",
        when=lambda self: self._run.training,
    )
    def _watched(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._pipeline.watched(original, *args, **kwargs)

    # Attention over packed documents (``thd``) needs their lengths on all stages, so ``get_batch``
    # of Megatron's scripts fetches on all of them. With ``--sft`` the scripts build a dataset on
    # every stage, but with ``--dataloader-inter-document-masking`` on the first and the last alone:
    # a stage between them, as a V or virtual stages have already on two ranks, would find no data.
    @hooked(
        DATASETS,
        "stages between the first and the last would have no lengths of packed documents",
        when=lambda self: getattr(self._run.args, "dataloader_inter_document_masking", False),
    )
    def _on_all_stages(
        self,
        original: Callable[..., None],
        builder: Any,
        cls: Any,
        sizes: Any,
        is_built_on_rank: Callable[[], bool],
        config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        from megatron.core import parallel_state

        def on_all_stages() -> bool:
            return int(parallel_state.get_tensor_model_parallel_rank()) == 0

        original(builder, cls, sizes, on_all_stages, config, *args, **kwargs)
